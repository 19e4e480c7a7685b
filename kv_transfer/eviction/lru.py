"""Least recently used first."""

from __future__ import annotations

from kv_transfer.eviction.base import EvictionPolicy, Node

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """The least recently used leaf.

    A parent was used whenever its child was, so this is plain LRU in which a request uses its last block first and its
    root last.
    """

    def _on_hit(self, node: Node) -> None:
        node.rank = self._tick

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = self._tick

    def _choose(self) -> Node | None:
        return self._queues[0].peek()
