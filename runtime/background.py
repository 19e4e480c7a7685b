"""Background tasks whose failures are noticed.

A task that nobody awaits hides its exception until it is garbage-collected. Here an exception is logged when it
happens, and the owner decides what follows: the work is restarted, or the owner is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

CALM_S = 60.0  # work that ran this long has recovered: the pauses start from the beginning

Work = Callable[
    [], Coroutine[Any, Any, None]
]  # called inside its task: a task cancelled before leaves no coroutine behind


class BackgroundTasks:
    """The background tasks of one owner, which calls `close` at its end. For one event loop."""

    def __init__(self, backoff: Backoff = Backoff(0.1, 10.0)) -> None:
        """`backoff` says when failed work is restarted."""
        self._backoff = backoff
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_failures = 0  # exceptions of tasks and of restarted work

    def start(self, name: str, work: Work, on_failure: Callable[[Exception], None] | None = None) -> asyncio.Task[None]:
        """Run this once. An exception is logged under `name` and passed to `on_failure`."""
        return self._add(self._guarded(name, work, on_failure), name)

    def keep(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run endless work. After an exception, which is logged, it is restarted with a delay."""
        return self._add(self._kept(name, work), name)

    async def close(self) -> None:
        """Cancel the running tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, name: str, work: Work, on_failure: Callable[[Exception], None] | None) -> None:
        try:
            await work()
        except Exception as exc:  # nobody awaits the task: its owner would never learn of it
            self.num_failures += 1
            logger.exception("%s failed", name)
            if on_failure is not None:
                on_failure(exc)

    async def _kept(self, name: str, work: Work) -> None:
        loop, num_failures = asyncio.get_running_loop(), 0  # in a row
        while True:
            began_s = loop.time()
            try:
                await work()
                return
            except Exception:  # a loop that serves many things must go on
                self.num_failures += 1
                num_failures = 1 if loop.time() - began_s > CALM_S else num_failures + 1
                delay_s = self._backoff.pause_s(num_failures)
                logger.exception("%s failed and is restarted in %g s", name, delay_s)
            await asyncio.sleep(delay_s)


def task_error(task: asyncio.Future[Any]) -> Exception | None:
    """What a task that has ended raised; None if it returned or was cancelled."""
    error = None if task.cancelled() else task.exception()
    return error if isinstance(error, Exception) else None
