"""Eviction policies on recorded traffic: the share of prompt tokens found in a cache of C blocks of 512 tokens.

`hit-density, ends` is told how answers ended, where the trace says so: the agents' trace. The rules of the cache are in
`tests/support/trace_replay.py`. S3-FIFO has a small queue for new keys, a main queue, and a memory of keys evicted from
the small one: Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023. Stands behind
the default policy in docs/tiers.md.

    python -m benchmarks.eviction
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ProcessPoolExecutor

from benchmarks.common import arguments, print_table, write_result
from tandem.kv_transfer.eviction import POLICIES
from tandem.kv_transfer.eviction.base import EvictionPolicy, Node
from tests.support.trace_replay import CAPACITIES, TRACES, load, load_ends, optimal, replay

OPTIMAL = "optimal"
_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3FIFO(EvictionPolicy):
    """S3-FIFO over leaves, with the paper's sizes.

    A leaf that was used moves to the main queue together with its ancestors, because they are used whenever it is. In
    the small queue they would take the place of keys that can be evicted.
    """

    num_queues = 2

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: dict[Hashable, None] = {}  # evicted from the small queue, oldest first

    def _on_hit(self, node: Node) -> None:
        node.num_uses = min(_MAX_USES, node.num_uses + 1)

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = self._tick
        if parent is not None and parent.num_children == 1:
            node.queue = parent.queue
            node.num_uses, parent.num_uses = parent.num_uses, 0
        if node.key in self._ghosts:
            del self._ghosts[node.key]
            node.queue = _MAIN

    def _on_remove(self, node: Node) -> None:
        if node.queue == _SMALL:
            self._ghosts[node.key] = None
            if len(self._ghosts) > self.capacity * (1 - _SMALL_SHARE):
                del self._ghosts[next(iter(self._ghosts))]

    def _inherit(self, parent: Node, child: Node) -> None:
        super()._inherit(parent, child)
        if child.queue == _MAIN != parent.queue:
            self._move(parent, _MAIN)

    def _choose(self) -> Node | None:
        while True:
            small, main = self._queues[_SMALL].peek(), self._queues[_MAIN].peek()
            is_small = main is None or self._sizes[_SMALL] >= self.capacity * _SMALL_SHARE
            node = small if small is not None and is_small else main
            if node is None or not node.num_uses:
                return node
            if node.queue == _SMALL:
                self._promote(node)
            else:
                node.num_uses -= 1
            self._tick += 1
            node.rank = self._tick
            self._offer(node)

    def _promote(self, leaf: Node) -> None:
        leaf.num_uses = 0
        node: Node | None = leaf
        while node is not None and node.queue == _SMALL:
            self._move(node, _MAIN)
            node = self._parent_of(node)


_POLICIES = POLICIES | {"s3-fifo": S3FIFO}
_WITH_ENDS = "hit-density, ends"


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--traces", list(TRACES), quick=TRACES[1:2])
    parser.option("--capacities", list(CAPACITIES), "in blocks", quick=CAPACITIES[:4])
    settings = parser.settings()
    traces, capacities = settings.traces, settings.capacities
    names = [*sorted(_POLICIES), _WITH_ENDS, OPTIMAL]
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


def _measure(cell: tuple[str, str, int]) -> float:
    trace, name, capacity = cell
    if name == OPTIMAL:
        return optimal(load(trace), capacity)
    policy, _, ends = name.partition(", ")
    return replay(load(trace), _POLICIES[policy](capacity), capacity, load_ends(trace) if ends else "")


if __name__ == "__main__":
    main()
