"""Routing policies on recorded traffic, in virtual time: no model and no GPU, the product's own placement.

Part 1, reference semantics: private LRU caches, prefill only, everything known exactly (simulator/reference.py). `cost`
is the best published choice; ours must not fall behind it.

Part 2, whole workers: chunked prefill, decoding, block pools, handoffs; the router starts from its priors and learns
(simulator/simulation.py). Load is a share of what the workers could do without cache.

Stands behind README's "best mean TTFT in 43 of 48 cells"; `docs/routing_results.md` has the cells.

    python -m benchmarks.routing
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

from benchmarks.common import arguments, print_table, write_result
from tandem.simulator.arrivals import at_load, spread
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.measures import Slo, Summary, summarize
from tandem.simulator.policies import POLICIES
from tandem.simulator.reference import REFERENCE_POLICIES, ReferenceResult, route
from tandem.simulator.report import COLUMNS
from tandem.simulator.simulation import simulate
from tests.support.trace_replay import load

CAPACITIES = {
    "mooncake_conversation_a": (1000, 4000, 16_000),
    "mooncake_synthetic_a": (1000, 4000, 16_000),
    "weka_replay512_a": (4000, 16_000, 64_000),
}
NUM_WORKERS = (8, 64)
LOADS = (0.5, 0.7, 0.85, 0.95)
NO_PEERS = "tandem, no peer reads"


@dataclass(frozen=True, slots=True)
class Setup:
    """Workers, and the objective that judges them."""

    machine: str
    num_prefill: int
    num_decode: int
    slo: Slo

    @property
    def name(self) -> str:
        """For tables."""
        split = f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill else f"{self.num_decode} colocated"
        return f"{self.machine}, {split}"


# The split between prefill and decode workers keeps both about equally busy on the conversation trace.
SETUPS = (
    Setup("h200-8b", 0, 8, Slo(2.0, 0.05)),
    Setup("h200-8b", 6, 2, Slo(2.0, 0.05)),
    Setup("h200-70b", 0, 8, Slo(10.0, 0.1)),
    Setup("h200-70b", 6, 2, Slo(10.0, 0.1)),
)
_QUICK_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class ReferenceCell:
    """One run of part 1."""

    trace: str
    num_workers: int
    capacity: int
    policy: str

    def run(self, num_requests: int | None) -> ReferenceResult:
        """Route the trace, or its first requests."""
        requests = load(self.trace)[:num_requests]
        return route(requests, self.policy, num_workers=self.num_workers, capacity_blocks=self.capacity)


@dataclass(frozen=True, slots=True)
class FullCell:
    """One run of part 2."""

    trace: str
    setup: Setup
    load: float
    policy: str
    seed: int

    def run(self, num_requests: int | None) -> Summary:
        """Serve the trace, or its first requests."""
        setup = self.setup
        cluster = Cluster(
            machine=MACHINES[setup.machine],
            num_prefill=setup.num_prefill,
            num_decode=setup.num_decode,
            peer_reads=self.policy != NO_PEERS,
        )
        requests = spread(load(self.trace)[:num_requests], random.Random(self.seed))
        policy = "tandem" if self.policy == NO_PEERS else self.policy
        outcome = simulate(at_load(requests, self.load, cluster), cluster, policy, self.seed)
        return replace(summarize(outcome, setup.slo), policy=self.policy)


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--part", choices=("reference", "full"), help="only this one")
    parser.add_argument("--trace", choices=CAPACITIES, default="mooncake_conversation_a", help="of part 2")
    settings = parser.settings()
    results: dict[str, object] = {}
    with ProcessPoolExecutor() as pool:
        if settings.part != "full":
            results["reference"] = _reference(settings, pool)
        if settings.part != "reference":
            results["full"] = _full(settings, pool)
    write_result("routing", settings, results)


def _reference(settings: argparse.Namespace, pool: ProcessPoolExecutor) -> list[dict[str, object]]:
    capacities = {"mooncake_synthetic_a": (4000,)} if settings.quick else CAPACITIES
    cells = [
        ReferenceCell(trace, num_workers, capacity, policy)
        for trace in capacities
        for num_workers, capacity, policy in itertools.product(NUM_WORKERS, capacities[trace], REFERENCE_POLICIES)
    ]
    run = functools.partial(ReferenceCell.run, num_requests=_QUICK_REQUESTS if settings.quick else None)
    measured = list(pool.map(run, cells))
    rows = [
        [
            f"{cell.trace}, N={cell.num_workers}, C={cell.capacity}",
            cell.policy,
            f"{100 * result.token_hit_ratio:.2f}",
            f"{result.imbalance:.3f}",
            f"{result.wait_mean_s:.2f}",
            f"{result.wait_p99_s:.2f}",
        ]
        for cell, result in zip(cells, measured, strict=True)
    ]
    print_table("Reference semantics", ["trace", "policy", "token hit %", "imbalance", "wait mean s", "p99 s"], rows)
    return [{**asdict(cell), **asdict(result)} for cell, result in zip(cells, measured, strict=True)]


def _full(settings: argparse.Namespace, pool: ProcessPoolExecutor) -> list[dict[str, object]]:
    setups, loads = (SETUPS[:2], LOADS[2:3]) if settings.quick else (SETUPS, LOADS)
    cells = [
        FullCell(settings.trace, setup, share, policy, settings.seed)
        for setup, share, policy in itertools.product(setups, loads, [*POLICIES, NO_PEERS])
    ]
    run = functools.partial(FullCell.run, num_requests=_QUICK_REQUESTS if settings.quick else None)
    results = dict(zip(cells, pool.map(run, cells), strict=True))
    for setup, share in itertools.product(setups, loads):
        rows = [
            [write(result) for write in COLUMNS.values()]
            for cell, result in results.items()
            if (cell.setup, cell.load) == (setup, share)
        ]
        slo = f"SLO: TTFT {setup.slo.ttft_s:g} s, mean ITL {setup.slo.itl_s * 1e3:g} ms"
        print_table(f"{setup.name}, load {share:.0%}", list(COLUMNS), rows, f"{settings.trace}; {slo}")
    return [{**asdict(cell), **result.as_dict()} for cell, result in results.items()]


if __name__ == "__main__":
    main()
