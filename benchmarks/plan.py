"""Does `tandem plan --from` predict what a server does under more load than it has seen?

Each server is loaded with 1 and 8 streams, its learned costs are read as `tandem plan --from` reads them, and a closed
loop of more streams is predicted by the simulator; then it is measured. Prompts share nothing, no drafts.

    python -m benchmarks.plan
    python -m benchmarks.plan --pictures docs/pictures    # only draws the pictures of docs/memory.md
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR,
    Server,
    arguments,
    console,
    measure_each,
    print_results,
    serving,
    verdict,
    write_result,
)
from benchmarks.throughput import POOL, load
from tandem.cli.plan import read_geometry
from tandem.loadtest.traces import TraceRequest, read_trace
from tandem.scheduling.planning.geometry import geometry_of
from tandem.scheduling.planning.hardware import GPUS
from tandem.scheduling.planning.learned import learned_from, live_worker
from tandem.scheduling.planning.roofline import plan_worker
from tandem.simulator.arrivals import chats
from tandem.simulator.cluster import Cluster
from tandem.simulator.measures import Slo, gap_distribution, summarize
from tandem.simulator.plan import Prices, memory_for, plan_shapes
from tandem.simulator.plan_report import plan_plots
from tandem.simulator.shapes import ShapeSearch, machine_of
from tandem.simulator.simulation import Outcome, simulate

_AIM = 0.15
_NO_SLO = Slo(1e9, 1e9)
_LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--calibrate", [1, 8], "streams that the server learns from")
    parser.option("--concurrency", [32], "streams that are predicted", quick=[8])
    parser.option("--requests-per-client", 4, "but at least 8 requests in all", quick=1)
    parser.option("--input-tokens", 128)
    parser.option("--output-tokens", 64)
    parser.option("--pictures", "", "folder for pictures of a plan for a 70B model and recorded conversations")
    settings = parser.settings()
    if settings.pictures:
        return draw_pictures(Path(settings.pictures))
    servers = [serving(setup, settings.model, POOL, "--speculate=off") for setup in (COLOCATED, ONE_PAIR)]
    results = measure_each(servers, partial(measure, settings=settings))
    print_results(f"Predicted from {settings.calibrate} streams", results, f"aim: within {_AIM:.0%}")
    write_result("plan", settings, results)
    return int(len(results) < len(servers))


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, object]:
    """Calibrate, then predict and measure each concurrency."""
    for concurrency in settings.calibrate:
        for seed in (concurrency, concurrency + 500):  # warms up, then learns
            await load(server, settings, concurrency, max(8, 4 * concurrency), seed=seed)
    await asyncio.sleep(2.0)  # a heartbeat brings what links and steps have measured
    body = await server.client.request_json("GET", "/v1/pools")
    row: dict[str, object] = {}
    for concurrency in settings.concurrency:
        num_requests = max(8, settings.requests_per_client * concurrency)
        predicted = predict(body, server, settings, concurrency, num_requests)
        found = await load(server, settings, concurrency, num_requests, seed=concurrency + 900)
        measured = {
            "tok/s": found.output_tokens_per_s,
            "TTFT p50 ms": found.ttft_s.p50 * 1e3,
            "ITL p50 ms": found.itl_s.p50 * 1e3,
        }
        for name, value in measured.items():
            row |= {f"{concurrency}: {name}": value, f"{concurrency}: {name} predicted": predicted[name]}
            error = predicted[name] / value - 1
            row[f"{concurrency}: {name} error"] = verdict(f"{error:+.0%}", abs(error) <= _AIM)
    return row


def predict(
    pools: object, server: Server, settings: argparse.Namespace, num_streams: int, num_requests: int
) -> dict[str, float]:
    """Output tokens/s, and p50 of TTFT and ITL in ms, of a closed loop on the server's own workers."""
    learned = learned_from(msgspec.json.encode(pools), server.url)
    worker = live_worker(learned, read_geometry(settings.model), server.url)
    machine = machine_of(worker, learned.kind, settings.input_tokens + settings.output_tokens / 2)
    is_pair = "prefill" in learned.workers
    cluster = Cluster(machine=machine, num_prefill=int(is_pair), num_decode=1)
    lengths = (settings.input_tokens, settings.output_tokens)
    outcome = closed_loop(cluster, num_streams, num_requests, *lengths)
    gaps_s, shares = gap_distribution(outcome.gaps)
    duration_s = max(job.end_s or 0.0 for job in outcome.jobs)
    return {
        "tok/s": num_requests * settings.output_tokens / duration_s,
        "TTFT p50 ms": summarize(outcome, _NO_SLO).ttft_p50_s * 1e3,
        "ITL p50 ms": float(gaps_s[int((shares < 0.5).sum())]) * 1e3,
    }


def closed_loop(
    cluster: Cluster, num_streams: int, num_requests: int, num_prompt_tokens: int, num_output_tokens: int
) -> Outcome:
    """Serve streams each of which sends its next request when the last one is answered.

    The simulator takes arrivals: each is set to the end of the request before it, until a run confirms them all.
    """
    arrivals = [0.0] * num_requests
    while True:
        requests = [TraceRequest(one, num_prompt_tokens, num_output_tokens, ()) for one in arrivals]
        outcome = simulate(requests, cluster, "tandem")
        ends = sorted(job.end_s or 0.0 for job in outcome.jobs)
        following = [0.0] * num_streams + ends[: num_requests - num_streams]
        if all(abs(new - old) < 1e-6 for new, old in zip(following, arrivals, strict=True)):
            return outcome
        arrivals = following


def draw_pictures(folder: Path) -> int:
    """A plan for Llama 3 70B on 8 H200 and the first half of Mooncake's conversations, as two small PNG files."""
    worker = plan_worker(geometry_of(_LLAMA_70B, "Llama 3 70B"), GPUS["h200"])
    recorded = list(read_trace(HERE / "benchmarks" / "data" / "mooncake_conversation_a.jsonl.gz"))
    requests = chats(600, random.Random(0))
    prices = Prices(dollars_per_hour=3.5, watts=GPUS["h200"].watts)
    search = ShapeSearch(requests=requests, machine=machine_of(worker, "NVIDIA H200 x 2", 3500), slo=Slo(2.0, 0.05))
    shapes = plan_shapes(search, worker, 4, search.pace)
    memory = memory_for(worker, 4, recorded, 3.0, prices)
    plots = plan_plots(worker, memory, shapes, search.output_tokens, prices, dpi=110)
    for name, png in plots.items():
        path = folder / f"plan-{name.split()[0].lower()}.png"
        path.write_bytes(png)
        console.print(f"written to {path}: {len(png):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
