"""Carries out fetch plans: loads blocks of a prompt from tiers and peers instead of computing them.

A prompt is planned when it is admitted (`tandem.kv_transfer.fetch_planner`). Its loads arrive from the back, piece by
piece, and computing goes on from the front if they are late. Runs in the worker's loop and never waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tandem.engine.engine import Engine
from tandem.engine.sequence import Onboarding
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.fetch_planner import FetchPlan, LoadRange, plan_fetch
from tandem.protocol.config import TierConfig
from tandem.protocol.fault_boundary import error_of
from tandem.protocol.messages import MAX_ACTIONS, FetchAction, FetchStats, KvHolder, StepStats
from tandem.scheduling.cost_model import StepModel
from tandem.worker.kv.kv_source import PIECES_IN_FLIGHT, KvSource, OpenSource, Piece
from tandem.worker.kv.peer_reader import PeerReader

logger = logging.getLogger(__name__)

# Limits are in bytes: a large model's block has a hundred times the bytes of a small one's. All round up to a block.
_PIECE_BYTES = 12 << 20  # per load: a few ms from memory
_PROBE_BYTES = 3 << 19
_LATE_FACTOR = 2.0  # a load that takes this many times its prediction is given up
_LATE_SLACK_S = 0.02
_PROBE_INTERVAL_S = 5.0  # between trials of a source that is not worth using, to notice when it becomes so again
_NUM_RECORDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRecord:
    """One plan and its outcome. Times are in seconds."""

    request_id: str
    num_cached_blocks: int  # blocks found in the pool
    loads: tuple[LoadRange, ...]
    num_loaded_blocks: int
    predicted_s: float
    recompute_s: float
    load_s: float  # predicted time of the loads alone
    actual_load_s: float
    outcome: str  # loaded, overtaken, failed, withdrawn, computed
    ended_s: float  # by the worker's clock

    def action(self, now: float) -> FetchAction:
        """The record as operators are shown it."""
        return FetchAction(
            request_id=self.request_id,
            outcome=self.outcome,
            age_s=max(now - self.ended_s, 0.0),
            sources=list(dict.fromkeys(load.source for load in self.loads))[:MAX_ACTIONS],
            num_cached_blocks=self.num_cached_blocks,
            num_loaded_blocks=self.num_loaded_blocks,
            predicted_s=self.predicted_s,
            recompute_s=self.recompute_s,
            load_s=self.load_s,
            actual_load_s=self.actual_load_s,
        )


@dataclass(eq=False, slots=True)
class _Fetch:
    """A prompt whose blocks are being loaded."""

    sequence: EngineSequence
    plan: FetchPlan
    num_cached_blocks: int
    begun_at: float
    late_at: float = 0.0
    next_end: int = 0  # blocks from here on are loaded or requested
    onboarding: Onboarding = field(default_factory=lambda: Onboarding(0, 0, None))
    opened: dict[str, OpenSource] = field(default_factory=dict)
    pieces: deque[Piece] = field(default_factory=deque)
    num_loaded_blocks: int = 0


class Fetcher:
    """Loads prompts' blocks from tiers and peers into their sequences."""

    def __init__(
        self,
        engine: Engine,
        tiers: Sequence[KvSource],
        steps: StepModel,
        peers: PeerReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        config: TierConfig = TierConfig(),
    ) -> None:
        self._engine = engine
        self._step_bytes = int(config.load_step_mb * 1e6)
        self._window_blocks = self._num_blocks(int(config.load_window_mb * 1e6))
        self._num_loading_blocks = 0  # blocks of pieces that are not in place yet
        self._tiers = list(tiers)
        self._steps = steps
        self._peers = peers
        self._clock = clock
        self._fetches: list[_Fetch] = []
        self._probes: list[tuple[OpenSource, Piece]] = []
        self.records: deque[FetchRecord] = deque(maxlen=_NUM_RECORDS)
        self._num_prompts: Counter[str] = Counter()
        self._num_loaded_blocks: Counter[str] = Counter()
        self._predicted_load_s = self._actual_load_s = self._saved_s = 0.0

    @property
    def is_loading(self) -> bool:
        """Whether a prompt waits for loads, so that frequent pumping helps."""
        return bool(self._fetches)

    def after_step(self, stats: StepStats) -> None:
        """Learn the cost of computing from a step."""
        self._steps.observe(stats)

    def pump(self, now: float) -> None:
        """Put loaded pieces in place, request more, give up loads that are late."""
        room = self._step_bytes
        for fetch in list(self._fetches):
            room = self._advance(fetch, now, room)
        for probe in list(self._probes):
            if probe[1].is_done:
                self._probes.remove(probe)
                _end_probe(*probe)

    def stats(self, num_lent_blocks: int = 0, num_copied_blocks: int = 0) -> FetchStats:
        """Totals since the start, and the latest records."""
        return FetchStats(
            num_prompts=dict(self._num_prompts),
            num_loaded_blocks=dict(self._num_loaded_blocks),
            num_lent_blocks=num_lent_blocks,
            num_copied_blocks=num_copied_blocks,
            predicted_load_s=self._predicted_load_s,
            actual_load_s=self._actual_load_s,
            saved_s=self._saved_s,
            latest=[record.action(self._clock()) for record in islice(reversed(self.records), MAX_ACTIONS)],
        )

    def close(self) -> None:
        """Give up all loads."""
        for fetch in list(self._fetches):
            self._end(fetch, "withdrawn", self._clock())

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if anything is being fetched."""
        assert not (idle and self._fetches), f"{len(self._fetches)} prompts are still being fetched"
        num_blocks = sum(piece.num_blocks for fetch in self._fetches for piece in fetch.pieces)
        assert num_blocks == self._num_loading_blocks, f"{self._num_loading_blocks} blocks are loaded, not {num_blocks}"

    def admitted(self, sequence: EngineSequence) -> None:
        """Plan the loads for a sequence that has just been given its blocks."""
        if (error := error_of(self._plan, sequence)) is not None:  # the whole prompt can still be computed
            logger.error("request %s: nothing is loaded for it", sequence.request_id, exc_info=error)

    def _plan(self, sequence: EngineSequence) -> None:
        """Decide which blocks of a prompt to load, and begin."""
        size, now = self._engine.config.block_size, self._clock()
        num_tokens = len(sequence.token_ids)
        digests = self._engine.scheduler.blocks.usable_digests(sequence)
        first_block = -(-sequence.num_computed_tokens // size)
        if first_block >= len(digests):
            return
        found = {source.name: (source, source.look_up(first_block, digests)) for source in self._sources(sequence)}
        if all(offer.end_block <= first_block for _, offer in found.values()):
            return
        plan = plan_fetch(
            [offer for _, offer in found.values()],
            first_block=first_block,
            num_tokens=num_tokens,
            block_size=size,
            compute_s=self._compute_s,
            queue_s=self._queue_s(sequence),
        )
        used = {load.source for load in plan.loads}
        for source, offer in found.values():
            if source.name not in used:
                self._probe(source, first_block, offer.end_block, digests, now)
        fetch = _Fetch(sequence, plan, first_block, now)
        if not plan.loads:
            self._record(fetch, "computed", now)
            return
        end = plan.loads[-1].end_block
        fetch.next_end = end
        fetch.late_at = now + _LATE_FACTOR * plan.load_s + _LATE_SLACK_S
        fetch.onboarding = Onboarding(start=end * size, end=end * size, hold_at=plan.loads[0].first_block * size)
        for name, first, end in plan.loads:
            fetch.opened[name] = found[name][0].open(digests, first, end, now)
        sequence.onboarding = fetch.onboarding
        self._fetches.append(fetch)
        self._request(fetch, now)

    def _sources(self, sequence: EngineSequence) -> list[KvSource]:
        if self._peers is None or sequence.kv_holder is None:
            return self._tiers
        # A decode worker that gets the prompt by a handoff needs its own copy of the prefix for that.
        is_moved = sequence.kv_holder.worker != sequence.kv_receiver
        return [*self._tiers, self._peers.source(sequence.kv_holder, is_moved=is_moved)]

    def _advance(self, fetch: _Fetch, now: float, room: int) -> int:
        """Let one fetch go on. Returns the bytes that others may still copy before the next step."""
        sequence = fetch.sequence
        while fetch.pieces and fetch.pieces[0].is_done and room > 0:
            if sequence.onboarding is not fetch.onboarding:
                break
            piece = fetch.pieces.popleft()
            self._num_loading_blocks -= piece.num_blocks
            piece.learn()
            if not piece.is_complete:
                piece.drop()
                self._fail(fetch, now)
                return room
            room -= self._place(fetch, piece)
        if sequence.onboarding is not fetch.onboarding:
            self._end(fetch, _outcome(fetch), now)
            return room
        if now >= fetch.late_at:
            fetch.onboarding.hold_at = None
        has_more = self._request(fetch, now)
        if not fetch.pieces and not has_more:  # everything that was worth loading is in place
            self._engine.scheduler.blocks.end_onboarding(sequence)
        return room

    def _front(self, sequence: EngineSequence) -> int:
        """First block that computing has not reached."""
        return -(-sequence.num_computed_tokens // self._engine.config.block_size)

    def _request(self, fetch: _Fetch, now: float) -> bool:
        """Request the pieces in front of those that are loaded or requested, as far as computing has come.

        Returns whether more must be requested later: prompts share the window, and those planned first fill it.
        """
        front = self._front(fetch.sequence)
        for load in reversed(fetch.plan.loads):
            opened, first = fetch.opened[load.source], max(load.first_block, front)
            piece_blocks = min(self._num_blocks(_PIECE_BYTES), opened.most_blocks)
            while fetch.next_end > first:
                is_full = self._num_loading_blocks and self._num_loading_blocks + piece_blocks > self._window_blocks
                if is_full or len(fetch.pieces) == PIECES_IN_FLIGHT:
                    return True
                begin = max(first, fetch.next_end - piece_blocks)
                fetch.pieces.append(opened.begin(begin, fetch.next_end, now))
                self._num_loading_blocks += fetch.next_end - begin
                fetch.next_end = begin
        return False

    def _num_blocks(self, num_bytes: int) -> int:
        """Blocks of the pool in this many bytes, at least one."""
        return max(num_bytes // self._engine.block_bytes, 1)

    def _place(self, fetch: _Fetch, piece: Piece) -> int:
        """Put a piece in place, without the blocks that were computed meanwhile. Returns the bytes copied."""
        size, sequence = self._engine.config.block_size, fetch.sequence
        first = max(piece.first_block, self._front(sequence))
        if first >= piece.end_block:
            piece.drop()
            return 0
        num_bytes = piece.place(sequence, first, self._engine.kv)
        stream = self._engine.stream
        is_written = stream.is_done(stream.record())
        begin, end = first * size, piece.end_block * size
        self._engine.scheduler.blocks.onboard(sequence, begin, end, piece.kind, is_written=is_written)
        fetch.num_loaded_blocks += piece.end_block - first
        self._num_loaded_blocks[piece.kind] += piece.end_block - first
        return num_bytes

    def _fail(self, fetch: _Fetch, now: float) -> None:
        """End a fetch whose source lacks blocks it advertised; plan again with what the peer still has."""
        sequence, holder = fetch.sequence, fetch.sequence.kv_holder
        self._end(fetch, "failed", now)
        if holder is None:
            return
        ends = [opened.end_block for opened in fetch.opened.values() if opened.end_block is not None]
        has_more = any(self._front(sequence) < end < holder.num_blocks for end in ends)
        sequence.kv_holder = KvHolder(holder.worker, min(ends)) if has_more else None
        if has_more and sequence.onboarding is None:
            self.admitted(sequence)

    def _end(self, fetch: _Fetch, outcome: str, now: float) -> None:
        """End a fetch: nothing more is loaded for this prompt."""
        for piece in fetch.pieces:
            if outcome == "overtaken" and not piece.is_done:
                piece.learn_late(now)
            piece.drop()
            self._num_loading_blocks -= piece.num_blocks
        fetch.pieces.clear()
        for opened in fetch.opened.values():
            opened.close()
        self._fetches.remove(fetch)
        if fetch.sequence.onboarding is fetch.onboarding:
            self._engine.scheduler.blocks.end_onboarding(fetch.sequence)
        self._record(fetch, outcome, now)

    def _record(self, fetch: _Fetch, outcome: str, now: float) -> None:
        plan = fetch.plan
        record = FetchRecord(
            request_id=fetch.sequence.request_id,
            num_cached_blocks=fetch.num_cached_blocks,
            loads=plan.loads,
            num_loaded_blocks=fetch.num_loaded_blocks,
            predicted_s=plan.predicted_s,
            recompute_s=plan.recompute_s,
            load_s=plan.load_s,
            actual_load_s=now - fetch.begun_at,
            outcome=outcome,
            ended_s=now,
        )
        logger.info("%s", record)
        self.records.append(record)
        self._num_prompts[outcome] += 1
        if outcome == "loaded":
            self._predicted_load_s += record.load_s
            self._actual_load_s += record.actual_load_s
            self._saved_s += record.recompute_s - record.predicted_s

    def _probe(self, source: KvSource, first_block: int, end_block: int, digests: Sequence[bytes], now: float) -> None:
        """From time to time, load a few blocks from a source that the plan does not use, to learn its cost."""
        end_block = min(end_block, first_block + self._num_blocks(_PROBE_BYTES))
        if end_block <= first_block or now < source.cost.probed_at + _PROBE_INTERVAL_S:
            return
        source.cost.probed_at = now
        opened = source.open(digests, first_block, end_block, now)
        self._probes.append((opened, opened.begin(first_block, end_block, now)))

    def _compute_s(self, start: int, end: int) -> float:
        """Predicted time to compute tokens [start, end)."""
        return self._steps.prefill_s(end - start, start, self._engine.config.max_num_batched_tokens)

    def _queue_s(self, sequence: EngineSequence) -> float:
        """Predicted time until the prompts admitted before this one are computed."""
        others = (s for s in self._engine.scheduler.running if s is not sequence and not s.is_decoding)
        return sum(self._compute_s(s.num_computed_tokens, len(s.token_ids)) for s in others)


def _outcome(fetch: _Fetch) -> str:
    """The outcome of a fetch whose sequence expects no more blocks."""
    if fetch.sequence.num_computed_tokens < fetch.onboarding.end:
        return "withdrawn"  # aborted or preempted
    return "loaded" if fetch.num_loaded_blocks else "overtaken"


def _end_probe(opened: OpenSource, piece: Piece) -> None:
    piece.learn()
    piece.drop()
    opened.close()
