"""Single-consumer streams: items are pushed to the reader's callback as they arrive.

A token is pushed all the way, `DeltaQueue` -> `QueueStream` -> text -> event -> connection, in the callback
of the event loop that delivers it. Waking the reader's task would cost as much as everything else done with a token.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from tandem.protocol.errors import ServingError
from tandem.protocol.fault_boundary import noted_on_error
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.runtime.idle_timeout import IdleTimeout

T = TypeVar("T")


class Interrupted(Exception):
    """What fills a stream stops although nothing failed; something else may go on in its place."""


class _Readable(ABC, Generic[T]):
    @abstractmethod
    async def read_into(self, sink: Callable[[list[T]], bool]) -> bool:
        """Pass items to `sink` as they arrive, until it returns False or the last was passed. Returns whether it was.

        `sink` gets at least one item, and all that arrived together. It runs in the callback that delivers them, or in
        this task if they have already arrived. What it raises is raised here.
        """

    async def take(self) -> list[T]:
        """Return the next items, or an empty list at the end: for a reader that needs them in its task."""
        taken: list[T] = []

        def sink(items: list[T]) -> bool:
            taken.extend(items)
            return False

        await self.read_into(sink)
        return taken


class Stream(_Readable[T]):
    """Items up to an end, or an error after them. Its reader closes it by `aclose`, on every path."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give up the items that have not arrived. May be called again."""


class DeltaQueue(_Readable[T]):
    """Queue of items for one reader, up to an end or an error. `asyncio.Queue` costs three times as much.

    With a scheduler it delivers by itself: the first item in the next iteration of the event loop, later ones when the
    scheduler gets to them. Without one, the writer calls `deliver` after its last `put`.
    """

    def __init__(self, scheduler: CallbackScheduler | None = None) -> None:
        self.is_complete = False  # no more items will follow
        self._items: list[T] = []
        self._error: Exception | None = None  # follows the items
        self._sink: Callable[[list[T]], bool] | None = None
        self._idle: IdleTimeout | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._scheduler = scheduler
        self._is_first = True
        self._is_scheduled = False

    @property
    def num_items(self) -> int:
        """Items that the reader has not taken."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        if self._scheduler is not None and not self._is_scheduled:
            self._schedule(self._scheduler)

    def fail(self, error: Exception) -> None:
        """Raise this error to the reader after the items, unless the queue is complete or has failed."""
        if self._error is not None or self.is_complete:
            return
        self._error = error
        if self._scheduler is None:
            self.deliver()
        elif not self._is_scheduled:
            self._schedule(self._scheduler)

    async def read_into(self, sink: Callable[[list[T]], bool], idle: IdleTimeout | None = None) -> bool:
        """As `Stream.read_into`. `idle` runs while the reader waits, and restarts at each delivery."""
        self._sink, self._idle = sink, idle
        try:
            while self._push():  # NOTE: again after each wait; more may have arrived before this task ran
                if self._is_at_end:
                    return True
                if idle is not None:
                    idle.begin()
                await self._arrival()
            return False
        finally:
            self._sink = self._idle = None
            if idle is not None:
                idle.end()

    def deliver(self) -> bool:
        """Push what has arrived to the reader. Returns whether it waited for anything."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        try:
            is_waiting = self._push() and not self.is_complete and self._error is None
        except Exception as exc:  # raised by the sink: it belongs to the reader's task, not to the writer
            if not waiter.done():  # a future does not take a StopIteration
                waiter.set_exception(RuntimeError(repr(exc)) if isinstance(exc, StopIteration) else exc)
            return True
        if not is_waiting and not waiter.done():
            waiter.set_result(None)
        return True

    def _schedule(self, scheduler: CallbackScheduler) -> None:
        self._is_scheduled = True
        if self._is_first:
            self._is_first = False
            asyncio.get_running_loop().call_soon(self._on_schedule)
        else:
            scheduler.add(self._on_schedule)

    def _on_schedule(self) -> bool:
        self._is_scheduled = False
        return (bool(self._items) or self._error is not None) and self.deliver()

    @property
    def _is_at_end(self) -> bool:
        """Whether the reader has everything."""
        return self.is_complete and not self._items

    def _push(self) -> bool:
        """Pass the items to the sink; return whether it takes more."""
        if self._items and self._sink is not None:
            if self._idle is not None:
                self._idle.begin()
            if not self._sink(self._take_all()):
                self._sink = None
        return self._sink is not None

    def _take_all(self) -> list[T]:
        items, self._items = self._items, []
        return items

    def _arrival(self) -> asyncio.Future[None]:
        """Return a future that the next `deliver` resolves. Raises the error if there is one."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class QueueStream(Stream[T]):
    """A stream of the items of a queue. It closes at its end and on any error."""

    def __init__(self, queue: DeltaQueue[T]) -> None:
        self._queue = queue
        self._idle: IdleTimeout | None = None
        self._has_begun = False
        self._has_ended = False

    async def read_into(self, sink: Callable[[list[T]], bool]) -> bool:
        """As `Stream.read_into`. The first call begins the stream."""

        def convert(items: list[T]) -> bool:
            converted = self._convert(items)
            return (not converted or sink(converted)) and not self._has_ended

        is_paused = False
        try:
            with noted_on_error(self._note_error):
                if not self._has_begun and not self._has_ended:
                    self._has_begun = True
                    await self._begin()
                is_read = self._has_ended
                while not is_read:
                    try:
                        await self._queue.read_into(convert, self._idle)
                        is_read = True
                    except (ServingError, Interrupted) as exc:
                        await self._recover(exc)
                is_paused = not self._has_ended
        finally:
            if not is_paused:  # also after a cancellation, which must leave nothing running
                await self.aclose()
        return self._has_ended

    async def aclose(self) -> None:
        """End the stream and give everything back."""
        self._has_ended = True
        self.close()

    async def _recover(self, error: ServingError | Interrupted) -> None:
        """Replace the failed queue by one with the items that would have come. Raises if that is impossible."""
        raise error

    def _note_error(self, error: BaseException) -> None:
        """The stream ends with this error."""

    @abstractmethod
    async def _begin(self) -> None:
        """Start whatever fills the queue."""

    @abstractmethod
    def _convert(self, items: list[T]) -> list[T]:
        """Return what the reader gets for these items, maybe nothing. Sets `_has_ended` with the last."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the stream holds. May be called again, and before it has begun."""
