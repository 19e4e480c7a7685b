"""The threads that move a tier's bytes: they read, write, delete and scan its store, and queue the results.

Reads have threads of their own. All other jobs run at a low priority, because nobody waits for them: they take the time
that computing leaves. The owner takes the results from `results`; it never waits for a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, MakeBlock, StoreFailure, parents_first
from tandem.protocol.fault_boundary import outcome_on_thread

logger = logging.getLogger(__name__)
T = TypeVar("T")

DELETE_PAUSE_S = 10.0  # without deletes, after one that the store did not answer
_NICE = 10  # of threads that do not read: a tenth of a core where all cores are taken


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
    """A block to write, or what makes it then. It must not change until the write is done."""

    def __init__(self, name: BlockName, data: Block | MakeBlock) -> None:
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
_Task: TypeAlias = Callable[[Block], IoResult | None]  # gets a buffer of a block


class IoThreads:
    """`num_threads` threads that read from one store, and as many for its other jobs.

    All methods are called by the owner's thread.
    """

    def __init__(self, name: str, store: BlockStore, num_threads: int) -> None:
        assert num_threads > 0, f"num_threads={num_threads}"
        self.results: deque[IoResult] = deque()  # the owner pops from the left
        self._store = store
        self._lock = threading.Lock()  # guards the three below and the private fields of read jobs
        self._has_reads, self._has_tasks = threading.Condition(self._lock), threading.Condition(self._lock)
        self._reads: deque[ReadJob] = deque()
        self._tasks: deque[_Task] = deque()
        self._is_closed = False
        self._deletes_at = float("-inf")
        self._threads = [
            threading.Thread(target=run, name=f"tier-{name}-{number}", daemon=True)
            for run in (self._run_reads, self._run_tasks)
            for number in range(num_threads)
        ]
        self._start()

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def read(self, job: ReadJob) -> None:
        """Queue a read. Each block gives a `ReadResult`; those after a failed one may give none."""
        with self._lock:
            self._reads.append(job)
            self._has_reads.notify(len(job.names))

    def cancel(self, job: ReadJob) -> bool:
        """Stop a read: no thread begins to write into its buffers after this. True if none does so right now."""
        with self._lock:
            job._is_cancelled = True
            with contextlib.suppress(ValueError):  # threads that hang would never pass it, and it keeps its buffers
                self._reads.remove(job)
            return not job._num_copying

    def write(self, job: WriteJob, evicted: list[BlockName]) -> None:
        """Queue a write that first deletes `evicted`. It gives a `WriteResult`."""
        self._submit(lambda scratch: self._write(job, evicted, scratch))

    def delete(self, names: list[BlockName]) -> None:
        """Queue the deletion of these blocks. It gives no result."""
        self._submit(lambda _: self._delete_all(names))

    def scan(self) -> None:
        """Queue a scan of the store. It gives a `ScanResult`, with parents before the blocks that hang from them."""
        self._submit(self._scan)

    def close(self, timeout_s: float) -> bool:
        """Drop all reads, finish the other jobs as far as `timeout_s` allows. True if all threads have ended.

        A thread that hangs in the store is left behind until the process ends.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            self._has_reads.notify_all()
            self._has_tasks.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            self._tasks.clear()
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, task: _Task) -> None:
        with self._lock:
            self._tasks.append(task)
            self._has_tasks.notify()

    # What follows runs on the I/O threads.

    def _run_reads(self) -> None:
        self._run(self._has_reads, self._next_read)

    def _run_tasks(self) -> None:
        if sys.platform == "linux":  # elsewhere it is of the whole process
            os.nice(_NICE)
        self._run(self._has_tasks, self._next_task)

    def _run(self, has_work: threading.Condition, next_task: Callable[[], _Task | None]) -> None:
        """Do tasks until nothing is left after `close`."""
        scratch = np.empty(self._store.block_bytes, np.uint8)
        while True:
            with self._lock:
                while (task := next_task()) is None and not self._is_closed:
                    has_work.wait()
            if task is None:
                return
            if (result := task(scratch)) is not None:
                self.results.append(result)

    def _next_task(self) -> _Task | None:
        return self._tasks.popleft() if self._tasks else None

    def _next_read(self) -> _Task | None:
        """The next block of the oldest read."""
        while self._reads and not self._is_wanted(self._reads[0], self._reads[0]._next):
            self._reads.popleft()
        if not self._reads:
            return None
        job = self._reads[0]
        position = job._next
        job._next += 1
        return lambda scratch: self._read(job, position, scratch)

    def _is_wanted(self, job: ReadJob, position: int) -> bool:
        return position < job._limit and not job._is_cancelled and not self._is_closed

    def _read(self, job: ReadJob, position: int, scratch: Block) -> ReadResult | None:
        begun_at = time.monotonic()
        data = _asked(self._store.read, job.names[position], scratch)
        with self._lock:
            if isinstance(data, StoreFailure):
                job._limit = min(job._limit, position)
                return ReadResult(job, position, data, time.monotonic() - begun_at)
            if not self._is_wanted(job, position):
                return None
            job._num_copying += 1
        # NOTE: buffers are written here only, and `cancel` sees that it happens. So a read that hangs in the store can
        # be given up at once: it writes to `scratch`.
        np.copyto(job.buffers[position], data)
        with self._lock:
            job._num_copying -= 1
        return ReadResult(job, position, None, time.monotonic() - begun_at)

    def _write(self, job: WriteJob, evicted: list[BlockName], scratch: Block) -> WriteResult:
        begun_at = time.monotonic()
        self._delete_all(evicted)
        data = job.data if isinstance(job.data, np.ndarray) else _asked(job.data, scratch)
        failure = data if isinstance(data, StoreFailure) else _asked(self._store.write, job.name, data)
        return WriteResult(job, failure, time.monotonic() - begun_at)

    def _scan(self, _: Block) -> ScanResult:
        found = _asked(self._store.scan)
        return ScanResult(found if isinstance(found, StoreFailure) else parents_first(found))

    def _delete_all(self, names: list[BlockName]) -> None:
        """Delete blocks, unless the store does not delete: then their threads are not kept from reads for long."""
        for name in names:
            if time.monotonic() < self._deletes_at:
                return  # a later scan finds what is left
            if _asked(self._store.delete, name) is StoreFailure.UNREACHABLE:
                self._deletes_at = time.monotonic() + DELETE_PAUSE_S


def _asked(function: Callable[..., T], *arguments: object) -> T | StoreFailure:
    """What a store answers. One that raises, which none should, does not work: its thread goes on."""
    outcome = outcome_on_thread(function, *arguments)
    if isinstance(outcome, BaseException):
        logger.warning("a store of KV raised %r", outcome)
        return StoreFailure.UNREACHABLE
    return outcome
