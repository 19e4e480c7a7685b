"""The sequences of one engine, by what they wait for."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from tandem.engine.sequence import Sequence


class ReceivingPrompt(NamedTuple):
    """What is reserved for a prompt while its KV arrives, in addition to a seat."""

    num_blocks: int  # including cached ones
    step: int  # number of the step at which they were reserved


class SequenceQueues:
    """Every sequence of the scheduler is in one of these."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()  # sorted by `queue_position`
        self.running: list[Sequence] = []  # in order of admission
        self.awaiting_room: dict[Sequence, None] = {}  # prompts computed by a peer that wait for room here, in order
        self.receiving: dict[Sequence, ReceivingPrompt] = {}  # prompts whose KV is arriving
        self.num_arrived = 0
        self.step_number = 0  # steps so far in which something decoded

    @property
    def num_forks(self) -> int:
        """Forks of the prompts that are computed or received: each will take a seat."""
        return sum(len(s.forks) for s in (*self.running, *self.receiving) if s.forks and s.decodes_here)

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence into `waiting`."""
        insort(self.waiting, sequence, key=queue_position)

    def note_arrival(self, sequence: Sequence) -> None:
        """Number a sequence that was not here before."""
        if not sequence.arrival:
            self.num_arrived += 1
            sequence.arrival = self.num_arrived

    def received(self) -> Iterator[Sequence]:
        """Waiting sequences that hold the KV of their prompt."""
        return (sequence for sequence in self.with_first_token() if sequence.blocks)

    def preempted(self) -> Iterator[Sequence]:
        """Waiting sequences that lost their blocks."""
        return (sequence for sequence in self.with_first_token() if not sequence.blocks)

    def without_room(self) -> Iterator[Sequence]:
        """Sequences that need blocks and a seat before anything can be computed: preempted ones first."""
        yield from (s for s in self.preempted() if not s.num_pending_tokens)  # otherwise it may be at its end
        yield from self.awaiting_room
        yield from (s for s in self.waiting if not s.has_first_token and not s.blocks)

    def with_first_token(self) -> Iterator[Sequence]:
        """Waiting sequences that have their first token: received or preempted. They are first in `waiting`."""
        return takewhile(_has_first_token, self.waiting)


def queue_position(sequence: Sequence) -> tuple[float, int]:
    """Sequences are served by order, then by arrival."""
    return sequence.order, sequence.arrival


def _has_first_token(sequence: Sequence) -> bool:
    return sequence.has_first_token
