"""Least recently used first."""

from __future__ import annotations

from collections.abc import Hashable

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node


class LRU(EvictionPolicy):
    """The least recently used leaf.

    A parent is used whenever its child is. So this is plain LRU in which each request uses its last block first and its
    root last.
    """

    def demote(self, key: Hashable) -> None:
        """Evict a resident key before all others, and its ancestors up to the first with other children.

        A key that is pinned or has children is left alone, because other chains use it.
        """
        self._tick += 1
        node: Node | None = self._nodes[key]
        num_children = 0
        while node is not None and node.num_children == num_children and not node.num_pins:
            node.rank = -self._tick
            self._offer(node)
            node, num_children = self._parent_of(node), 1

    def _on_hit(self, node: Node) -> None:
        node.rank = self._tick

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = self._tick

    def _choose(self) -> Node | None:
        return self._queues[0].peek()
