"""LFU with dynamic aging, which is what GDSF is where all blocks have one size and one cost.

Arlitt, Cherkasova, Dilley, Friedrich, Jin: Evaluating content management techniques for web proxy caches, 1999.
"""

from __future__ import annotations

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node

__all__ = ["LFUAging"]


class LFUAging(EvictionPolicy):
    """The leaf of the lowest (uses + age of the cache when it was last used), least recently used among equals.

    The age of the cache is the score of its last victim, so what was popular once does not stay for ever.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._age = 0

    def _on_hit(self, node: Node) -> None:
        node.num_uses += 1
        node.rank = (self._age + node.num_uses, self._tick)

    def _on_add(self, node: Node, parent: Node | None) -> None:
        # One use at least, or the age would stand still while nothing is hit.
        node.num_uses = parent.num_uses if parent is not None and parent.num_children == 1 else 1
        node.rank = (self._age + node.num_uses, self._tick)

    def _choose(self) -> Node | None:
        node = self._queues[0].peek()
        if node is not None:
            self._age = node.rank[0]
        return node
