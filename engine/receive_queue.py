"""Prompts whose KV a peer computes: they ask for room here, in order, and get blocks and a seat to receive it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tandem.engine.pool_admission import PoolAdmission
from tandem.engine.queues import ReceivingPrompt, SequenceQueues
from tandem.engine.sequence import Sequence
from tandem.engine.sequence_blocks import SequenceBlocks
from tandem.engine.tenant_room import LOOK_STEPS, TenantRoom

_MAX_PASSED = 8  # prompts without room that later ones may pass: each is looked at every time
_NUM_LEADS = 32  # latest leases that predict how long the next one takes


class Reservation(NamedTuple):
    """Room for a prompt whose KV is to be received. `sequence.blocks` is its prefix that is cached here."""

    sequence: Sequence
    block_ids: list[int]  # for the rest


class ReceiveQueue:
    """Gives room to the prompts in `SequenceQueues.awaiting_room` and moves them to `receiving`."""

    def __init__(
        self, queues: SequenceQueues, blocks: SequenceBlocks, admission: PoolAdmission, tenants: TenantRoom
    ) -> None:
        self.leads: deque[int] = deque(maxlen=_NUM_LEADS)  # steps from a reservation until its KV had arrived
        self._queues = queues
        self._blocks = blocks
        self._admission = admission
        self._tenants = tenants
        self._lacks_seats = False  # whether seats were short at the latest `reserve`
        self._is_shared = False  # whether it saw several tenants
        self._reserved_at: tuple[tuple[int, ...], int] = ((), 0)

    def arrived(self, sequence: Sequence) -> None:
        """Note the end of the reservation of a sequence that is queued now, if it had one."""
        prompt = self._queues.receiving.pop(sequence, None)
        if prompt is not None:
            self.leads.append(self._queues.step_number - prompt.step)

    def reserve(self) -> list[Reservation]:
        """Give room to the prompts that requested it, in order, as long as there is room."""
        if not self._queues.awaiting_room or not self._may_have_room():
            return []
        line: Iterable[Sequence] = [*self._queues.preempted(), *self._queues.awaiting_room]
        self._is_shared = self._tenants.is_shared
        if self._is_shared:
            self._tenants.make_room()
            line = self._tenants.in_turn(line)
        num_seats = self._admission.num_free_seats
        if num_seats <= 0:
            num_seats += self.num_ending()
        reserved = self._reserve(line, num_seats) if num_seats > 0 else []
        self._lacks_seats = bool(self._queues.awaiting_room) and self._admission.num_free_seats <= 0
        self._reserved_at = self._state(), self._blocks.pool.num_available
        return reserved

    def num_ending(self) -> int:
        """Running sequences expected to end before the KV arrives of a prompt that gets its lease now.

        If a seat were reserved only once it is free, it would stand empty until the KV arrives: if that takes 16 steps
        and answers have 50 tokens, this costs a quarter of the throughput. The median lead is used, because one slow
        sender says nothing about the others.
        """
        if not self.leads:
            return 0
        lead, lengths = sorted(self.leads)[len(self.leads) // 2], self._admission.lengths
        running = ((s.num_output_tokens, s.sampling.max_tokens) for s in self._queues.running if s.has_first_token)
        return int(sum(lengths.share_ending(num_tokens, lead, most) for num_tokens, most in running))

    def _reserve(self, line: Iterable[Sequence], num_seats: int) -> list[Reservation]:
        """Room for those in line that a peer computes. Preempted ones take theirs in the next step."""
        queues, admission, num_refused = self._queues, self._admission, 0
        forecast = admission.forecast()
        reserved: list[Reservation] = []
        for sequence in line:
            if num_seats <= 0:
                break
            has_room = admission.find_room(forecast, sequence)
            if sequence not in queues.awaiting_room:  # it was preempted
                num_seats -= has_room and sequence.gave_way  # a seat is kept for the others
            elif has_room:
                del queues.awaiting_room[sequence]
                reserved.append(Reservation(sequence, admission.take_blocks(forecast, sequence)))
                num_seats -= 1 + len(sequence.forks)
                queues.receiving[sequence] = ReceivingPrompt(
                    self._blocks.num_needed(sequence), self._queues.step_number
                )
            elif not admission.is_hopeless(sequence) and (num_refused := num_refused + 1) > _MAX_PASSED:
                break
        return reserved

    def _may_have_room(self) -> bool:
        """Whether anything arrived, ended or gave blocks back since the latest `reserve`; a forecast takes 0.2 ms.

        If seats are short, each step brings some sequences nearer to their end. If tenants share the room, what they
        hold changes as their sequences grow.
        """
        state, num_available = self._reserved_at
        return self._blocks.pool.num_available > num_available or self._state() != state

    def _state(self) -> tuple[int, ...]:
        queues = self._queues
        lengths = len(queues.awaiting_room), len(queues.receiving), len(queues.waiting), len(queues.running)
        step = (
            self._queues.step_number
            if self._lacks_seats
            else self._queues.step_number // LOOK_STEPS
            if self._is_shared
            else 0
        )
        return *lengths, queues.num_arrived, self._admission.num_lost_blocks, step
