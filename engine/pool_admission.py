"""Decides which sequences may take blocks and seats, in the order in which they wait.

Blocks are reserved for all sequences that will grow (see `PoolForecast`). The order is: preempted sequences, prompts
that a peer has computed and that wait for room (`awaiting_room`), prompts to compute here. The first that finds no room
is the head. Others may pass it if they do not make it wait longer, and all that pass it take at most a pool's worth of
blocks. Seats (`max_num_seqs`) are reserved together with blocks.
"""

from __future__ import annotations

from tandem.engine.output_lengths import OutputLengths
from tandem.engine.pool_forecast import BlockDemand, PoolForecast
from tandem.engine.queues import SequenceQueues
from tandem.engine.sequence import Sequence
from tandem.engine.sequence_blocks import SequenceBlocks

# A preempted sequence comes back once there is room for this many steps. Its stream stalls until then, and would
# soon do so again if the others ran longer than the room allows. A tenant that holds less than others needs no more
# either: they give way later, too.
_SURE_STEPS = 128


class PoolAdmission:
    """What the pool and the seats are reserved for."""

    def __init__(
        self, queues: SequenceQueues, blocks: SequenceBlocks, *, max_num_seqs: int, lengths: OutputLengths
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.lengths = lengths
        self.lost_blocks: dict[str, int] = {}  # by holder; when they will be free is unknown
        self._queues = queues
        self._blocks = blocks
        self._pool = blocks.pool
        self._head: Sequence | None = None  # the first that finds no room, in the latest forecast

    @property
    def num_free_seats(self) -> int:
        """Seats that are neither taken nor reserved."""
        queues = self._queues
        num_begun = sum(not sequence.gave_way for sequence in queues.with_first_token())
        num_held = len(queues.running) + len(queues.receiving) + queues.num_forks
        return self.max_num_seqs - num_held - num_begun

    @property
    def num_lost_blocks(self) -> int:
        """Blocks that are held for an unknown time."""
        return sum(self.lost_blocks.values())

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that may be lent for a while: no sequence in any queue is expected to need them."""
        forecast = self.forecast()
        for sequence in (*self._queues.awaiting_room, *self._queues.waiting):
            if not sequence.blocks and not forecast.try_take(self.demand(sequence), grows=sequence.decodes_here):
                return 0
        return forecast.num_spare

    def forecast(self) -> PoolForecast:
        """The pool now, with what all holders of blocks will still need."""
        queues = self._queues
        holders = [self.held(s) for s in (*queues.running, *queues.received()) if s.decodes_here]
        holders += [self._demand(one, prompt.num_blocks) for one, prompt in queues.receiving.items()]
        return PoolForecast(self._pool.num_blocks, self._pool.num_used, holders, block_size=self._blocks.block_size)

    def find_room(self, forecast: PoolForecast, sequence: Sequence, num_shared: int = 0) -> bool:
        """Whether there is room for a sequence behind those that wait before it.

        Other sequences will hold at least `num_shared` of its blocks.
        """
        if self.is_hopeless(sequence):
            return False
        demand, had_head = self.demand(sequence, num_shared), forecast.has_head
        may_pass = self._may_pass(demand, self._head if had_head else None)
        is_found = forecast.try_take(
            demand, grows=sequence.decodes_here, may_pass=may_pass, num_sure_steps=_num_sure_steps(sequence, demand)
        )
        if forecast.has_head and not had_head:
            self._head = sequence
        return is_found

    def fits(self, forecast: PoolForecast, sequence: Sequence, demand: BlockDemand, head: Sequence | None) -> bool:
        """Whether there is room for a sequence with this demand behind this head of the forecast. Changes nothing."""
        return forecast.fits(
            demand,
            grows=sequence.decodes_here,
            may_pass=self._may_pass(demand, head),
            num_sure_steps=_num_sure_steps(sequence, demand),
        )

    def take_blocks(self, forecast: PoolForecast, sequence: Sequence) -> list[int]:
        """Give a sequence for which there is room its cached prefix; returns fresh blocks for its other tokens."""
        num_available = self._pool.num_available
        self._blocks.match_prefix(sequence)
        fresh = self._pool.try_allocate(self._blocks.num_needed(sequence) - len(sequence.blocks))
        assert fresh is not None, f"there is no room for {sequence.request_id}, but it was counted"
        if forecast.has_head and self._head is not None:
            self._head.num_passed_blocks += num_available - self._pool.num_available
        return fresh

    def is_hopeless(self, sequence: Sequence) -> bool:
        """Whether it would not fit even if all others had ended. Others do not wait for such a sequence."""
        return self._blocks.num_needed(sequence) > self._pool.num_blocks - self.num_lost_blocks

    def held(self, sequence: Sequence) -> BlockDemand:
        """What a sequence with blocks holds and still needs."""
        return self._demand(sequence, self._pool.count_own(sequence.blocks))

    def demand(self, sequence: Sequence, num_shared: int = 0) -> BlockDemand:
        """What a sequence without blocks needs."""
        num_held = max(self._pool.count_used(self._blocks.cached_blocks(sequence)), num_shared)
        return self._demand(sequence, self._blocks.num_needed(sequence) - num_held)

    def _may_pass(self, demand: BlockDemand, head: Sequence | None) -> bool:
        """Whether a sequence may pass the head. The stream of a preempted head is stalled, so nothing passes it."""
        if head is None:
            return True
        return not head.has_first_token and head.num_passed_blocks + demand.num_blocks <= self._pool.num_blocks

    def _demand(self, sequence: Sequence, num_blocks: int) -> BlockDemand:
        return BlockDemand(self._num_steps(sequence), num_blocks, 1 + len(sequence.forks))

    def _num_steps(self, sequence: Sequence) -> int:
        """Steps in which the sequence is expected to need room for one more token each."""
        num_rest = self.lengths.expected_rest(sequence.num_output_tokens, sequence.sampling.max_tokens)
        return num_rest if sequence.has_first_token else num_rest - 1  # the last token's KV is never computed


def _num_sure_steps(sequence: Sequence, demand: BlockDemand) -> int | None:
    """Steps for which a sequence needs room to begin or go on; None = until all have ended."""
    if sequence.may_take_room:
        return min(_SURE_STEPS, demand.num_steps)
    return _SURE_STEPS if sequence.has_first_token else None
