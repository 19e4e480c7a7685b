"""One tier of cached blocks: loads and stores under way. `block_index.py` knows the blocks, `io_threads.py` moves
bytes.

The owner's thread makes all calls, and only it changes the index and the counters; `poll` collects what the I/O threads
have finished. No call of the owner waits for I/O. Loads go before stores, and stores are dropped when there is too
much to do.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, MakeBlock, StoreFailure
from tandem.kv_transfer.tiers.block_index import BlockIndex, StoredBlock
from tandem.kv_transfer.tiers.io_threads import IoThreads, ReadJob, ReadResult, ScanResult, WriteJob, WriteResult
from tandem.protocol.messages import TierLoad

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0
MAX_DOUBLINGS = 16


class TierRead(ReadJob):
    """Blocks being loaded. Changes only inside calls of its tier; there is nothing to release."""

    def __init__(self, blocks: list[StoredBlock], buffers: list[Block], begun_at: float, deadline: float) -> None:
        super().__init__([block.name for block in blocks], buffers)
        self.is_done = False  # from then on no thread touches the buffers
        self.num_loaded = 0  # leading buffers that hold their blocks; the content of the others is undefined
        self.failure = ""  # why not all are loaded: a `StoreFailure`, or "late", "abandoned", "closed"
        self.read_s = 0.0  # seconds in the store, over all blocks and threads, without time in queues
        self._blocks = blocks
        self._begun_at = begun_at
        self._deadline = deadline
        self._arrived: set[int] = set()
        self._num_expected = len(blocks)  # leading blocks that can still arrive

    @property
    def num_blocks(self) -> int:
        """Blocks that were asked for."""
        return len(self.buffers)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks that were asked for are loaded."""
        return self.is_done and self.num_loaded == self.num_blocks

    def abandon(self) -> None:
        """Give up what has not arrived. The next `poll` at which no thread writes to its buffers makes it done."""
        self.failure = self.failure or "abandoned"
        self._deadline = self._begun_at


@dataclass(eq=False, slots=True)
class _TierCounters:
    """The counts of a running tier."""

    misses: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    stored: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0


class TierWrite(WriteJob):
    """A block being stored. Its bytes must not change until `is_done`."""

    is_done = False


class Tier:
    """The blocks of one store, up to `capacity_blocks`, with `num_threads` of its own for the I/O.

    It scans the store when it starts, and again every `rescan_s` to learn what others who share it added or removed.
    A store that proves unreachable is left alone for `pause_s`: until then no block is present and none is stored. That
    doubles with each read that fails so, up to `MAX_PAUSE_S`: each time, a request has waited for nothing.
    The tier owns `store` and `policy`.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        policy: EvictionPolicy,
        *,
        capacity_blocks: int,
        num_threads: int = 1,
        max_queued_stores: int = 256,
        load_timeout_s: float = 5.0,
        pause_s: float = 1.0,
        rescan_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._store = store
        self._max_queued_stores = max_queued_stores
        self._load_timeout_s = load_timeout_s
        self._pause_s = pause_s
        self._rescan_s = rescan_s
        self._clock = clock

        self._index = BlockIndex(policy, capacity_blocks)
        self._writes: dict[bytes, TierWrite] = {}
        self._live: list[TierRead] = []
        self._counts = _TierCounters()
        self._paused_until = float("-inf")
        self._num_pauses = 0  # because of reads, since the store last read a block
        self._scan_at = float("inf")
        self._is_scanning = False
        self._reconciling: Iterator[None] = iter(())
        self._is_closed = False
        self._io = IoThreads(name, store, num_threads)
        self._results = self._io.results
        self._begin_scan()

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block is stored or being written."""
        return digest in self._index or digest in self._writes

    @property
    def capacity_blocks(self) -> int:
        """The most blocks that it keeps."""
        return self._index.capacity

    @property
    def is_scanning(self) -> bool:
        """Whether some stored blocks may not be known yet."""
        return self._is_scanning

    @property
    def is_busy(self) -> bool:
        """Whether polling may change anything soon."""
        return bool(self._live or self._writes or self.is_scanning)

    @property
    def is_paused(self) -> bool:
        """Whether the store is not used now, because it could not be reached or the tier is closed."""
        return self._is_closed or (self._paused_until > float("-inf") and self._clock() < self._paused_until)

    @property
    def num_queued_loads(self) -> int:
        """Blocks that were asked for and are not loaded yet."""
        return sum(len(load.names) - load.num_loaded for load in self._live)

    @property
    def num_free_writes(self) -> int:
        """How many more blocks can be queued to be stored."""
        return max(self._max_queued_stores - len(self._writes), 0)

    def digests(self) -> list[bytes]:
        """All stored blocks: a snapshot for a listener that missed events."""
        return self._index.digests()

    def count_present(self, digests: Sequence[bytes]) -> int:
        """How many leading digests could be loaded. No I/O; 0 while the store is unreachable."""
        return 0 if self.is_paused else self._index.count_leading(digests)

    def load(self, digests: Sequence[bytes], buffers: Iterable[Block], *, timeout_s: float | None = None) -> TierRead:
        """Begin to copy blocks into buffers of the same number, first block first.

        The tier owns the buffers until the load is done. That takes at most `timeout_s` as long as `poll` is called;
        then the leading blocks that have arrived are loaded. Blocks that are not there are misses.
        """
        buffers = list(buffers)
        assert len(digests) == len(buffers), f"{len(digests)} digests for {len(buffers)} buffers"
        for buffer in buffers:
            self._check_size(buffer)
        now = self._clock()
        blocks = self._index.use(digests[: self.count_present(digests)])
        load = TierRead(blocks, buffers, now, now + (self._load_timeout_s if timeout_s is None else timeout_s))
        if blocks:
            self._io.read(load)
        if len(blocks) < len(buffers):
            load.failure = self._why_absent
        self._live.append(load)
        self._settle(load, now)
        return load

    def store(self, digest: bytes, parent: bytes | None, data: Block | MakeBlock) -> TierWrite | None:
        """Begin to keep a block, evicting others if need be. None if it is already stored or is dropped.

        `data` is its bytes, whose buffer is free at once with None, or a function that makes them in an I/O thread.
        """
        if isinstance(data, np.ndarray):
            self._check_size(data)
        if digest in self:
            return None
        if reason := self._why_not_stored(parent):
            self._counts.drops[reason] += 1
            return None
        name = BlockName(digest, parent)
        evicted = self._index.try_reserve(name)
        if evicted is None:
            self._counts.drops["not worth it"] += 1
            return None
        write = self._writes[digest] = TierWrite(name, data)
        self._io.write(write, evicted)
        return write

    def note_dropped(self, reason: str, num_blocks: int) -> None:
        """Count blocks that their owner could not even offer."""
        if num_blocks:
            self._counts.drops[reason] += num_blocks

    def note_end(self, digests: Sequence[bytes], *, has_calls: bool, is_demoted: bool = False) -> None:
        """As `BlockIndex.note_end`."""
        self._index.note_end(digests, has_calls=has_calls, is_demoted=is_demoted)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these blocks from eviction until `unpin`, also those stored later; a second pin changes nothing."""
        self._index.pin(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these blocks; others are ignored."""
        self._index.unpin(digests)

    def pinned_digests(self) -> set[bytes]:
        """A copy of all pinned digests, there or not."""
        return self._index.pinned_digests()

    def poll(self) -> None:
        """Collect what the I/O threads have finished. It takes under a microsecond when there is nothing."""
        if not (self._results or self._live or self._is_scanning or self._scan_at < float("inf")):
            return
        now = self._clock()
        while self._results:
            result = self._results.popleft()
            match result:
                case ReadResult():
                    self._read_done(result, now)
                case WriteResult():
                    self._write_done(result, now)
                case ScanResult():
                    self._reconciling = self._reconcile(result.found, now)
        for load in list(self._live):
            self._settle(load, now)
        next(self._reconciling, None)
        if now >= self._scan_at and not self._is_scanning:
            self._begin_scan()

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, disjoint: each digest is listed as it is now."""
        return self._index.take_events()

    def stats(self) -> TierLoad:
        """Its state now, and what has happened since the start. The cost of its loads is left out."""
        counts, block_bytes = self._counts, self._store.block_bytes
        return TierLoad(
            name=self.name,
            num_blocks=len(self._index),
            capacity_blocks=self.capacity_blocks,
            num_queued_loads=self.num_queued_loads,
            num_queued_stores=len(self._writes),
            num_hits=counts.hits,
            num_misses=dict(counts.misses),
            num_stored=counts.stored,
            num_drops=dict(counts.drops),
            num_evictions=self._index.num_evictions,
            bytes_in=counts.stored * block_bytes,
            bytes_out=counts.bytes_out,
            seconds_in=counts.seconds_in,
            seconds_out=counts.seconds_out,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """End all loads, write what is queued as far as `timeout_s` allows, and close the store.

        A thread that hangs in the store is left behind with the buffers of writes, until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for load in self._live:
            load.failure = load.failure or "closed"
            load.abandon()
        have_threads_ended = self._io.close(timeout_s)
        self.poll()
        if not have_threads_ended:
            return
        for write in list(self._writes.values()):
            self._drop(write, "closed")
        self._store.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless index, writes and policy agree; with `idle`, also if a load or write is open."""
        self._index.check_integrity(self._writes)
        assert not (idle and self.is_busy), f"{len(self._live)} loads and {len(self._writes)} writes under way"

    @property
    def _why_absent(self) -> str:
        if self._is_closed:
            return "closed"
        return StoreFailure.UNREACHABLE.value if self.is_paused else StoreFailure.ABSENT.value

    def _why_not_stored(self, parent: bytes | None) -> str:
        """Why a block cannot be stored now; "" if it can."""
        if self.is_paused:
            return self._why_absent
        if parent is not None and parent not in self:
            return "parent not there"  # no lookup could find it; if the parent is computed again, so is this block
        return "" if self.num_free_writes else "queue full"

    def _check_size(self, buffer: Block) -> None:
        expected = (np.dtype(np.uint8), (self._store.block_bytes,))
        assert (buffer.dtype, buffer.shape) == expected, f"{buffer.dtype}{buffer.shape} is not a block: {expected}"

    def _pause(self, now: float, *, has_delayed: bool = False) -> None:
        """Leave the store alone for a while, longer each time if it `has_delayed` a request."""
        if now >= self._paused_until:
            pause_s = max(min(self._pause_s * 2**self._num_pauses, MAX_PAUSE_S), self._pause_s)
            self._num_pauses = min(self._num_pauses + has_delayed, MAX_DOUBLINGS)
            logger.warning("tier %s does not answer; it is not used for %g s", self.name, pause_s)
            self._paused_until = now + pause_s
        self._scan_at = self._paused_until  # it may come back with other blocks

    def _read_done(self, done: ReadResult, now: float) -> None:
        load = cast(TierRead, done.job)
        self._counts.seconds_out += done.seconds
        load.read_s += done.seconds
        if done.failure is None:
            self._num_pauses = 0
            self._counts.bytes_out += self._store.block_bytes
            load._arrived.add(done.position)
            return
        load._num_expected = min(load._num_expected, done.position)
        if load.failure in ("", StoreFailure.ABSENT.value):
            load.failure = done.failure.value
        if done.failure is StoreFailure.UNREACHABLE:
            self._pause(now, has_delayed=True)
        else:
            self._index.forget(load._blocks[done.position])

    def _settle(self, load: TierRead, now: float) -> None:
        """End the load if everything has arrived that can, or the time is up."""
        while load.num_loaded in load._arrived:
            load.num_loaded += 1
        if load.num_loaded < load._num_expected and now < load._deadline:
            return
        if not self._io.cancel(load):  # a thread writes into a buffer: a matter of microseconds
            return
        self._live.remove(load)
        self._index.end_use(load._blocks)
        num_missed = load.num_blocks - load.num_loaded
        self._counts.hits += load.num_loaded
        if num_missed:
            load.failure = load.failure or "late"
            self._counts.misses[load.failure] += num_missed
        load.is_done = True

    def _write_done(self, done: WriteResult, now: float) -> None:
        self._counts.seconds_in += done.seconds
        write = cast(TierWrite, done.job)
        if done.failure is not None:
            self._drop(write, done.failure.value)
            if done.failure is StoreFailure.UNREACHABLE:
                self._pause(now)
            elif done.failure is StoreFailure.FULL and (evicted := self._index.try_evict()):
                self._io.delete(evicted)  # the store has less room than configured: make some for the next block
            return
        del self._writes[write.name.digest]
        write.is_done = True
        self._counts.stored += 1
        self._index.publish(write.name)

    def _drop(self, write: TierWrite, reason: str) -> None:
        del self._writes[write.name.digest]
        write.is_done = True
        self._index.cancel(write.name)
        self._counts.drops[reason] += 1

    def _begin_scan(self) -> None:
        self._scan_at = float("inf")
        self._is_scanning = True
        self._index.begin_scan()
        self._io.scan()

    def _reconcile(self, found: Sequence[BlockName] | StoreFailure, now: float) -> Iterator[None]:
        """Bring the index in line with a scan, a piece at a time."""
        if isinstance(found, StoreFailure):
            self._pause(now)
        else:
            yield from self._index.reconcile(found, self._io.delete)
            self._scan_at = min(self._scan_at, now + self._rescan_s)
        self._index.end_scan()
        self._is_scanning = False
