"""Cancels work for a client that has disconnected."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from tandem.frontend.http.errors import ClientDisconnected


class cancel_on_disconnect:  # used and built like asyncio.timeout
    """`async with cancel_on_disconnect(receive):` raises `ClientDisconnected` when the client leaves during the block.

    The request's body must have been read. A task listens for the disconnect; the block runs in its caller's task.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_disconnected = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "it must run in a task"
        self._task = task
        self._num_cancelling = task.cancelling()
        self._listener = asyncio.create_task(self._listen())

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        # NOTE: no `await` here, so nobody can cancel the task between the block's end and this.
        self._listener.cancel()
        if self._has_disconnected and self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected from exc

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_disconnected = True
        self._task.cancel()
