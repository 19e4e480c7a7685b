"""Eviction policies on recorded traffic: the share of prompt tokens found in a cache of C blocks of 512 tokens.

The rules of the cache are in `tests/support/trace_replay.py`. Stands behind the default policy in docs/tiers.md.

    python -m benchmarks.eviction
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks.common import print_table, write_result
from benchmarks.s3fifo import S3FIFO
from tandem.kv_transfer.eviction import POLICIES
from tests.support.trace_replay import CAPACITIES, TRACES, load, optimal, replay

OPTIMAL = "optimal"

_QUICK_TRACES, _QUICK_CAPACITIES = TRACES[1:2], CAPACITIES[:4]
_POLICIES = POLICIES | {"s3-fifo": S3FIFO}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest trace and caches")
    settings = parser.parse_args()
    traces, capacities = (_QUICK_TRACES, _QUICK_CAPACITIES) if settings.quick else (TRACES, CAPACITIES)
    names = [*sorted(_POLICIES), OPTIMAL]
    cells = [(trace, name, capacity) for trace in traces for name in names for capacity in capacities]
    with ProcessPoolExecutor() as pool:
        ratios = dict(zip(cells, pool.map(_measure, cells), strict=True))
    print_table(
        "Token hit ratio (%) by capacity in blocks",
        ["trace", "policy", *map(str, capacities)],
        [
            [trace, name, *(f"{100 * ratios[trace, name, capacity]:.2f}" for capacity in capacities)]
            for trace in traces
            for name in names
        ],
    )
    results = {
        trace: {name: {capacity: ratios[trace, name, capacity] for capacity in capacities} for name in names}
        for trace in traces
    }
    write_result("eviction", settings, results)
    return 0


def _measure(cell: tuple[str, str, int]) -> float:
    trace, name, capacity = cell
    return (
        optimal(load(trace), capacity) if name == OPTIMAL else replay(load(trace), _POLICIES[name](capacity), capacity)
    )


if __name__ == "__main__":
    sys.exit(main())
