"""Shares blocks and seats between tenants: whose turn it is to take room, and who gives room back.

What a tenant holds is the larger of its shares of blocks and seats, divided by its weight (dominant resource fairness:
Ghodsi et al., NSDI 2011). The tenant that holds least takes room first. Where there is none, the one that holds most
gives way: its latest sequence is preempted, as long as the tenant then still holds more than the other one holds before
it takes anything. So nobody can take the same room back, and sequences do not push each other out in turn.

With one tenant none of this happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from tandem.engine.pool_admission import PoolAdmission
from tandem.engine.queues import SequenceQueues, queue_position
from tandem.engine.sequence import Sequence
from tandem.engine.sequence_blocks import SequenceBlocks

_MAX_REFUSED = 8  # sequences in line for which there is no room, and which others may pass
LOOK_STEPS = 16  # between two looks while nothing comes or goes: tenants come to hold more as their sequences grow


@dataclass(slots=True)
class _Holding:
    """What one tenant holds."""

    weight: float
    num_seats: int = 0
    num_blocks: int = 0
    victims: list[Sequence] = field(default_factory=list)  # that could give way, the first of them last


class TenantShares:
    """What each tenant holds at one moment, and what it would hold after changes that are only planned."""

    def __init__(self, num_seats: int, num_blocks: int) -> None:
        self._num_seats = num_seats
        self._num_blocks = num_blocks
        self._holdings: dict[str, _Holding] = {}
        self._givers: dict[str, _Holding] = {}  # those with sequences that could give way, now or before
        self._changed: set[str] = set()  # tenants that hold more or less since `in_turn` last looked

    def take(self, sequence: Sequence, num_blocks: int) -> None:
        """Count a seat and blocks of a sequence."""
        self._change(sequence, 1, num_blocks)

    def share(self, sequence: Sequence) -> float:
        """What the tenant of this sequence holds: 1 is all of the room, for a tenant of weight 1."""
        holding = self._holdings.get(sequence.priority.tenant)
        return self._share(holding) if holding is not None else 0.0

    def in_turn(self, line: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences in the order in which they may take room; of tenants that hold the same, as in the line.

        What is taken meanwhile counts for the next ones.
        """
        lines: dict[str, deque[tuple[int, Sequence]]] = {}  # each with its place in the line
        for place, sequence in enumerate(line):
            lines.setdefault(sequence.priority.tenant, deque()).append((place, sequence))
        turns = [(self.share(queue[0][1]), queue[0][0], tenant) for tenant, queue in lines.items()]
        heapify(turns)
        while turns:
            share, place, tenant = heappop(turns)
            queue = lines[tenant]
            if not queue or (self.share(queue[0][1]), queue[0][0]) != (share, place):
                continue  # it holds more or less since: another entry tells
            self._changed.add(tenant)
            yield queue.popleft()[1]
            for tenant in self._changed & lines.keys():
                if queue := lines[tenant]:
                    heappush(turns, (self.share(queue[0][1]), queue[0][0], tenant))
            self._changed.clear()

    def may_take(self, claimant: Sequence) -> bool:
        """Whether any sequence gives way to this one."""
        victims = list(islice(self.victims_for(claimant), 1))
        self.keep(victims)
        return bool(victims)

    def victims_for(self, claimant: Sequence) -> Iterator[Sequence]:
        """The sequences that give way to this one, one after the other. Each one that is yielded is given up."""
        mine = self._of(claimant)
        while others := [one for one in self._givers.values() if one.victims and one is not mine]:
            richest = max(others, key=self._share)
            victim = richest.victims.pop()
            self._change(victim, -1, -len(victim.blocks))
            if self._share(richest) <= self._share(mine):
                self.keep([victim])
                return
            yield victim

    def keep(self, victims: Iterable[Sequence]) -> None:
        """Take back that these sequences give way."""
        for victim in victims:
            self._of(victim).victims.append(victim)
            self._change(victim, 1, len(victim.blocks))

    def add_victims(self, sequences: Iterable[Sequence]) -> None:
        """Name the sequences that could give way; those that are counted already."""
        for sequence in sorted(sequences, key=queue_position):
            holding = self._givers[sequence.priority.tenant] = self._of(sequence)
            holding.victims.append(sequence)

    def _change(self, sequence: Sequence, num_seats: int, num_blocks: int) -> None:
        holding = self._of(sequence)
        holding.num_seats += num_seats
        holding.num_blocks += num_blocks
        self._changed.add(sequence.priority.tenant)

    def _of(self, sequence: Sequence) -> _Holding:
        priority = sequence.priority
        holding = self._holdings.get(priority.tenant)
        if holding is None:
            holding = self._holdings[priority.tenant] = _Holding(priority.weight)
        return holding

    def _share(self, holding: _Holding) -> float:
        share = max(holding.num_seats / self._num_seats, holding.num_blocks / self._num_blocks)
        return share / holding.weight


class TenantRoom:
    """Takes room from tenants that hold more for those that hold less. `preempt` takes the blocks of one sequence."""

    def __init__(
        self,
        queues: SequenceQueues,
        blocks: SequenceBlocks,
        admission: PoolAdmission,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._admission = admission
        self._preempt = preempt
        self._looked_at: tuple[int, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether sequences of several tenants hold room or wait for it."""
        queues = self._queues
        everyone = (queues.running, queues.receiving, queues.waiting, queues.awaiting_room)
        first = None
        for sequences in everyone:
            for sequence in sequences:
                if first is None:
                    first = sequence.priority.tenant
                elif sequence.priority.tenant != first:
                    return True
        return False

    def shares(self) -> TenantShares:
        """What each tenant holds now."""
        shares = TenantShares(self._admission.max_num_seqs, self._blocks.pool.num_blocks)
        for sequence in (*self._queues.running, *self._queues.received()):
            shares.take(sequence, len(sequence.blocks))
        for sequence, prompt in self._queues.receiving.items():
            shares.take(sequence, prompt.num_blocks)
        return shares

    def in_turn(self, line: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences in the order in which they may take room, if they all take what they need."""
        shares = self.shares()
        for sequence in shares.in_turn(line):
            yield sequence
            shares.take(sequence, self._blocks.num_needed(sequence))

    def last_of(self, sequences: Iterable[Sequence]) -> Sequence:
        """The sequence that gives its blocks back first: of the tenant that holds most, the last in the queue."""
        if not self.is_shared:
            return max(sequences, key=queue_position)
        shares = self.shares()
        return max(sequences, key=lambda sequence: (shares.share(sequence), queue_position(sequence)))

    def make_room(self) -> None:
        """Preempt sequences of tenants that hold more, for all in line that may take their room.

        While nothing comes or goes, tenants come to hold more or less only slowly, as their sequences grow.
        """
        queues, admission = self._queues, self._admission
        num_each = len(queues.running), len(queues.receiving), len(queues.waiting), len(queues.awaiting_room)
        state = (*num_each, queues.num_arrived, queues.step_number // LOOK_STEPS)
        if state == self._looked_at:
            return
        self._looked_at = state
        shares = self.shares()
        # A prompt that is being handed over never gives way: a transfer may be reading its blocks right now.
        held = {s: admission.held(s) for s in (*queues.running, *queues.received()) if s.decodes_here}
        shares.add_victims(held)
        forecast, num_seats, head, num_refused = admission.forecast(), admission.num_free_seats, None, 0
        for claimant in shares.in_turn(queues.without_room()):
            if admission.is_hopeless(claimant):
                continue
            claimant.may_take_room = shares.may_take(claimant)
            demand, victims = admission.demand(claimant), list[Sequence]()
            candidates = shares.victims_for(claimant)
            trial = forecast.copy()
            num_given = np.zeros(self._blocks.pool.num_blocks, dtype=np.int32)  # victims that use a block, by block
            while not (fits := num_seats + len(victims) > 0 and admission.fits(trial, claimant, demand, head)):
                if (victim := next(candidates, None)) is None:
                    break
                trial.give_back(held[victim], self._blocks.pool.count_own(victim.blocks, num_given))
                num_given[victim.blocks.ids] += 1
                victims.append(victim)
            if not fits:
                num_refused += 1
                if (num_seats <= 0 and not victims) or num_refused > _MAX_REFUSED:
                    return  # those behind it hold more
                shares.keep(victims)
                admission.find_room(forecast, claimant)  # as in all lines, some may pass it while it waits
                head = head or claimant
                num_seats -= claimant not in queues.awaiting_room  # a seat is reserved for it meanwhile
                continue
            trial.take(demand, grows=claimant.decodes_here)
            forecast, num_seats = trial, num_seats + len(victims) - 1
            shares.take(claimant, demand.num_blocks)
            for victim in victims:
                self._preempt(victim)
