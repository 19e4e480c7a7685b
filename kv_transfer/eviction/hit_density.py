"""Hit density: evict the leaf with the fewest expected hits for the room and time that it would still take.

After LHD (Beckmann, Chen, Cidon: LHD, improving cache hit rate by maximizing hit density, NSDI 2018), adapted to prefix
caches: a turn of a conversation is hit again as the start of the next turn, after a time that is typical for the users,
or never. The more turns a conversation has had, the more likely is another one. An agent whose answer called a tool
comes back when the tool is done, about as soon as the last time; one that ended its turn waits for a person.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from tandem.kv_transfer.eviction.base import EvictionPolicy, Node

_NUM_TURNS = 6  # turns that are distinguished; later turns count as the last
_FORK = _NUM_TURNS  # the level of keys where many chains branch, such as the end of a system prompt
_NUM_LEVELS = _NUM_TURNS + 1

# What is known of the end of the latest answer: nothing; it called a tool, by the lookups after which the conversation
# came back the last time (no last time, < 8, < 16, < 32, more); it called none though it could.
_RETURNS = (8, 16, 32)
_CALLED = 1
_ENDED = _CALLED + len(_RETURNS) + 2
_NUM_KINDS = _ENDED + 1
_NUM_GROUPS = _NUM_LEVELS * _NUM_KINDS  # a group is a level and a kind
_MAX_OPEN_RUNS = 4096
_RELEARN_LOOKUPS = 64
_MEMORY_RUNS = 8 * _MAX_OPEN_RUNS

# Ages are counted in lookups and grouped in growing steps, [1, 1.4), [1.4, 2), [2, 2.8), ..., so that few numbers
# describe a long past.
_STEPS_PER_OCTAVE = 2
_NUM_STEPS = 20 * _STEPS_PER_OCTAVE
_AGES = 2.0 ** (np.arange(_NUM_STEPS + 1) / _STEPS_PER_OCTAVE)

# The prior before there are observations: the chance to come back is the same in every step, which ranks by recency,
# and grows with each turn.
_PRIOR_CHANCE = 0.15 / _STEPS_PER_OCTAVE
_PRIOR_RUNS = 10.0
_PRIOR_GROWTH = 1.5
_GROUP_PRIOR_RUNS = 8.0


class _Run:
    """The keys that one request added, or the fork at which it ended: one observation of the time until they are hit.

    A run is open until that hit, whether or not its keys are still resident, or until there are too many newer runs.
    """

    __slots__ = ("ghost", "group", "pace", "started", "turn")

    def __init__(self, started: int, turn: int, group: int, pace: int) -> None:
        self.started = started
        self.turn = turn
        self.group = group
        self.pace = pace  # how soon its conversation came back the last time: 0 = not known, else 1 + index of _RETURNS
        self.ghost: Hashable = None  # the shallowest of its evicted keys


class HitDensity(EvictionPolicy):
    """Evicts the leaf with the lowest hit density: expected hits per lookup that it stays, over the best time to keep
    it.

    A key belongs to the group of its conversation's turn and of the end of its latest answer, once that is known. The
    time until runs of a group are hit again is observed on all runs, including evicted ones (one remembered key per
    run). It gives a density for each group and age. The density need not fall with age: if the cache is too small for
    most conversations to come back in time, the newest ones have the lowest density, and the policy keeps some old ones
    instead of losing all. So it compares the oldest leaf of each group with the chain last used.
    """

    num_queues = _NUM_GROUPS

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._num_lookups = 0
        self._newest: Node | None = None
        self._open: dict[_Run, None] = {}  # oldest first
        self._ghosts: dict[Hashable, _Run] = {}
        self._returned = np.zeros((_NUM_GROUPS, _NUM_STEPS))  # closed runs, by group and age
        self._lost = np.zeros((_NUM_GROUPS, _NUM_STEPS))
        self._learn()

    def note_end(self, key: Hashable, *, has_calls: bool) -> None:
        """As `EvictionPolicy.note_end`. Of a key with children later turns are known already."""
        node = self._nodes[key]
        if node.num_children:
            return
        kind = _CALLED + node.run.pace if has_calls else _ENDED
        group = node.queue // _NUM_KINDS * _NUM_KINDS + kind
        if node.run in self._open:
            node.run.group = group
        self._move(node, group)
        self._offer(node)

    def _on_hit(self, node: Node) -> None:
        self._next_lookup()
        pace = self._pace_of(node.run)
        is_return = self._close(node.run)
        if not node.num_children:
            node.num_uses += 1
            self._join(node, self._start(node.num_uses, _group_of(node.num_uses), pace))
        elif not is_return:  # chains branch here; each branch raises its level
            level, kind = node.queue // _NUM_KINDS, node.run.group % _NUM_KINDS
            self._join(node, self._start(node.num_uses, min(_FORK, level + 1) * _NUM_KINDS + kind))
        node.rank = self._num_lookups
        self._newest = node

    def _on_add(self, node: Node, parent: Node | None) -> None:
        run, pace = None, 0
        if parent is not None and parent.num_children == 1:
            node.num_uses = parent.num_uses
            run = parent.run if parent.run in self._open else None
            pace = parent.run.pace
        elif parent is not None:
            node.num_uses = parent.num_uses + 1
        if parent is None or (parent.num_children > 1 and parent is not self._newest):
            self._next_lookup()
        node.run = run or self._start(node.num_uses, _group_of(node.num_uses), pace)
        self._recall(node)
        node.queue = node.run.group
        node.rank = self._num_lookups
        self._newest = node

    def _on_remove(self, node: Node) -> None:
        if node.run in self._open:
            self._forget_ghost(node.run)
            if node.key in self._ghosts:
                self._forget_ghost(self._ghosts[node.key])
            node.run.ghost = node.key
            self._ghosts[node.key] = node.run
        if node is self._newest:
            self._newest = self._parent_of(node)

    def _inherit(self, parent: Node, child: Node) -> None:
        if child.rank >= parent.rank:
            super()._inherit(parent, child)
            if child.queue // _NUM_KINDS >= parent.queue // _NUM_KINDS:
                self._move(parent, child.queue)

    def _choose(self) -> Node | None:
        leaves = [node for node in (queue.peek() for queue in self._queues) if node is not None]
        if self._newest is not None and self._newest.is_evictable:
            leaves.append(self._newest)
        return min(leaves, key=self._worth, default=None)

    def _worth(self, node: Node) -> tuple[float, int]:
        if node.rank < 0:
            return -1.0, node.rank
        return self._density[node.queue][_step_of(self._num_lookups - node.rank)], node.rank

    def _next_lookup(self) -> None:
        self._num_lookups += 1
        if self._num_lookups % _RELEARN_LOOKUPS == 0:
            self._learn()

    def _pace_of(self, run: _Run) -> int:
        return 1 + bisect_right(_RETURNS, self._num_lookups - run.started)

    def _start(self, turn: int, group: int, pace: int = 0) -> _Run:
        if len(self._open) >= _MAX_OPEN_RUNS:
            oldest = next(iter(self._open))
            self._lost[oldest.group][_step_of(self._num_lookups - oldest.started)] += 1
            self._end(oldest)
        run = _Run(self._num_lookups, turn, group, pace)
        self._open[run] = None
        return run

    def _close(self, run: _Run) -> bool:
        """Note that a run was hit again. False if it was closed before."""
        if run not in self._open:
            return False
        self._returned[run.group][_step_of(self._num_lookups - run.started)] += 1
        self._end(run)
        return True

    def _recall(self, node: Node) -> None:
        """If an evicted run began at this node, that run is hit again, and its conversation's turn is known."""
        ghost = self._ghosts.get(node.key)
        if ghost is None:
            return
        node.run.pace = self._pace_of(ghost)
        self._close(ghost)
        if ghost.turn >= node.num_uses:
            node.num_uses = node.run.turn = ghost.turn + 1
            node.run.group = _group_of(node.num_uses)

    def _join(self, node: Node, run: _Run) -> None:
        node.run = run
        self._move(node, run.group)

    def _end(self, run: _Run) -> None:
        del self._open[run]
        self._forget_ghost(run)

    def _forget_ghost(self, run: _Run) -> None:
        if run.ghost is not None:
            del self._ghosts[run.ghost]
            run.ghost = None

    def _learn(self) -> None:
        """Compute the density of each group at each age from the runs so far.

        chance[g, a]: probability that a run which has not come back before does so in step a of its age (Kaplan-Meier:
        open runs count until now). Groups with few runs borrow from the other kinds of their level, and these from all
        runs together: if all of a level are of one kind, the kinds change nothing.
        """
        unknown = self._lost.copy()
        for run in self._open:
            unknown[run.group, _step_of(self._num_lookups - run.started)] += 1
        left = np.cumsum((self._returned + unknown)[:, ::-1], axis=1)[:, ::-1] - unknown / 2
        pooled = (self._returned.sum(0) + _PRIOR_RUNS * _PRIOR_CHANCE) / (left.sum(0) + _PRIOR_RUNS)
        believed = np.minimum(1.0, pooled * _PRIOR_GROWTH ** np.arange(_NUM_LEVELS)[:, None])[:, None]
        chance = _shrunk(_of_others(self._returned), _of_others(left), believed)
        chance = _shrunk(self._returned, left, chance.reshape(left.shape))
        self._density = _best_densities(np.clip(chance, 0.0, 0.95)).tolist()
        if self._returned.sum() + self._lost.sum() > _MEMORY_RUNS:
            self._returned /= 2
            self._lost /= 2


def _best_densities(chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hits per lookup of room taken, from each age on, if kept until the best age to evict.

    chance: [num_groups, num_steps], probability to be hit in a step
    """
    absent = np.cumprod(np.concatenate([np.ones((len(chance), 1)), 1 - chance], axis=1), axis=1)
    hits = absent[:, :-1] - absent[:, 1:]
    room = np.diff(_AGES) * (absent[:, :-1] + absent[:, 1:]) / 2
    density = np.empty_like(chance)
    for step in range(chance.shape[1]):
        density[:, step] = (np.cumsum(hits[:, step:], axis=1) / np.cumsum(room[:, step:], axis=1)).max(axis=1)
    return density


def _shrunk(
    returned: NDArray[np.float64], left: NDArray[np.float64], believed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The chance in each step of those left to come back, with a prior worth some runs."""
    chance: NDArray[np.float64] = (returned + _GROUP_PRIOR_RUNS * believed) / (left + _GROUP_PRIOR_RUNS)
    return chance


def _of_others(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each group the counts of the other kinds of its level: [num_levels, num_kinds, num_steps]."""
    by_level = counts.reshape(_NUM_LEVELS, _NUM_KINDS, -1)
    others: NDArray[np.float64] = by_level.sum(1, keepdims=True) - by_level
    return others


def _group_of(turn: int) -> int:
    """The group of a turn of which no end is known yet."""
    return min(turn, _NUM_TURNS - 1) * _NUM_KINDS


def _step_of(age: int) -> int:
    return min(_NUM_STEPS - 1, int(math.log2(max(1, age)) * _STEPS_PER_OCTAVE))
