"""The KV of one worker beyond its pool: what is kept in which tier, and what a prompt takes from there.

Runs in the worker's loop and never waits. Blocks are offered to every tier once they are full, so an eviction from the
pool costs nothing; a prompt is planned when it is admitted (`kv_transfer.fetch_planner`), its loads come in from the
back, and computing goes on from the front whenever they are late.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.engine import Engine
from engine.sequence import Onboarding
from engine.sequence import Sequence as EngineSequence
from kv_transfer.codec import Codec, create_codec
from kv_transfer.eviction import create_policy
from kv_transfer.fetch_planner import FetchPlan, LoadRange, Source, plan_fetch
from kv_transfer.tiers import BlockStore, DiskStore, Load, MemoryStore, ObjectStore, Tier
from protocol.config import TierConfig
from protocol.messages import FetchStats, StepStats, TierLoad
from router.cost_model import StepModel

__all__ = ["CachedTier", "FetchRecord", "LoadPrior", "TieredCache", "create_tiers"]

logger = logging.getLogger(__name__)


class LoadPrior(NamedTuple):
    """What a load is thought to cost before one was measured."""

    latency_s: float
    bytes_per_s: float


_PIECE_BLOCKS = 32  # of one load: 12 MB of this project's default model, a few ms from memory
_PIECES_IN_FLIGHT = 4  # per prompt
_LANDED_BYTES_PER_TURN = 32 << 20  # copied into the pool between two steps: about 10 ms
_LATE_FACTOR = 2.0  # a load that takes this much longer than predicted is not waited for
_LATE_SLACK_S = 0.02
_PROBE_INTERVAL_S = 5.0  # how often a tier that is not worth using is tried, to notice when it is
_PROBE_BLOCKS = 4
_NUM_RECORDS = 256
_PRIORS = {
    "host": LoadPrior(50e-6, 10e9),
    "disk": LoadPrior(1e-3, 1e9),
    "object": LoadPrior(50e-3, 200e6),
}
_NUM_THREADS = {"host": 1, "disk": 2, "object": 8}
_PRIVATE_TIERS = {"host"}
_RESCAN_S = {"disk": 60.0, "object": 60.0}  # other workers add blocks to these
_MIN_BLOCK_S = 1e-7


class CachedTier:
    """A tier with the codec its blocks are kept in, and what its loads cost."""

    def __init__(self, tier: Tier, codec: Codec, block_bytes: int, *, num_threads: int, prior: LoadPrior) -> None:
        self.tier = tier
        self.codec = codec
        self.block_bytes = block_bytes  # encoded
        self.probed_at = -math.inf
        self.block_s = block_bytes / prior.bytes_per_s  # learned
        self._latency_s = prior.latency_s
        self._num_threads = num_threads

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.tier.name

    def source(self, first_block: int, digests: Sequence[bytes]) -> Source:
        """What it has of a chain from `first_block` on, for the planner."""
        num_present = self.tier.count_present(digests[first_block:])
        return Source(self.name, first_block + num_present, self._latency_s, self.block_s, self.tier.num_queued_loads)

    def observe(self, num_blocks: int, read_s: float) -> None:
        """Learn from a load: `read_s` is the time its blocks took in the store, summed over the threads.

        The mean of logarithms: a tier's speed jumps by factors when others begin or cease to use it, and each load
        halves the distance, up or down.
        """
        measured_s = max(read_s / (num_blocks * self._num_threads), _MIN_BLOCK_S)
        self.block_s = math.sqrt(self.block_s * measured_s)

    def observe_at_least(self, num_blocks: int, seconds: float) -> None:
        """Learn from a load that was given up: it would have taken longer than this, nobody knows how much.

        Twice the last estimate at least, or a prompt of which too much is expected of computing would go on losing.
        """
        self.block_s = max(2 * self.block_s, seconds / num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRecord:
    """One decision, with what became of it. Seconds."""

    request_id: str
    num_cached_blocks: int  # in the pool
    loads: tuple[LoadRange, ...]
    num_loaded_blocks: int
    predicted_s: float
    recompute_s: float
    load_s: float  # predicted, of the loads alone
    actual_load_s: float
    outcome: str  # loaded, overtaken, failed, withdrawn, computed


@dataclass(eq=False, slots=True)
class _Piece:
    tier: CachedTier
    first_block: int
    end_block: int
    data: Tensor  # [num_blocks, encoded bytes], uint8
    load: Load
    begun_at: float


@dataclass(eq=False, slots=True)
class _Fetch:
    """A prompt whose blocks are on their way."""

    sequence: EngineSequence
    onboarding: Onboarding
    plan: FetchPlan
    num_cached_blocks: int
    begun_at: float
    late_at: float
    next_end: int  # blocks from here on are loaded or asked for
    pieces: deque[_Piece] = field(default_factory=deque)
    num_loaded_blocks: int = 0


class TieredCache:
    """Keeps the blocks of one engine in tiers and brings them back.

    `tiers` are ordered from fast to slow. Registers itself with the engine's scheduler.
    """

    def __init__(
        self,
        engine: Engine,
        tiers: Sequence[CachedTier],
        steps: StepModel,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tiers = {cached.name: cached for cached in tiers}
        self._own_tiers = [cached.tier for cached in tiers if cached.name in _PRIVATE_TIERS]
        self._steps = steps
        self._clock = clock
        self._fetches: list[_Fetch] = []
        self._probes: list[_Piece] = []
        self.records: deque[FetchRecord] = deque(maxlen=_NUM_RECORDS)
        self._num_prompts: Counter[str] = Counter()
        self._num_loaded_blocks = 0
        self._predicted_load_s = self._actual_load_s = self._saved_s = 0.0
        # Told of what `take_events` sees: the place ("pool" or a tier), digests stored there, digests removed.
        self.on_changed: Callable[[str, list[bytes], list[bytes]], None] = _nothing
        engine.scheduler.on_admitted = self._admitted
        engine.scheduler.on_published = self._published

    @property
    def is_loading(self) -> bool:
        """Whether pumping often makes a prompt go on sooner."""
        return bool(self._fetches)

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to pump for."""
        return any(cached.tier.is_busy for cached in self.tiers)

    @property
    def tiers(self) -> list[CachedTier]:
        """From fast to slow."""
        return list(self._tiers.values())

    def after_step(self, stats: StepStats) -> None:
        """Learn what computing costs."""
        self._steps.observe(stats)

    def pump(self, now: float) -> None:
        """Put what has arrived in place, ask for more, give up what is late."""
        for cached in self.tiers:
            cached.tier.poll()
        room = _LANDED_BYTES_PER_TURN
        for fetch in list(self._fetches):
            room = self._advance(fetch, now, room)
        for probe in list(self._probes):
            if probe.load.is_done:
                self._probes.remove(probe)
                _learn(probe)

    def loads(self) -> list[TierLoad]:
        """The tiers as the router is told of them."""
        return [
            TierLoad(name=cached.name, block_s=cached.block_s, **asdict(cached.tier.stats())) for cached in self.tiers
        ]

    def fetch_stats(self) -> FetchStats | None:
        """What was decided so far; None without tiers."""
        if not self._tiers:
            return None
        return FetchStats(
            num_prompts=dict(self._num_prompts),
            num_loaded_blocks=self._num_loaded_blocks,
            predicted_load_s=self._predicted_load_s,
            actual_load_s=self._actual_load_s,
            saved_s=self._saved_s,
        )

    def digests(self) -> list[bytes]:
        """Every block this worker has for itself, in its pool or in host memory."""
        held = dict.fromkeys(self._engine.pool.cached_digests())
        for tier in self._own_tiers:
            held |= dict.fromkeys(tier.digests())
        return list(held)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, of what `digests` lists.

        Disk and object store are shared between workers, so what they hold says nothing for one worker or another.
        """
        pool = self._engine.pool
        of_pool = pool.take_events()
        self.on_changed("pool", *of_pool)
        changed = dict.fromkeys(itertools.chain(*of_pool))
        for cached in self.tiers:
            of_tier = cached.tier.take_events()
            self.on_changed(cached.name, *of_tier)
            if cached.tier in self._own_tiers:
                changed |= dict.fromkeys(itertools.chain(*of_tier))
        stored = [
            digest
            for digest in changed
            if digest in pool or any(tier.count_present([digest]) for tier in self._own_tiers)
        ]
        present = set(stored)
        return stored, [digest for digest in changed if digest not in present]

    def close(self) -> None:
        """Give up all loads and close the tiers."""
        for fetch in list(self._fetches):
            self._end(fetch, "withdrawn", self._clock())
        for cached in self.tiers:
            cached.tier.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the tiers' books agree; with `idle`, nothing may be fetched."""
        for cached in self.tiers:
            cached.tier.check_integrity()
        assert not (idle and self._fetches), f"{len(self._fetches)} prompts are still being fetched"

    # Loading.

    def _admitted(self, sequence: EngineSequence) -> None:
        """Decide what of a prompt to load, and begin."""
        size, now = self._engine.config.block_size, self._clock()
        num_tokens = len(sequence.token_ids)
        digests = sequence.digests[: (num_tokens - 1) // size]
        first_block = sequence.num_computed_tokens // size
        if first_block >= len(digests):
            return
        sources = [cached.source(first_block, digests) for cached in self.tiers]
        if all(source.end_block <= first_block for source in sources):
            return
        plan = plan_fetch(
            sources,
            first_block=first_block,
            num_tokens=num_tokens,
            block_size=size,
            compute_s=self._compute_s,
            queue_s=self._queue_s(sequence),
        )
        self._probe_unused(plan, sources, first_block, digests, now)
        if not plan.loads:
            self._record(_Fetch(sequence, Onboarding(0, 0, None), plan, first_block, now, now, 0), "computed", now)
            return
        end = plan.loads[-1].end_block
        onboarding = Onboarding(start=end * size, end=end * size, hold_at=plan.loads[0].first_block * size)
        sequence.onboarding = onboarding
        late_at = now + _LATE_FACTOR * plan.load_s + _LATE_SLACK_S
        fetch = _Fetch(sequence, onboarding, plan, first_block, now, late_at, end)
        self._fetches.append(fetch)
        self._ask(fetch, now)

    def _advance(self, fetch: _Fetch, now: float, room: int) -> int:
        """One fetch's turn; the bytes that may still be copied in this one."""
        sequence, scheduler = fetch.sequence, self._engine.scheduler
        while fetch.pieces and fetch.pieces[0].load.is_done and room > 0:
            if sequence.onboarding is not fetch.onboarding:
                break
            piece = fetch.pieces.popleft()
            _learn(piece)
            if not piece.load.is_complete:
                self._end(fetch, "failed", now)
                return room
            room -= self._land(fetch, piece)
        if sequence.onboarding is not fetch.onboarding:
            self._end(fetch, _outcome(fetch), now)
            return room
        if now >= fetch.late_at:
            fetch.onboarding.hold_at = None
        self._ask(fetch, now)
        if not fetch.pieces:  # all that was worth loading is in place
            scheduler.end_onboarding(sequence)
        return room

    def _front(self, fetch: _Fetch) -> int:
        """First block that computing has not touched."""
        return -(-fetch.sequence.num_computed_tokens // self._engine.config.block_size)

    def _ask(self, fetch: _Fetch, now: float) -> None:
        """Ask for the pieces before those that are loaded or asked for, as far as computing has not got there."""
        front = self._front(fetch)
        for load in reversed(fetch.plan.loads):
            first = max(load.first_block, front)
            while fetch.next_end > first and len(fetch.pieces) < _PIECES_IN_FLIGHT:
                begin = max(first, fetch.next_end - _PIECE_BLOCKS)
                piece = self._begin(self._tiers[load.source], fetch.sequence.digests, begin, fetch.next_end, now)
                fetch.pieces.append(piece)
                fetch.next_end = begin

    def _begin(self, cached: CachedTier, digests: Sequence[bytes], first: int, end: int, now: float) -> _Piece:
        data = torch.empty(end - first, cached.block_bytes, dtype=torch.uint8)
        load = cached.tier.load(digests[first:end], data.numpy())
        return _Piece(cached, first, end, data, load, now)

    def _land(self, fetch: _Fetch, piece: _Piece) -> int:
        """Copy a piece into the sequence's blocks, less what was computed meanwhile; the bytes copied."""
        size, sequence = self._engine.config.block_size, fetch.sequence
        first = max(piece.first_block, self._front(fetch))
        if first >= piece.end_block:
            return 0
        kv, blocks = self._engine.kv, sequence.blocks[first : piece.end_block]
        content = torch.empty(len(blocks), *kv.shape[1:], dtype=kv.dtype, device=kv.device)
        piece.tier.codec.decode(piece.data[first - piece.first_block :].to(kv.device), content)
        kv[torch.tensor(blocks, device=kv.device)] = content
        self._engine.scheduler.onboard(sequence, first * size, piece.end_block * size)
        fetch.num_loaded_blocks += len(blocks)
        return len(blocks) * self._engine.block_bytes

    def _end(self, fetch: _Fetch, outcome: str, now: float) -> None:
        """Nothing more is loaded for this prompt."""
        for piece in fetch.pieces:
            piece.load.abandon()
            if outcome == "overtaken":  # it takes at least this long, which is all that is known
                piece.tier.observe_at_least(piece.end_block - piece.first_block, now - piece.begun_at)
        fetch.pieces.clear()
        self._fetches.remove(fetch)
        if fetch.sequence.onboarding is fetch.onboarding:
            self._engine.scheduler.end_onboarding(fetch.sequence)
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
        )
        logger.info("%s", record)
        self.records.append(record)
        self._num_prompts[outcome] += 1
        self._num_loaded_blocks += record.num_loaded_blocks
        if outcome == "loaded":
            self._predicted_load_s += record.load_s
            self._actual_load_s += record.actual_load_s
            self._saved_s += record.recompute_s - record.predicted_s

    def _probe_unused(
        self, plan: FetchPlan, sources: Sequence[Source], first_block: int, digests: Sequence[bytes], now: float
    ) -> None:
        """Load a few blocks for nothing from tiers that have some and are not used, now and then."""
        used = {load.source for load in plan.loads}
        for source in sources:
            cached = self._tiers[source.name]
            num_blocks = min(source.end_block - first_block, _PROBE_BLOCKS)
            if source.name in used or num_blocks <= 0 or now < cached.probed_at + _PROBE_INTERVAL_S:
                continue
            cached.probed_at = now
            self._probes.append(self._begin(cached, digests, first_block, first_block + num_blocks, now))

    def _compute_s(self, start: int, end: int) -> float:
        """Predicted time to compute tokens [start, end)."""
        return self._steps.prefill_s(end - start, start, self._engine.config.max_num_batched_tokens)

    def _queue_s(self, sequence: EngineSequence) -> float:
        """Predicted time until the prompts admitted before this one are computed."""
        others = (s for s in self._engine.scheduler.running if s is not sequence and not s.is_decoding)
        return sum(self._compute_s(s.num_computed_tokens, len(s.token_ids)) for s in others)

    # Keeping.

    def _published(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Offer full blocks to every tier that lacks them. Copies them: the pool may reuse them from now on."""
        kv = self._engine.kv
        for cached in self.tiers:
            missing = [idx for idx in range(first, end) if sequence.digests[idx] not in cached.tier]
            if not missing:
                continue
            data = torch.empty(len(missing), cached.block_bytes, dtype=torch.uint8, device=kv.device)
            cached.codec.encode(kv[torch.tensor([sequence.blocks[idx] for idx in missing], device=kv.device)], data)
            for idx, row in zip(missing, data.cpu().numpy(), strict=True):
                parent = sequence.digests[idx - 1] if idx else sequence.root
                cached.tier.store(sequence.digests[idx], parent, row)


def create_tiers(config: TierConfig, engine: Engine) -> list[CachedTier]:
    """The tiers that are configured, from fast to slow. Raises `ConfigError` for one that cannot be used."""
    tiers: list[CachedTier] = []

    def add(name: str, codec_name: str, capacity_gb: float, make: Callable[[int, int], BlockStore]) -> None:
        codec = create_codec(codec_name)
        block_bytes = codec.encoded_bytes(engine.kv.shape[1:], engine.kv.dtype)
        num_blocks = max(int(capacity_gb * 1e9) // block_bytes, 1)
        num_threads = _NUM_THREADS[name]
        tier = Tier(
            name,
            make(block_bytes, num_blocks),
            create_policy(config.eviction_policy, num_blocks),
            capacity_blocks=num_blocks,
            num_threads=num_threads,
            rescan_s=_RESCAN_S.get(name, math.inf),
        )
        tiers.append(CachedTier(tier, codec, block_bytes, num_threads=num_threads, prior=_PRIORS[name]))

    if config.host_cache_gb:
        add("host", config.host_cache_codec, config.host_cache_gb, MemoryStore)
    if config.disk_cache_path:
        folder = Path(config.disk_cache_path).expanduser() / config.disk_cache_codec
        add(
            "disk",
            config.disk_cache_codec,
            config.disk_cache_gb,
            lambda size, _: DiskStore(folder, engine.namespace, size),
        )
    if config.object_cache_url:
        url = f"{config.object_cache_url.rstrip('/')}/{config.object_cache_codec}"
        add(
            "object",
            config.object_cache_codec,
            config.object_cache_gb,
            lambda size, _: ObjectStore(url, engine.namespace, size),
        )
    return tiers


def _outcome(fetch: _Fetch) -> str:
    """What became of a fetch whose sequence expects no more."""
    if fetch.sequence.num_computed_tokens < fetch.onboarding.end:
        return "withdrawn"  # aborted or preempted
    return "loaded" if fetch.num_loaded_blocks else "overtaken"


def _learn(piece: _Piece) -> None:
    if piece.load.num_loaded:
        piece.tier.observe(piece.load.num_loaded, piece.load.read_s)


def _nothing(*_: object) -> None:
    """Nobody has registered."""
