"""Pools that follow the load: 2 + 2 workers under a load that swings, with the autoscaler on and off.

A fixed number of clients send one request after another. For a while these are long prompts with short answers, then
short prompts with long answers, then the first kind again. Each worker is held to a share of a core's time, so that a
worker taken from one pool brings the other what it would on a machine of its own; four workers that compete for two
cores gain nothing by playing another role. Per phase: TTFT, ITL and answered requests per second of the requests sent
in it. With the autoscaler on, the flips it made and how long each took, from the decision to a
drained worker and to one that serves in its new role.

    python -m benchmarks.role_flip
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import Server, Setup, arguments, console, ms, print_table, serving, write_result
from benchmarks.cpu_share import cpu_share
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.stats import Distribution

_FOUR_WORKERS = ("--prefill=2", "--decode=2", "--pool-gb=0.5")
_ON = Setup("autoscaler on", (*_FOUR_WORKERS, "--autoscale"))
_OFF = Setup("autoscaler off", (*_FOUR_WORKERS, "--no-autoscale"))

_TOKEN_IDS = range(1000, 4000)  # valid in any model with a vocabulary of a few thousand
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """What the clients send from `begin_s` on, counted from the start of the load."""

    name: str
    begin_s: float
    input_tokens: int
    output_tokens: int


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--phase-s", type=float, default=90.0, help="of each of the three")
    parser.add_argument("--core-share", type=float, default=0.45, help="of each worker; 0 = no limit, needs no root")
    parser.add_argument("--prefill-heavy", type=int, nargs=2, default=[1000, 4], metavar=("IN", "OUT"))
    parser.add_argument("--decode-heavy", type=int, nargs=2, default=[32, 256], metavar=("IN", "OUT"))
    settings = parser.parse_args()
    if settings.quick:
        settings.phase_s, settings.clients = 15.0, 8
    results = {}
    for setup in (_OFF, _ON):
        with serving(setup, settings.model) as server, _core_share(server, settings.core_share):
            results[setup.name] = run_measured(measure(server, settings))
    _show(results)
    write_result("role_flip", settings, results)
    return 0


def _core_share(server: Server, share: float) -> AbstractContextManager[None]:
    """All workers of the server, held to this share of a core each; 0 = as they are."""
    if not share:
        return nullcontext()
    pools = run_measured(server.client.request_json("GET", "/v1/pools"))
    return cpu_share([worker["pid"] for workers in pools["roles"].values() for worker in workers], share)


def phases(settings: argparse.Namespace) -> list[LoadPhase]:
    """Heavy in prefill, then in decode, then in prefill again."""
    prefill, decode = settings.prefill_heavy, settings.decode_heavy
    kinds = [("prefill-heavy", *prefill), ("decode-heavy", *decode), ("prefill-heavy again", *prefill)]
    return [LoadPhase(name, idx * settings.phase_s, *shape) for idx, (name, *shape) in enumerate(kinds)]


def phase_at(plan: Sequence[LoadPhase], time_s: float) -> LoadPhase:
    """The phase this moment belongs to."""
    return [phase for phase in plan if phase.begin_s <= time_s][-1]


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """The whole swing on one server."""
    plan = phases(settings)
    sent: list[tuple[LoadPhase, StreamTiming]] = []
    begun, end_s = time.perf_counter(), settings.phase_s * len(plan)

    async def client_loop(rng: random.Random) -> None:
        while (now := time.perf_counter() - begun) < end_s:
            phase = phase_at(plan, now)
            timing = await server.client.stream_completion(
                rng.choices(_TOKEN_IDS, k=phase.input_tokens),
                model=server.model,
                max_tokens=phase.output_tokens,
                ignore_eos=True,
                temperature=0.0,
            )
            sent.append((phase, timing))

    roles: list[dict[str, Any]] = []
    watching = asyncio.create_task(_watch_roles(server, begun, roles))
    async with asyncio.TaskGroup() as group:
        for idx in range(settings.clients):
            group.create_task(client_loop(random.Random(f"{settings.seed}/{idx}")))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    pools = await server.client.request_json("GET", "/v1/pools")
    return {
        "phases": {phase.name: _summary(phase, sent, begun, settings.phase_s) for phase in plan},
        "flips": pools["autoscaler"].get("flips", []),
        "roles": roles,
    }


async def _watch_roles(server: Server, begun: float, roles: list[dict[str, Any]]) -> None:
    """Note the number of workers in each role whenever it changes."""
    while True:
        pools = await server.client.request_json("GET", "/v1/pools")
        now = {role: len(workers) for role, workers in pools["roles"].items() if workers}
        if not roles or roles[-1]["roles"] != now:
            roles.append({"after_s": round(time.perf_counter() - begun, 1), "roles": now})
        await asyncio.sleep(_POLL_S)


def _summary(
    phase: LoadPhase, sent: list[tuple[LoadPhase, StreamTiming]], begun: float, phase_s: float
) -> dict[str, Any]:
    timings = [timing for sent_in, timing in sent if sent_in is phase]
    good = [timing for timing in timings if not timing.error]
    begin_s, end_s = begun + phase.begin_s, begun + phase.begin_s + phase_s
    num_answered = sum(not timing.error and begin_s <= timing.finished_s < end_s for _, timing in sent)
    return {
        "requests_per_s": num_answered / phase_s,
        "num_errors": len(timings) - len(good),
        "first_error": next((timing.error for timing in timings if timing.error), ""),
        "ttft_s": asdict(Distribution.of(timing.ttft_s for timing in good)),
        "itl_s": asdict(Distribution.of(gap for timing in good for gap in timing.itl_s)),
    }


def _show(results: dict[str, dict[str, Any]]) -> None:
    rows = [
        [
            phase,
            name,
            f"{summary['requests_per_s']:.2f}",
            *(ms(summary["ttft_s"][key]) for key in ("p50", "p99")),
            *(ms(summary["itl_s"][key]) for key in ("p50", "p99")),
            summary["num_errors"],
        ]
        for phase in next(iter(results.values()))["phases"]
        for name, result in results.items()
        for summary in [result["phases"][phase]]
    ]
    headings = ["phase", "set-up", "requests/s", "TTFT p50", "p99", "ITL p50", "p99", "errors"]
    print_table("2 + 2 workers, a load that swings", headings, rows, caption="ms")
    for name, result in results.items():
        moves = "; ".join(f"{move['after_s']} s: {move['roles']}" for move in result["roles"])
        console.print(f"{name}, workers per role: {moves}", markup=False)
    flips = results[_ON.name]["flips"]
    fields = ("worker", "from", "to", "drained_after_s", "serving_after_s", "not_drained", "failed", "reason")
    print_table("Flips, in seconds after the decision", fields, [[flip.get(f, "-") for f in fields] for flip in flips])


if __name__ == "__main__":
    sys.exit(main())
