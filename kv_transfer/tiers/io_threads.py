"""The threads that move a tier's bytes: they read, write, delete and scan its store, and queue the results.

Reads go before all other jobs. The owner takes the results from `results`; it never waits for a thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure, parents_first

DELETE_PAUSE_S = 10.0  # without deletes, after one that the store did not answer


class ReadJob:
    """Blocks to read into buffers, first block first. The fields with an underscore belong to the threads' lock."""

    def __init__(self, names: list[BlockName], buffers: list[Block]) -> None:
        self.names = names
        self.buffers = buffers
        self._next = 0  # first block that no thread has taken
        self._limit = len(names)  # blocks from here on are not wanted: one before them failed
        self._num_copying = 0  # threads that write into a buffer now
        self._is_cancelled = False  # no thread may begin to write into a buffer


class WriteJob:
    """A block to write. Its buffer must not change until the write is done."""

    def __init__(self, name: BlockName, data: Block) -> None:
        self.name = name
        self.data = data


class ReadResult(NamedTuple):
    """One block of a job was read into its buffer, or could not be."""

    job: ReadJob
    position: int
    failure: StoreFailure | None
    seconds: float


class WriteResult(NamedTuple):
    """A block was written, or could not be."""

    job: WriteJob
    failure: StoreFailure | None
    seconds: float


class ScanResult(NamedTuple):
    """What the store holds."""

    found: Sequence[BlockName] | StoreFailure


IoResult: TypeAlias = ReadResult | WriteResult | ScanResult
_Task: TypeAlias = Callable[[], IoResult | None]


class IoThreads:
    """`num_threads` threads that use one store. All methods are called by the owner's thread."""

    def __init__(self, name: str, store: BlockStore, num_threads: int) -> None:
        assert num_threads > 0, f"num_threads={num_threads}"
        self.results: deque[IoResult] = deque()  # the owner pops from the left
        self._store = store
        self._work = threading.Condition()  # guards the three below and the private fields of read jobs
        self._reads: deque[ReadJob] = deque()
        self._tasks: deque[_Task] = deque()
        self._is_closed = False
        self._deletes_at = float("-inf")
        self._threads = [
            threading.Thread(target=self._run, name=f"tier-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._start()

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def read(self, job: ReadJob) -> None:
        """Queue a read. Each block gives a `ReadResult`; those after a failed one may give none."""
        with self._work:
            self._reads.append(job)
            self._work.notify(len(job.names))

    def cancel(self, job: ReadJob) -> bool:
        """Stop a read: no thread begins to write into its buffers after this. True if none does so right now."""
        with self._work:
            job._is_cancelled = True
            with contextlib.suppress(ValueError):  # threads that hang would never pass it, and it keeps its buffers
                self._reads.remove(job)
            return not job._num_copying

    def write(self, job: WriteJob, evicted: list[BlockName]) -> None:
        """Queue a write that first deletes `evicted`. It gives a `WriteResult`."""
        self._submit(lambda: self.write_now(job, evicted))

    def write_now(self, job: WriteJob, evicted: list[BlockName]) -> WriteResult:
        """The same on the calling thread, for a store to which writing is a copy in memory."""
        begun_at = time.monotonic()
        self._delete_all(evicted)
        failure = self._store.write(job.name, job.data)
        return WriteResult(job, failure, time.monotonic() - begun_at)

    def delete(self, names: list[BlockName]) -> None:
        """Queue the deletion of these blocks. It gives no result."""
        self._submit(lambda: self._delete_all(names))

    def scan(self) -> None:
        """Queue a scan of the store. It gives a `ScanResult`, with parents before the blocks that hang from them."""
        self._submit(self._scan_now)

    def _scan_now(self) -> ScanResult:
        found = self._store.scan()
        return ScanResult(found if isinstance(found, StoreFailure) else parents_first(found))

    def close(self, timeout_s: float) -> bool:
        """Drop all reads, finish the other jobs as far as `timeout_s` allows. True if all threads have ended.

        A thread that hangs in the store is left behind until the process ends.
        """
        deadline = time.monotonic() + timeout_s
        with self._work:
            self._is_closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._work:
            self._tasks.clear()
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, task: _Task) -> None:
        with self._work:
            self._tasks.append(task)
            self._work.notify()

    # What follows runs on the I/O threads.

    def _run(self) -> None:
        scratch = np.empty(self._store.block_bytes, np.uint8)
        while (task := self._next_task(scratch)) is not None:
            if (result := task()) is not None:
                self.results.append(result)

    def _next_task(self, scratch: Block) -> _Task | None:
        """The next block of the oldest read, else the oldest other task. None when nothing is left after `close`."""
        with self._work:
            while True:
                while self._reads and not self._is_wanted(self._reads[0], self._reads[0]._next):
                    self._reads.popleft()
                if self._reads:
                    job = self._reads[0]
                    position = job._next
                    job._next += 1
                    return lambda: self._read(job, position, scratch)
                if self._tasks:
                    return self._tasks.popleft()
                if self._is_closed:
                    return None
                self._work.wait()

    def _is_wanted(self, job: ReadJob, position: int) -> bool:
        return position < job._limit and not job._is_cancelled and not self._is_closed

    def _read(self, job: ReadJob, position: int, scratch: Block) -> ReadResult | None:
        begun_at = time.monotonic()
        data = self._store.read(job.names[position], scratch)
        with self._work:
            if isinstance(data, StoreFailure):
                job._limit = min(job._limit, position)
                return ReadResult(job, position, data, time.monotonic() - begun_at)
            if not self._is_wanted(job, position):
                return None
            job._num_copying += 1
        # NOTE: buffers are written here only, and `cancel` sees that it happens. So a read that hangs in the store can
        # be given up at once: it writes to `scratch`.
        np.copyto(job.buffers[position], data)
        with self._work:
            job._num_copying -= 1
        return ReadResult(job, position, None, time.monotonic() - begun_at)

    def _delete_all(self, names: list[BlockName]) -> None:
        """Delete blocks, unless the store does not delete: then their threads are not kept from reads for long."""
        for name in names:
            if time.monotonic() < self._deletes_at:
                return  # a later scan finds what is left
            if self._store.delete(name) is StoreFailure.UNREACHABLE:
                self._deletes_at = time.monotonic() + DELETE_PAUSE_S
