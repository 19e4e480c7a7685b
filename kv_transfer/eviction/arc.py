"""ARC: one LRU list for what was used once, one for what was used again, and a boundary that learns.

Megiddo, Modha: ARC, a self-tuning, low overhead replacement cache, FAST 2003.
"""

from __future__ import annotations

from collections.abc import Hashable

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node

__all__ = ["ARC"]

_RECENT, _FREQUENT = 0, 1


class ARC(EvictionPolicy):
    """ARC over leaves.

    A key that is used moves to the frequent list together with its ancestors, and what is appended to a leaf there
    joins it. Where the list that should give way has no leaf, the other one does.
    """

    num_queues = 2

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent_target = 0.0
        self._ghosts: tuple[dict[Hashable, None], dict[Hashable, None]] = ({}, {})  # evicted, oldest first

    def _on_hit(self, node: Node) -> None:
        node.rank = self._tick
        ancestor: Node | None = node
        while ancestor is not None and ancestor.queue == _RECENT:
            self._move(ancestor, _FREQUENT)
            ancestor = self._parent_of(ancestor)

    def _on_add(self, node: Node, parent: Node | None) -> None:
        node.rank = self._tick
        if parent is not None and parent.num_children == 1:
            node.queue = parent.queue
        recent, frequent = self._ghosts
        if node.key in recent:
            self._recent_target = min(self.capacity, self._recent_target + max(1.0, len(frequent) / len(recent)))
        elif node.key in frequent:
            self._recent_target = max(0.0, self._recent_target - max(1.0, len(recent) / len(frequent)))
        else:
            return
        node.queue = _FREQUENT
        recent.pop(node.key, None)
        frequent.pop(node.key, None)

    def _on_remove(self, node: Node) -> None:
        self._ghosts[node.queue][node.key] = None
        recent, frequent = self._ghosts
        while recent and self._sizes[_RECENT] + len(recent) > self.capacity:
            del recent[next(iter(recent))]
        while frequent and len(self) + len(recent) + len(frequent) > 2 * self.capacity:
            del frequent[next(iter(frequent))]

    def _inherit(self, parent: Node, child: Node) -> None:
        super()._inherit(parent, child)
        if child.queue == _FREQUENT != parent.queue:
            self._move(parent, _FREQUENT)

    def _choose(self) -> Node | None:
        recent, frequent = self._queues[_RECENT].peek(), self._queues[_FREQUENT].peek()
        if recent is None or frequent is None:
            return recent or frequent
        return recent if self._sizes[_RECENT] > self._recent_target else frequent
