"""Autoscalers on recorded traffic, in virtual time: SLO attainment and worker-hours. No model and no GPU.

It serves Mooncake's conversation trace and Azure's bursty code trace on H200s with a 70B model. It also serves the code
trace on one-core CPU workers, which it overloads. For 64 workers the conversation trace is served four times at once,
with other prompts and shifted in time. Each request of the code trace is repeated within a second, which keeps its
bursts: 2 and 8 times on H200s, 1 and 4 times on CPUs.

All runs use our routing. They differ in the sizes of the pools:

- every static split of 16 workers, and every eighth of 64;
- our autoscaler with flips only, and with workers added and removed too;
- reactive thresholds, Dynamo's planner and llm-d's rules (simulator/scaling.py says what of them is modelled).

Where a trace leaves times open, `--seeds` draw them; with several seeds a difference that is chance shows as
such. A new worker serves after 60 s. All begin with an even split of all workers. Worker-hours end with the last
arrival.

Stands behind the autoscaler's rules: a change of them is compared here with the best static split.

    python -m benchmarks.autoscaling
"""

from __future__ import annotations

import csv
import gzip
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments, console, print_rows, write_result
from tandem.loadtest.traces import TraceRequest, read_trace
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.simulator.arrivals import spread
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.measures import Slo, ttft_s
from tandem.simulator.scaling import DynamoPlanner, LlmdRules, Scaler, ScalingPlan, TandemScaler, Threshold
from tandem.simulator.simulation import simulate

_DATA = Path(__file__).parent / "data"
_SLO = Slo(10.0, 0.1)
_LIMITS = (_SLO.ttft_s, _SLO.itl_s)
_COPY_IDS = 10_000_000  # between the block ids of two copies of a trace
NUM_WORKERS = (16, 64)
# By name, the machine and the copies of the trace for 16 workers. On CPUs the code trace is more than 16 can serve.
LOADS = {
    "conversation": ("h200-70b", 1),
    "code": ("h200-70b", 2),
    "code on CPUs": ("cpu-135m", 1),
}

SCALERS: dict[str, Callable[[int], Scaler]] = {
    "tandem, flips": lambda num: TandemScaler(AutoscalerPolicy(max_workers=num)),
    "tandem": lambda num: TandemScaler(AutoscalerPolicy(max_workers=num, acts=frozenset({"flip", "add", "remove"}))),
    "thresholds": lambda num: Threshold(_LIMITS, num),
    "dynamo": lambda num: DynamoPlanner(_LIMITS, num),
    "llm-d": lambda num: LlmdRules(_LIMITS, num),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. Without a scaler it is a static split with `num_prefill` prefill workers."""

    trace: str
    num_workers: int
    scaler: str
    num_prefill: int
    num_decode: int
    seed: int = 0

    def run(self, num_requests: int | None) -> dict[str, Any]:
        """Serve the trace, or its first requests; a row of the table."""
        num_copies = self.num_workers // 16 * LOADS[self.trace][1]
        requests = load(self.trace, num_copies, self.seed)[:num_requests]
        machine = MACHINES[LOADS[self.trace][0]]
        cluster = Cluster(machine=machine, num_prefill=self.num_prefill, num_decode=self.num_decode)
        scaler = SCALERS[self.scaler](self.num_workers) if self.scaler else _Static()
        plan = ScalingPlan(scaler=scaler, slo=_LIMITS)
        outcome = simulate(requests, cluster, "tandem", scaling=plan)
        hours = max(requests[-1].arrival_s, 1e-9) / 3600
        return {
            "": self.scaler or f"static {self.num_prefill}P{self.num_decode}D",
            "in time %": 100 * sum(_SLO.is_met(job) for job in outcome.jobs) / len(outcome.jobs),
            "worker-hours": outcome.worker_s / 3600,
            "TTFT p99 s": float(np.quantile([ttft_s(job) for job in outcome.jobs], 0.99)),
            "moves/h": outcome.num_moves / hours,
        }


class _Static:
    """A `Scaler` that moves nothing."""

    def decide(self, _: object) -> tuple[()]:
        """Return no move."""
        return ()


def load(trace: str, num_copies: int, seed: int = 0) -> list[TraceRequest]:
    """The requests of `num_copies` copies of a trace, from second 0 on. `seed` draws what the trace leaves open."""
    rng = random.Random(seed)
    if trace.startswith("code"):
        rows = list(_read_azure(_DATA / "azure2023_code_a.csv.gz"))
        copies = [replace(row, arrival_s=row.arrival_s + rng.uniform(0, 1)) for row in rows for _ in range(num_copies)]
    else:
        rows = spread(list(read_trace(_DATA / "mooncake_conversation_a.jsonl.gz")), rng)
        span_s = rows[-1].arrival_s + 1.0
        copies = [
            _copy(row, number, number * span_s / num_copies, span_s) for row in rows for number in range(num_copies)
        ]
    copies.sort(key=lambda request: request.arrival_s)
    first_s = copies[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in copies]


def _copy(request: TraceRequest, number: int, shift_s: float, span_s: float) -> TraceRequest:
    ids = tuple(block + number * _COPY_IDS for block in request.block_ids)
    return replace(request, arrival_s=(request.arrival_s + shift_s) % span_s, block_ids=ids)


def _read_azure(path: Path) -> Sequence[TraceRequest]:
    """Read lengths and times only: prompts share nothing."""
    with gzip.open(path, "rt") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        TraceRequest(at_s - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
        for at_s, row in zip(times, rows, strict=True)
    ]


def cells(traces: Sequence[str], sizes: Sequence[int], seed: int) -> list[Cell]:
    """All runs with one seed."""
    found: list[Cell] = []
    for trace in traces:
        for num in sizes:
            found += [Cell(trace, num, scaler, num // 2, num // 2, seed) for scaler in sorted(SCALERS)]
            step = 1 if num <= 16 else num // 8
            found += [Cell(trace, num, "", count, num - count, seed) for count in range(step, num, step)]
    return found


def main() -> None:
    """Run all cells on all cores."""
    parser = arguments(__doc__, model=False)
    parser.option("--trace", sorted(LOADS), choices=sorted(LOADS))
    parser.option("--workers", list(NUM_WORKERS), quick=NUM_WORKERS[:1])
    parser.option("--seeds", [0], "of what a trace leaves open")
    args = parser.settings()
    todo = [cell for seed in args.seeds for cell in cells(args.trace, args.workers, seed)]
    todo = todo[:: 4 if args.quick else 1]
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = pool.map(partial(Cell.run, num_requests=300 if args.quick else None), todo)
        for cell, row in zip(todo, rows, strict=True):
            console.print(f"[dim]{cell.trace}, {cell.num_workers}: {row}[/]", soft_wrap=True)
            results[f"{cell.trace}, {cell.num_workers} workers, seed {cell.seed}"].append(row)
    for title, found in results.items():
        print_rows(title, sorted(found, key=itemgetter("in time %"), reverse=True))
    write_result("autoscaling", args, results)


if __name__ == "__main__":
    main()
