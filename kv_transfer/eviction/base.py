"""What every eviction policy shares: the forest of resident keys, leaf-first victims, pins.

A policy only ranks keys; the tier that asks it moves the bytes. It has no clock and no lock.

Keys are chained: a key names a block *and its whole prefix*. So a block is useless without its parent, and a hit on a
key is a hit on all its ancestors. Every policy here relies on two consequences:

- A victim is always a leaf: a key without resident children. A pinned key therefore keeps its ancestors as well.
- A hit is recorded only on the deepest key found, in O(1). An ancestor needs its rank only once it is a leaf, and
  by then it has inherited the rank of each child that left. A key appended to a leaf inherits the leaf's rank. So
  policies made for single objects see a chain as one object that grows at its end, and evict it tail first.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any


class Node:
    """A resident key. Each policy defines the meaning of `rank`, `queue`, `num_uses` and `run`."""

    __slots__ = ("key", "num_children", "num_pins", "num_uses", "parent_key", "queue", "rank", "run")

    def __init__(self, key: Hashable, parent_key: Hashable | None) -> None:
        self.key = key
        self.parent_key = parent_key
        self.num_children = 0  # resident children
        self.num_pins = 0
        self.num_uses = 0
        self.queue = 0
        self.rank: Any = 0  # a number, comparable within one policy; below 0 = demoted
        self.run: Any = None

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf and not pinned."""
        return not (self.num_children or self.num_pins)


class LeafQueue:
    """The evictable nodes of one queue, lowest rank first; O(log n) amortised.

    When a node leaves, moves or gets a child, its entry stays in the heap; `peek` drops it when it reaches the top.
    """

    def __init__(self, queue: int, nodes: dict[Hashable, Node]) -> None:
        self._queue = queue
        self._nodes = nodes
        self._heap: list[tuple[Any, int, Hashable]] = []  # rank, number of the push, key
        self._num_pushes = 0

    def push(self, node: Node) -> None:
        """Add an evictable node under its current rank."""
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = list({entry[2]: entry for entry in self._heap if self._holds(entry)}.values())
            heapq.heapify(self._heap)
        self._num_pushes += 1
        heapq.heappush(self._heap, (node.rank, self._num_pushes, node.key))

    def peek(self) -> Node | None:
        """The evictable node with the lowest rank."""
        while self._heap:
            if self._holds(self._heap[0]):
                return self._nodes[self._heap[0][2]]
            heapq.heappop(self._heap)
        return None

    def _holds(self, entry: tuple[Any, int, Hashable]) -> bool:
        node = self._nodes.get(entry[2])
        return node is not None and node.is_evictable and node.rank == entry[0] and node.queue == self._queue


class EvictionPolicy(ABC):
    """Chooses the key to evict next from a tier of about `capacity` keys.

    The tier calls `touch` for each hit, `add` for each key it stores and, while it is too full, `remove(victim())`.
    Because keys are added before others are evicted, a policy can refuse a key: the victim may be the one just added.
    To protect a chain that is in use or being stored, pin its deepest key.
    """

    num_queues = 1

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity={capacity} must be positive")
        self.capacity = capacity
        self._nodes: dict[Hashable, Node] = {}
        self._orphans: dict[Hashable, int] = {}  # number of resident children, by key that is not resident
        self._queues = [LeafQueue(queue, self._nodes) for queue in range(self.num_queues)]
        self._sizes = [0] * self.num_queues
        self._tick = 0  # events so far

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._nodes)

    def touch(self, key: Hashable) -> None:
        """Note a lookup whose deepest hit was `key`. Call it before adding the keys that the lookup missed."""
        self._tick += 1
        node = self._nodes[key]
        self._on_hit(node)
        self._offer(node)

    def add(self, key: Hashable, parent_key: Hashable | None) -> None:
        """Make a key resident. Its parent may be added later (a lower tier may be filled leaf first) or never."""
        assert key not in self._nodes, f"{key!r} is resident already"
        self._tick += 1
        node = self._nodes[key] = Node(key, parent_key)
        node.num_children = self._orphans.pop(key, 0)
        self._count_child(node, 1)
        parent = self._parent_of(node)
        self._on_add(node, parent)
        if parent is not None and parent.rank < 0 and parent.num_children == 1:  # the rest of a demoted chain
            node.rank = parent.rank
        self._sizes[node.queue] += 1
        self._offer(node)

    def remove(self, key: Hashable) -> None:
        """Forget a key that was evicted or lost. Its pins end with it."""
        node = self._nodes.pop(key)
        self._sizes[node.queue] -= 1
        if node.num_children:
            self._orphans[key] = node.num_children
        self._count_child(node, -1)
        self._on_remove(node)
        parent = self._parent_of(node)
        if parent is not None:
            self._inherit(parent, node)
            self._offer(parent)

    def note_end(self, key: Hashable, *, has_calls: bool) -> None:  # noqa: B027  # most policies do without
        """Note how the answer at the end of a chain ended, whose deepest resident key is `key`.

        `has_calls`: it called a tool, so its conversation goes on when the tool is done; otherwise it could have.
        """

    def demote(self, key: Hashable) -> None:
        """Evict a resident key before all others, and its ancestors up to the first with other children.

        It lasts until they are hit again. A key that is pinned or has children is left alone, because other chains use
        it. Policies whose own ranks may be below 0 override this.
        """
        self._tick += 1
        node: Node | None = self._nodes[key]
        num_children = 0
        while node is not None and node.num_children == num_children and not node.num_pins:
            node.rank = -self._tick
            self._offer(node)
            node, num_children = self._parent_of(node), 1

    def pin(self, key: Hashable) -> None:
        """Keep a resident key and its ancestors until the same number of `unpin` calls."""
        self._nodes[key].num_pins += 1

    def unpin(self, key: Hashable) -> None:
        """End one pin of a resident key."""
        node = self._nodes[key]
        assert node.num_pins > 0, f"{key!r} is not pinned"
        node.num_pins -= 1
        self._offer(node)

    def victim(self) -> Hashable | None:
        """The key to evict next, an unpinned leaf; None if there is none. Asking again gives the same answer."""
        node = self._choose()
        return None if node is None else node.key

    def check_integrity(self) -> None:
        """Raise AssertionError unless children and queue sizes are counted right."""
        children = Counter(node.parent_key for node in self._nodes.values() if node.parent_key is not None)
        for key, node in self._nodes.items():
            assert node.key == key, f"{node.key!r} is filed under {key!r}"
            assert node.num_children == children.pop(key, 0), f"children of {key!r} are miscounted"
        assert dict(children) == self._orphans, "children of absent keys are miscounted"
        queues = Counter(node.queue for node in self._nodes.values())
        assert [queues[queue] for queue in range(self.num_queues)] == self._sizes, "queue sizes are miscounted"

    @abstractmethod
    def _on_hit(self, node: Node) -> None:
        """Rank the deepest node that a lookup found."""

    @abstractmethod
    def _on_add(self, node: Node, parent: Node | None) -> None:
        """Rank a new node and set its queue. If the parent has one child, it was a leaf until now."""

    @abstractmethod
    def _choose(self) -> Node | None:
        """The block to evict next."""

    def _on_remove(self, node: Node) -> None:  # noqa: B027  # most policies remember nothing
        """Remember a node that left, if the policy remembers any."""

    def _inherit(self, parent: Node, child: Node) -> None:
        """Pass a leaving child's rank and uses to its parent: a hit on the child was one on the parent."""
        parent.rank = max(parent.rank, child.rank)
        parent.num_uses = max(parent.num_uses, child.num_uses)

    def _parent_of(self, node: Node) -> Node | None:
        return None if node.parent_key is None else self._nodes.get(node.parent_key)

    def _move(self, node: Node, queue: int) -> None:
        self._sizes[node.queue] -= 1
        node.queue = queue
        self._sizes[queue] += 1

    def _offer(self, node: Node) -> None:
        if node.is_evictable:
            self._queues[node.queue].push(node)

    def _count_child(self, child: Node, change: int) -> None:
        parent = self._parent_of(child)
        if parent is not None:
            parent.num_children += change
        elif child.parent_key is not None:
            self._orphans[child.parent_key] = self._orphans.get(child.parent_key, 0) + change
            if not self._orphans[child.parent_key]:
                del self._orphans[child.parent_key]
