"""SIEVE: a first-in first-out queue whose hand spares what was used since it last came by.

Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is simpler than LRU, NSDI 2024.
"""

from __future__ import annotations

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node

__all__ = ["Sieve"]


class Sieve(EvictionPolicy):
    """SIEVE over leaves.

    A rank is (round of the hand, order of arrival). The hand takes the lowest: a leaf that was used goes to the next
    round and keeps its place there, one that was not is the victim. Its parent, now perhaps a leaf, takes its place
    under the hand and is judged next, so a run nobody came back to goes as a whole.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._round = 0

    def _on_hit(self, node: Node) -> None:
        node.num_uses = 1

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = (self._round, self._tick)
        if parent is not None and parent.num_children == 1:
            node.num_uses, parent.num_uses = parent.num_uses, 0

    def _choose(self) -> Node | None:
        node = self._queues[0].peek()
        while node is not None:
            self._round = node.rank[0]
            if not node.num_uses:
                return node
            node.num_uses = 0
            node.rank = (self._round + 1, node.rank[1])
            self._offer(node)
            node = self._queues[0].peek()
        return None
