"""Fair shares and overload: the real admission, placement and cost model in front of workers in virtual time.

`fairness`: nine tenants ask for half of their tenth of the capacity each; a tenth one asks nothing, its share, or ten
times that.
`overload`: one, four or ten tenants together ask once and twice what the workers can do, every request with a TTFT SLO.
The time a decision takes is real. Workers are described in benchmarks/virtual_cluster.py.

    python -m benchmarks.admission
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import console, print_table, write_result
from benchmarks.virtual_cluster import Arrival, Job, VirtualCluster, poisson
from tandem.protocol.config import RouterConfig

NUM_TENANTS = 10
GREED = 10.0  # times the fair share
GREEDY = "greedy"
AT_WORKERS_S = 1e9  # never reached, so that nothing waits in the router
WARM_UP_S = 20.0
SLOS_S = (2.0, 4.0, 8.0)
PROMPTS = {"as the others'": (64, 1024), "short": (16, 128)}
CELLS = (((2, 2), "as the others'"), ((2, 2), "short"), ((8, 8), "as the others'"))
OVERLOADED = (2, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run that only shows whether the benchmark works")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=300.0, help="virtual seconds of each (default: %(default)s)")
    settings = parser.parse_args()
    if settings.quick:
        settings.seeds, settings.duration = 1, 40.0
    print(f"seeds 0 to {settings.seeds - 1}")
    results = {"fairness": fairness(settings), "overload": overload(settings)}
    write_result("admission", settings, results)
    return 0


def fairness(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """TTFT of the steady tenants beside a tenth one, by the load of the tenth and by the queueing discipline."""
    rows = []
    for pools, prompts in CELLS[: 1 if settings.quick else None]:
        rate = capacity(*pools)
        absent = _steady_ttft(settings, pools, rate, PROMPTS[prompts], 0, "fair")
        modest = _steady_ttft(settings, pools, rate, PROMPTS[prompts], 1, "fair")
        rows.append(_fairness_row(pools, prompts, 0, "fair", absent, absent, modest))
        rows.append(_fairness_row(pools, prompts, 1, "fair", modest, absent, modest))
        for order in ("fair", "by priority", "first come", "at the workers"):
            ttft = _steady_ttft(settings, pools, rate, PROMPTS[prompts], GREED, order)
            rows.append(_fairness_row(pools, prompts, GREED, order, ttft, absent, modest))
        console.print(f"[dim]measured fairness on {pools[0]}P{pools[1]}D, greedy prompts {prompts}[/]")
    print_table(
        "TTFT of nine steady tenants beside a tenth, by its load in shares, seconds",
        ["workers", "greedy prompts", "asks", "order", "p50", "p99", "p99 against none", "p99 against its share"],
        [
            [
                *(r[name] for name in ("pools", "prompts", "greed", "order", "p50", "p99")),
                f"{100 * r['change_from_none']:+.0f} %",
                f"{100 * r['change']:+.0f} %",
            ]
            for r in rows
        ],
        caption="by priority: all in one line, the steady requests more urgent than the greedy ones",
    )
    return rows


def overload(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Outcomes of requests with a TTFT SLO under overload."""
    rows = []
    pools = OVERLOADED
    rate = capacity(*pools)
    for slo_s in SLOS_S[: 1 if settings.quick else None]:
        for load in (1.0, 2.0):
            for num_tenants in (1, 4, 10):
                jobs: list[Job] = []
                for seed in range(settings.seeds):
                    rng = random.Random(seed)
                    arrivals = [
                        arrival
                        for number in range(num_tenants)
                        for arrival in poisson(
                            rng, f"t{number}", load * rate / num_tenants, settings.duration, slo_s=slo_s, num_retries=1
                        )
                    ]
                    jobs += VirtualCluster(num_prefill=pools[0], num_decode=pools[1], seed=seed).run(arrivals)
                rows.append(_overload_row(jobs, slo_s, load, num_tenants))
        console.print(f"[dim]measured overload, SLO {slo_s:g} s[/]")
    print_table(
        f"Requests with a TTFT SLO on {pools[0]}P{pools[1]}D; a load of 1 is {rate:.1f} a second",
        [
            "SLO s",
            "load",
            "tenants",
            "refused %",
            "admitted that kept it %",
            "TTFT p99 s",
            "refusal p50 / p99 / max ms",
            "let in when back as told %",
        ],
        [
            [
                r["slo_s"],
                r["load"],
                r["num_tenants"],
                f"{100 * r['refused']:.0f}",
                f"{100 * r['kept']:.1f}",
                r["p99_s"],
                " / ".join(f"{ms:.2g}" for ms in r["refusal_ms"]),
                f"{100 * r['retried']:.0f}",
            ]
            for r in rows
        ],
        caption="those that were dropped from the queue count as admitted; each refused client comes back once, after "
        "its Retry-After, and that counts as a request too",
    )
    return rows


def capacity(num_prefill: int, num_decode: int) -> float:
    """First tokens per second of workers that are always busy."""
    cluster = VirtualCluster(num_prefill=num_prefill, num_decode=num_decode)
    jobs = cluster.run(poisson(random.Random(0), "t", 10.0 * num_prefill, 60.0), until_s=60.0)
    return sum(not math.isnan(job.ttft_s) for job in jobs) / 60.0


def _steady_ttft(
    settings: argparse.Namespace,
    pools: tuple[int, int],
    rate: float,
    prompt_tokens: tuple[int, int],
    greed: float,
    order: str,
) -> list[float]:
    """TTFTs of the steady tenants' requests, in one of several orders, beside `greed` times a share of such prompts."""
    ttfts: list[float] = []
    for seed in range(settings.seeds):
        rng = random.Random(seed)
        share = rate / NUM_TENANTS
        arrivals = [
            arrival
            for number in range(NUM_TENANTS - 1)
            for arrival in poisson(rng, f"t{number}", share / 2, settings.duration)
        ]
        steady = set(map(id, arrivals))
        if greed:
            # Shares are of work: shorter requests come more often.
            factor = greed * sum(PROMPTS["as the others'"]) / sum(prompt_tokens)
            arrivals += poisson(rng, GREEDY, share * factor, settings.duration, prompt_tokens=prompt_tokens)
        if order in ("first come", "by priority"):
            steady, arrivals = _in_one_line(arrivals, steady, keeps_priority=order == "by priority")
        config = RouterConfig(
            local_prefill=False, max_worker_queue_s=AT_WORKERS_S if order == "at the workers" else 0.0
        )
        cluster = VirtualCluster(num_prefill=pools[0], num_decode=pools[1], config=config, seed=seed)
        for job in cluster.run(arrivals, until_s=settings.duration):
            if id(job.arrival) in steady and job.arrival.time_s > WARM_UP_S:
                # A request that still waits at the end has waited at least this long.
                ttfts.append(settings.duration - job.arrival.time_s if math.isnan(job.ttft_s) else job.ttft_s)
    return ttfts


def _in_one_line(arrivals: list[Arrival], steady: set[int], *, keeps_priority: bool) -> tuple[set[int], list[Arrival]]:
    """The same requests as one tenant's, and which of them are steady."""
    line = [replace(a, tenant="all", priority=int(keeps_priority and a.tenant == GREEDY)) for a in arrivals]
    return {id(new) for old, new in zip(arrivals, line, strict=True) if id(old) in steady}, line


def _fairness_row(
    pools: tuple[int, int],
    prompts: str,
    greed: float,
    order: str,
    ttft: list[float],
    absent: list[float],
    modest: list[float],
) -> dict[str, Any]:
    p50, p99 = np.percentile(ttft, [50, 99])
    return {
        "pools": f"{pools[0]}P{pools[1]}D",
        "prompts": prompts,
        "greed": greed,
        "order": order,
        "p50": float(p50),
        "p99": float(p99),
        "change_from_none": float(p99 / np.percentile(absent, 99)) - 1,
        "change": float(p99 / np.percentile(modest, 99)) - 1,
    }


def _overload_row(jobs: list[Job], slo_s: float, load: float, num_tenants: int) -> dict[str, Any]:
    refused = [job for job in jobs if job.is_refused]
    admitted = [job for job in jobs if not job.is_refused]
    retries = [job.retry for job in refused if job.retry is not None]
    durations_ms = [1e3 * job.decision_s for job in refused] or [math.nan]
    return {
        "slo_s": slo_s,
        "load": load,
        "num_tenants": num_tenants,
        "refused": len(refused) / len(jobs),
        "kept": sum(job.is_in_time for job in admitted) / len(admitted),
        "p99_s": float(np.nanpercentile([job.ttft_s for job in admitted], 99)),
        "refusal_ms": [float(ms) for ms in np.percentile(durations_ms, [50, 99, 100])],
        "retried": sum(not retry.is_refused for retry in retries) / max(len(retries), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
