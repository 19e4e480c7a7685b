"""Threads that tenants use in turn, by the amount of work that each of them has had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tandem.scheduling.admission.fair_queue import FairQueue, QueueEntry
from tandem.scheduling.admission.work import Work

T = TypeVar("T")


@dataclass(eq=False, slots=True, kw_only=True)
class _Job(QueueEntry):
    """Work that waits for a thread, or is done by one."""

    call: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """Runs work of many tenants on a few threads. A tenant that has had less goes first. Used from one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, name)
        # Without credit for idle times: what waits here is short, and a burst would delay others as any flood would.
        self._queue: FairQueue[_Job] = FairQueue(lambda _: 1.0, credit_s=0.0)
        self._num_running = 0

    async def run(self, call: Callable[[], T], *, tenant: str, amount: float) -> T:
        """Result of `call`, made by a thread in the tenant's turn. `amount` is its work, in any unit.

        Cancelling it while it waits takes it out of the queue.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        work = Work(num_requests=1, worker_s=amount)
        job = _Job(tenant=tenant, priority=0, arrived_s=time.monotonic(), work=work, call=call, result=result)
        self._queue.add(job)
        self._begin()
        try:
            return await result
        finally:
            self._queue.remove(job)

    def close(self) -> None:
        """Let running work finish, and drop the queue."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._num_running < self._num_threads and len(self._queue):
            job = next(self._queue.in_order(time.monotonic()))
            self._queue.serve(job)
            self._num_running += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.call)
            running.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        self._begin()
        if running.cancelled():
            job.result.cancel()
        elif (error := running.exception()) is not None:
            if not job.result.done():
                job.result.set_exception(error)
        elif not job.result.done():
            job.result.set_result(running.result())
