"""One tier of cached blocks: which are there, which have to go, and the threads that move their bytes.

The owner's thread makes all calls and alone changes the index, the policy and the counters; `poll` takes in what the
I/O threads have finished. Nothing the owner calls waits for I/O. Loads go before stores, and stores are what is given
up when there is too much to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from tandem.kv_transfer.eviction.base import EvictionPolicy
from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure

__all__ = ["Tier", "TierRead", "TierStats", "TierWrite"]

logger = logging.getLogger(__name__)

_RECONCILED_PER_POLL = 512  # blocks of a scan that one poll compares with the index: at most a few milliseconds


@dataclass(eq=False, slots=True)
class _StoredBlock:
    """A block that is there. A load keeps hold of its entries, so that one that was forgotten meanwhile is known."""

    name: BlockName
    seen_in: int  # number of the last scan that found it, or during which it was written
    is_forgotten: bool = False


class TierRead:
    """Blocks on their way up. Changes only inside calls of its tier; there is nothing to release."""

    def __init__(self, entries: list[_StoredBlock], buffers: list[Block], begun_at: float, deadline: float) -> None:
        self.is_done = False  # from then on nobody touches the buffers any more
        self.num_loaded = 0  # leading buffers that hold their blocks; the others hold anything
        self.failure = ""  # why not all are loaded: a `StoreFailure`, or "late", "abandoned", "closed"
        self.read_s = 0.0  # in the store, over all blocks and threads: what the load cost, without waiting for a turn
        self._entries = entries
        self._buffers = buffers
        self._begun_at = begun_at
        self._deadline = deadline
        self._arrived: set[int] = set()
        self._num_expected = len(entries)  # leading blocks that can still come
        # Under the tier's lock, together with the I/O threads:
        self._next = 0  # first block no thread has taken
        self._limit = len(entries)  # blocks from here on are not wanted: one before them failed
        self._num_copying = 0  # threads that write into a buffer now
        self._is_ended = False  # no thread may begin to

    @property
    def num_blocks(self) -> int:
        """Blocks that were asked for."""
        return len(self._buffers)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks that were asked for are loaded."""
        return self.is_done and self.num_loaded == self.num_blocks

    def abandon(self) -> None:
        """Give up what has not arrived; the next `poll` that finds no thread at its buffers makes it done."""
        self.failure = self.failure or "abandoned"
        self._deadline = self._begun_at


class TierWrite:
    """A block on its way down. Its buffer must stay as it is until `is_done`."""

    def __init__(self, name: BlockName, data: Block) -> None:
        self.name = name
        self.is_done = False
        self._data = data


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts since the start, but for the first four, which are of now. Of blocks, where nothing else is said."""

    num_blocks: int
    capacity_blocks: int
    num_queued_loads: int
    num_queued_stores: int
    num_hits: int  # hits and misses are all blocks that loads asked for
    num_misses: Mapping[str, int]  # by reason
    num_stored: int
    num_drops: Mapping[str, int]  # blocks that were to be stored and were not, by reason
    num_evictions: int
    bytes_in: int
    bytes_out: int
    seconds_in: float  # of all I/O threads, in the store
    seconds_out: float


class _ReadDone(NamedTuple):
    load: TierRead
    position: int
    failure: StoreFailure | None
    seconds: float


class _WriteDone(NamedTuple):
    write: TierWrite
    failure: StoreFailure | None
    seconds: float


class _ScanDone(NamedTuple):
    found: Sequence[BlockName] | StoreFailure


_Done: TypeAlias = _ReadDone | _WriteDone | _ScanDone
_Job: TypeAlias = Callable[[Block], _Done | None]


@dataclass(eq=False, slots=True)
class _Counters:
    misses: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    stored: int = 0
    evictions: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0


class Tier:
    """The blocks of one store, up to `capacity_blocks`, with `num_threads` of its own for the I/O.

    Begins by scanning the store, and does so again every `rescan_s` to learn what others who share it added or removed.
    A store that proves unreachable is left alone for `pause_s`: until then nothing is present and nothing is stored.
    Takes over `store` and `policy`.
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
        assert capacity_blocks > 0, f"capacity_blocks={capacity_blocks}"
        assert num_threads > 0, f"num_threads={num_threads}"
        self.name = name
        self.capacity_blocks = capacity_blocks
        self._store = store
        self._policy = policy
        self._max_queued_stores = max_queued_stores
        self._load_timeout_s = load_timeout_s
        self._pause_s = pause_s
        self._rescan_s = rescan_s
        self._clock = clock

        self._index: dict[bytes, _StoredBlock] = {}
        self._writes: dict[bytes, TierWrite] = {}
        self._live: list[TierRead] = []
        self._pinned: set[bytes] = set()  # there or not
        self._changed: dict[bytes, None] = {}  # digests whose presence changed since they were last taken
        self._counts = _Counters()
        self._paused_until = float("-inf")
        self._scan_at = float("inf")
        self._num_scans = 0
        self._is_scanning = False
        self._reconciling: Iterator[None] = iter(())
        self._gone: set[bytes] = set()  # since the last scan began, which may still have found them
        self._is_closed = False

        self._work = threading.Condition()  # of the two below and of the loads' fields that say so
        self._loads: deque[TierRead] = deque()
        self._jobs: deque[_Job] = deque()
        self._done: deque[_Done] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"tier-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._begin_scan()

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block is there or on its way down."""
        return digest in self._index or digest in self._writes

    @property
    def is_scanning(self) -> bool:
        """Whether blocks that are there may not be known yet."""
        return self._is_scanning

    @property
    def is_busy(self) -> bool:
        """Whether polling may change anything soon."""
        return bool(self._live or self._writes or self.is_scanning)

    @property
    def num_queued_loads(self) -> int:
        """Blocks that were asked for and are not loaded yet."""
        return sum(len(load._entries) - load.num_loaded for load in self._live)

    def digests(self) -> list[bytes]:
        """All blocks that are there: a snapshot for whoever missed events."""
        return list(self._index)

    def count_present(self, digests: Sequence[bytes]) -> int:
        """How many leading digests could be loaded. No I/O; 0 while the store is unreachable."""
        if self.is_paused:
            return 0
        for count, digest in enumerate(digests):
            if digest not in self._index:
                return count
        return len(digests)

    def load(self, digests: Sequence[bytes], buffers: Iterable[Block], *, timeout_s: float | None = None) -> TierRead:
        """Begin to copy blocks into buffers of the same number, first block first.

        The buffers are the tier's until the load is done. That is after `timeout_s` at the latest, with the leading
        blocks that have arrived by then, given that `poll` is called. Blocks that are not there are misses.
        """
        buffers = list(buffers)
        assert len(digests) == len(buffers), f"{len(digests)} digests for {len(buffers)} buffers"
        for buffer in buffers:
            self._check_size(buffer)
        now = self._clock()
        entries = [self._index[digest] for digest in digests[: self.count_present(digests)]]
        load = TierRead(entries, buffers, now, now + (self._load_timeout_s if timeout_s is None else timeout_s))
        if entries:
            self._policy.touch(entries[-1].name.digest)
            for entry in entries:
                self._policy.pin(entry.name.digest)
            with self._work:
                self._loads.append(load)
                self._work.notify(len(entries))
        if len(entries) < len(buffers):
            load.failure = self._absence
        self._live.append(load)
        self._settle(load, now)
        return load

    def store(self, digest: bytes, parent: bytes | None, data: Block) -> TierWrite | None:
        """Begin to keep a block, evicting others if need be. None if it is there already or is dropped.

        With None the buffer is free at once.
        """
        self._check_size(data)
        if digest in self:
            return None
        if reason := self._refusal(parent):
            self._counts.drops[reason] += 1
            return None
        name = BlockName(digest, parent)
        evicted = self._try_admit(name)
        if evicted is None:
            self._counts.drops["not worth it"] += 1
            return None
        self._policy.pin(digest)
        write = self._writes[digest] = TierWrite(name, data)
        if self._store.is_instant:
            self._write_done(self._write(write, evicted), self._clock())
        else:
            self._submit(lambda _: self._write(write, evicted))
        return write

    def note_dropped(self, reason: str, num_blocks: int) -> None:
        """Count blocks that their owner could not even offer."""
        if num_blocks:
            self._counts.drops[reason] += num_blocks

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these blocks from eviction, now or once they are there, until `unpin`; a second pin changes nothing."""
        for digest in digests:
            if digest not in self._pinned and digest in self._index:
                self._policy.pin(digest)
            self._pinned.add(digest)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these blocks; others are ignored."""
        for digest in digests:
            if digest in self._pinned and digest in self._index:
                self._policy.unpin(digest)
            self._pinned.discard(digest)

    def pinned_digests(self) -> set[bytes]:
        """A copy of all pinned digests, there or not."""
        return set(self._pinned)

    def poll(self) -> None:
        """Take in what the I/O threads have finished. Under a microsecond when there is nothing."""
        if not (self._done or self._live or self._is_scanning or self._scan_at < float("inf")):
            return
        now = self._clock()
        while self._done:
            done = self._done.popleft()
            match done:
                case _ReadDone():
                    self._read_done(done, now)
                case _WriteDone():
                    self._write_done(done, now)
                case _ScanDone():
                    self._reconciling = self._reconcile(done.found, now)
        for load in list(self._live):
            self._settle(load, now)
        next(self._reconciling, None)
        if now >= self._scan_at and not self._is_scanning:
            self._begin_scan()

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) digests since the last call, disjoint: each digest is listed as it is now."""
        changed, self._changed = self._changed, {}
        stored = [digest for digest in changed if digest in self._index]
        removed = [digest for digest in changed if digest not in self._index]
        return stored, removed

    def stats(self) -> TierStats:
        """What has happened so far."""
        counts, block_bytes = self._counts, self._store.block_bytes
        return TierStats(
            num_blocks=len(self._index),
            capacity_blocks=self.capacity_blocks,
            num_queued_loads=self.num_queued_loads,
            num_queued_stores=len(self._writes),
            num_hits=counts.hits,
            num_misses=dict(counts.misses),
            num_stored=counts.stored,
            num_drops=dict(counts.drops),
            num_evictions=counts.evictions,
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
        deadline = self._clock() + timeout_s
        self._is_closed = True
        for load in self._live:
            load.failure = load.failure or "closed"
            load.abandon()
        with self._work:
            self._work.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - self._clock(), 0.0))
        with self._work:
            self._jobs.clear()
        self.poll()
        if any(thread.is_alive() for thread in self._threads):
            return
        for write in list(self._writes.values()):
            self._drop(write, "closed")
        self._store.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless index, writes and loads agree; with `idle`, nothing may be under way."""
        for digest, entry in self._index.items():
            assert entry.name.digest == digest, f"{digest.hex()} is filed as {entry}"
            assert not entry.is_forgotten, f"{entry} is still in the index"
        assert not self._index.keys() & self._writes.keys(), "a block that is there is being written"
        known = self._index.keys() | self._writes.keys()
        assert known == set(self._policy), f"the policy has {len(self._policy)} blocks and the tier {len(known)}"
        assert len(known) <= self.capacity_blocks, f"{len(known)} blocks, but there is room for {self.capacity_blocks}"
        assert not (idle and self.is_busy), f"{len(self._live)} loads and {len(self._writes)} writes under way"

    # The owner's side.

    @property
    def is_paused(self) -> bool:
        """Whether nothing is asked of the store now, because it could not be reached."""
        return self._is_closed or (self._paused_until > float("-inf") and self._clock() < self._paused_until)

    @property
    def _absence(self) -> str:
        """Why a block is not present."""
        if self._is_closed:
            return "closed"
        return StoreFailure.UNREACHABLE.value if self.is_paused else StoreFailure.ABSENT.value

    def _check_size(self, buffer: Block) -> None:
        expected = (np.dtype(np.uint8), (self._store.block_bytes,))
        assert (buffer.dtype, buffer.shape) == expected, f"{buffer.dtype}{buffer.shape} is no block: {expected}"

    def _submit(self, job: _Job) -> None:
        with self._work:
            self._jobs.append(job)
            self._work.notify()

    def _pause(self, now: float) -> None:
        if now >= self._paused_until:
            logger.warning("tier %s does not answer; it is not used for %g s", self.name, self._pause_s)
        self._paused_until = self._scan_at = now + self._pause_s  # it may come back with other blocks

    def _read_done(self, done: _ReadDone, now: float) -> None:
        load, entry = done.load, done.load._entries[done.position]
        self._counts.seconds_out += done.seconds
        load.read_s += done.seconds
        if done.failure is None:
            self._counts.bytes_out += self._store.block_bytes
            load._arrived.add(done.position)
            return
        load._num_expected = min(load._num_expected, done.position)
        if load.failure in ("", StoreFailure.ABSENT.value):
            load.failure = done.failure.value
        if done.failure is StoreFailure.UNREACHABLE:
            self._pause(now)
        elif not entry.is_forgotten:
            self._forget(entry)

    def _settle(self, load: TierRead, now: float) -> None:
        """End the load if everything has arrived that can, or the time is up."""
        while load.num_loaded in load._arrived:
            load.num_loaded += 1
        if load.num_loaded < load._num_expected and now < load._deadline:
            return
        with self._work:
            load._is_ended = True
            if load._num_copying:  # a matter of microseconds
                return
        self._live.remove(load)
        for entry in load._entries:
            if not entry.is_forgotten:
                self._policy.unpin(entry.name.digest)
        num_missed = load.num_blocks - load.num_loaded
        self._counts.hits += load.num_loaded
        if num_missed:
            load.failure = load.failure or "late"
            self._counts.misses[load.failure] += num_missed
        load.is_done = True

    def _write_done(self, done: _WriteDone, now: float) -> None:
        self._counts.seconds_in += done.seconds
        write = done.write
        if done.failure is not None:
            self._drop(write, done.failure.value)
            if done.failure is StoreFailure.UNREACHABLE:
                self._pause(now)
            elif done.failure is StoreFailure.FULL and (victim := self._victim()):
                self._delete(
                    [self._evict(victim)]
                )  # there is less room than we were told; the next one shall find some
            return
        del self._writes[write.name.digest]
        write.is_done = True
        self._counts.stored += 1
        self._policy.unpin(write.name.digest)
        self._publish(write.name)

    def _drop(self, write: TierWrite, reason: str) -> None:
        del self._writes[write.name.digest]
        write.is_done = True
        self._policy.remove(write.name.digest)
        self._counts.drops[reason] += 1

    def _begin_scan(self) -> None:
        self._scan_at = float("inf")
        self._is_scanning = True
        self._num_scans += 1
        self._gone.clear()
        self._submit(lambda _: self._scan())

    def _reconcile(self, found: Sequence[BlockName] | StoreFailure, now: float) -> Iterator[None]:
        """Bring the index in line with a scan, a piece at a time."""
        if isinstance(found, StoreFailure):
            self._is_scanning = False
            self._pause(now)
            return
        for count, name in enumerate(found, 1):
            self._adopt(name)
            if count % _RECONCILED_PER_POLL == 0:
                yield
        for count, entry in enumerate(list(self._index.values()), 1):
            if entry.seen_in < self._num_scans and not entry.is_forgotten:
                self._forget(entry)
            if count % _RECONCILED_PER_POLL == 0:
                yield
        self._is_scanning = False
        self._scan_at = min(self._scan_at, now + self._rescan_s)

    def _adopt(self, name: BlockName) -> None:
        """Take in a block that a scan has found."""
        if name.digest in self._index:
            self._index[name.digest].seen_in = self._num_scans
        if name.digest in self or name.digest in self._gone:
            return
        evicted = self._try_admit(name)
        if evicted is None:
            self._counts.evictions += 1
            self._delete([name])
            return
        self._publish(name)
        if evicted:
            self._delete(evicted)

    def _publish(self, name: BlockName) -> None:
        self._index[name.digest] = _StoredBlock(name, self._num_scans)
        if name.digest in self._pinned:
            self._policy.pin(name.digest)
        self._changed[name.digest] = None

    def _forget(self, entry: _StoredBlock) -> None:
        """The block is not there any more. Pins of its loads end with it."""
        entry.is_forgotten = True
        if self._is_scanning:
            self._gone.add(entry.name.digest)
        self._policy.remove(entry.name.digest)
        del self._index[entry.name.digest]
        self._changed[entry.name.digest] = None

    def _refusal(self, parent: bytes | None) -> str:
        """Why a block cannot be stored now; "" if it can."""
        if self.is_paused:
            return self._absence
        if parent is not None and parent not in self:
            return "parent not there"  # nobody could find it; if the parent is computed again, so is this one
        return "queue full" if len(self._writes) >= self._max_queued_stores else ""

    def _try_admit(self, name: BlockName) -> list[BlockName] | None:
        """Enter a block into the policy. The blocks to delete for it; None if all others are in use or worth more."""
        self._policy.add(name.digest, name.parent)
        if len(self._policy) <= self.capacity_blocks:
            return []
        victim = self._victim()
        if victim is None or victim == name.digest:
            self._policy.remove(name.digest)
            return None
        return [self._evict(victim)]

    def _victim(self) -> bytes | None:
        digest = self._policy.victim()
        assert digest is None or isinstance(digest, bytes), f"{digest!r} is no digest"
        return digest

    def _evict(self, digest: bytes) -> BlockName:
        """Forget a block that is there; whoever calls this has it deleted."""
        entry = self._index[digest]
        self._forget(entry)
        self._counts.evictions += 1
        return entry.name

    def _delete(self, names: list[BlockName]) -> None:
        self._submit(lambda _: self._delete_all(names))

    # The I/O threads' side: they touch `_store`, `_loads`, `_jobs`, `_done` and what a load says is theirs.

    def _run(self) -> None:
        scratch = np.empty(self._store.block_bytes, np.uint8)
        while (job := self._next_job()) is not None:
            if (done := job(scratch)) is not None:
                self._done.append(done)

    def _next_job(self) -> _Job | None:
        """A block of the oldest load, else the oldest other job. None when there is nothing left after `close`."""
        with self._work:
            while True:
                while self._loads and not self._is_wanted(self._loads[0], self._loads[0]._next):
                    self._loads.popleft()
                if self._loads:
                    load = self._loads[0]
                    position = load._next
                    load._next += 1
                    return lambda scratch: self._read(load, position, scratch)
                if self._jobs:
                    return self._jobs.popleft()
                if self._is_closed:
                    return None
                self._work.wait()

    def _is_wanted(self, load: TierRead, position: int) -> bool:
        return position < load._limit and not load._is_ended and not self._is_closed

    def _read(self, load: TierRead, position: int, scratch: Block) -> _Done | None:
        begun_at = time.monotonic()
        data = self._store.read(load._entries[position].name, scratch)
        with self._work:
            if isinstance(data, StoreFailure):
                load._limit = min(load._limit, position)
                return _ReadDone(load, position, data, time.monotonic() - begun_at)
            if not self._is_wanted(load, position):
                return None
            load._num_copying += 1
        # NOTE: the only place where a buffer is written, and between these two no load becomes done. A read that hangs
        # can therefore be given up at once: it hangs over `scratch`.
        np.copyto(load._buffers[position], data)
        with self._work:
            load._num_copying -= 1
        return _ReadDone(load, position, None, time.monotonic() - begun_at)

    def _write(self, write: TierWrite, evicted: list[BlockName]) -> _WriteDone:
        begun_at = time.monotonic()
        self._delete_all(evicted)
        failure = self._store.write(write.name, write._data)
        return _WriteDone(write, failure, time.monotonic() - begun_at)

    def _delete_all(self, names: list[BlockName]) -> None:
        for name in names:
            self._store.delete(name)

    def _scan(self) -> _Done:
        return _ScanDone(self._store.scan())
