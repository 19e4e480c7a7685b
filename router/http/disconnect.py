"""Whether the client is still there: work for one that has left is cancelled."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from tandem.router.http.errors import ClientDisconnected

__all__ = ["cancel_on_disconnect"]


class cancel_on_disconnect:  # used like asyncio.timeout, and built like it
    """`async with cancel_on_disconnect(receive):` cancels the block when the client leaves.

    The request's body must have been read. One task of its own listens; the block stays in its caller's.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        self._task = task
        self._num_cancelling = task.cancelling()
        self._listener = asyncio.create_task(self._listen())

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        # NOTE: no `await` here: between the block's end and this, nobody can have cancelled it.
        self._listener.cancel()
        if self._has_left and self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected from exc

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()
