"""What copies of the KV in case of a death cost while nobody dies: streams with `--copy-kv-tokens` and without.

All servers run on 1 + 2 workers at the same time, and bursts of the same load go to one after the other. A shared
machine's speed changes within seconds, so each burst is compared with the burst without copies of the same round; the
table has the medians over the rounds.

    python -m benchmarks.kv_copies
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from typing import Any

from benchmarks import throughput
from benchmarks.common import Server, Setup, arguments, console, ms, print_table, ratio, serving, write_result
from tandem.loadtest.client import run_measured

_FLAGS = ("--prefill=1", "--decode=2", "--pool-gb=0.5", "--no-autoscale", "--no-rebalance")

Burst = dict[str, Any]  # of a `LoadSummary`


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--every", type=int, nargs="+", default=[64, 256], help="values of --copy-kv-tokens")
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="at the same time (default: %(default)s)")
    parser.add_argument("--input-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=300)
    settings = parser.parse_args()
    if settings.quick:
        settings.every, settings.rounds, settings.streams, settings.output_tokens = [64], 1, 4, 80
    setups = [Setup(f"each {every} tokens" if every else "never", _flags(every)) for every in (0, *settings.every)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(setup, settings.model)) for setup in setups]
        bursts = run_measured(_measure_in_turn(servers, settings))
    _show(bursts)
    write_result("kv_copies", settings, bursts)
    return 0


def _flags(every: int) -> tuple[str, ...]:
    return (*_FLAGS, f"--copy-kv-tokens={every}")


async def _measure_in_turn(servers: list[Server], settings: argparse.Namespace) -> dict[str, list[Burst]]:
    bursts: dict[str, list[Burst]] = {server.name: [] for server in servers}
    for turn in range(settings.rounds + 1):
        order = servers if turn % 2 else servers[::-1]  # who goes first alternates
        for server in order:
            found = await throughput.load(server, settings, settings.streams, settings.streams, seed=turn)
            if turn:  # the first round warms up
                bursts[server.name].append(found)
        console.print(f"[dim]round {turn} of {settings.rounds}[/]")
    return bursts


def _show(bursts: dict[str, list[Burst]]) -> None:
    without = bursts["never"]
    rows = []
    for name, found in bursts.items():
        row: list[str] = [name]
        for keys in (("output_tokens_per_s",), ("itl_s", "p50"), ("itl_s", "p99")):
            values = [_figure(burst, keys) for burst in found]
            beside = [ratio(value, _figure(base, keys)) for value, base in zip(values, without, strict=True)]
            middle = statistics.median(values)
            row += [ms(middle) if keys[0] == "itl_s" else f"{middle:.0f}", f"{statistics.median(beside):.2f}"]
        rows.append(row)
    headings = ["copies", "tokens/s", "ratio", "ITL p50 ms", "ratio", "ITL p99 ms", "ratio"]
    print_table("Copies of the KV while nobody dies", headings, rows, caption="ratio: to no copies, of the same round")


def _figure(burst: Burst, keys: tuple[str, ...]) -> float:
    value: Any = burst
    for key in keys:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
