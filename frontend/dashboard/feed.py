"""Server-sent events of snapshots: built once for all viewers, and only while somebody watches.

A viewer that reads slowly misses snapshots: once it has read one, it gets the latest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec

from tandem.protocol.errors import Overloaded, ServingError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
MAX_VIEWERS = 32
HEARTBEAT = b": no news\n\n"
_RETRY_AFTER_S = 10.0


class TooManyViewers(Overloaded):
    """The process already serves its maximum of dashboards."""

    code = "too_many_viewers"


class SnapshotFeed:
    """The events of one process. Used from one event loop only."""

    def __init__(
        self,
        build: Callable[[], Awaitable[bytes]],
        *,
        interval_s: float = INTERVAL_S,
        heartbeat_s: float = HEARTBEAT_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        """`build` gives a snapshot as JSON, or raises a `ServingError`, which viewers see."""
        self._build = build
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._max_viewers = max_viewers
        self._num_viewers = 0
        self._is_closed = False
        self._event = b""  # the latest
        self._news = asyncio.Event()  # set, and replaced, with each event
        self._building: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Number of open streams."""
        return self._num_viewers

    def close(self) -> None:
        """End all streams: the server stops."""
        self._is_closed = True
        self._news.set()
        self._stop()

    @contextmanager
    def viewing(self) -> Iterator[AsyncGenerator[bytes, None]]:
        """The events for one viewer, until `close`. Raises `TooManyViewers`."""
        if self._num_viewers >= self._max_viewers:
            raise TooManyViewers(
                f"{self._max_viewers} dashboards are open; close one, or try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_viewers += 1
        if self._building is None and not self._is_closed:
            self._event = b""
            self._building = asyncio.get_running_loop().create_task(self._keep_building(), name="dashboard")
        try:
            yield self._events()
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0:
                self._stop()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while not self._is_closed:
            news = self._news
            if self._event:
                yield self._event
            if news is not self._news:
                continue  # the viewer was slow: there is a newer one
            while not news.is_set():
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await news.wait()
                except TimeoutError:
                    yield HEARTBEAT

    def _stop(self) -> None:
        if self._building is not None:
            self._building.cancel()
            self._building = None

    async def _keep_building(self) -> None:
        while True:
            self._publish(await self._next_event())
            await asyncio.sleep(self._interval_s)

    async def _next_event(self) -> bytes:
        try:
            return b"event: snapshot\ndata: %b\n\n" % await self._build()
        except ServingError as exc:
            message = exc.message
        except Exception:  # viewers see the error, and the next snapshot may succeed
            logger.exception("a snapshot for the dashboard could not be built")
            message = "The snapshot could not be built; the server's log says why."
        return b"event: problem\ndata: %b\n\n" % msgspec.json.encode({"message": message})

    def _publish(self, event: bytes) -> None:
        self._event = event
        news, self._news = self._news, asyncio.Event()
        news.set()
