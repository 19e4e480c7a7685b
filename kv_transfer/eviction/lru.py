"""Least recently used first."""

from __future__ import annotations

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node


class LRU(EvictionPolicy):
    """The least recently used leaf.

    A parent is used whenever its child is. So this is plain LRU in which each request uses its last block first and its
    root last.
    """

    def _on_hit(self, node: Node) -> None:
        node.rank = self._tick

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = self._tick

    def _choose(self) -> Node | None:
        return self._queues[0].peek()
