"""Cancels work for a client that has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import TracebackType
from typing import Any

from starlette.types import Message, Receive

from tandem.frontend.http.errors import ClientDisconnected


class cancel_on_disconnect:  # used and built like asyncio.timeout
    """`async with cancel_on_disconnect(receive):` raises `ClientDisconnected` when the client leaves during the block.

    The request's body must have been read. The block runs in its caller's task. Callbacks listen for the disconnect: a
    task for that would cost more than all else that is done here.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_disconnected = False
        self._is_over = False  # the block has ended
        self._steps: Generator[Any, Any, Message] | None = None  # of the running call of `receive`
        self._pending: asyncio.Future[Any] | None = None  # what that call waits for

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "it must run in a task"
        self._task = task
        self._num_cancelling = task.cancelling()
        self._listening = asyncio.get_running_loop().call_soon(self._listen)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        # NOTE: no `await` here, so nobody can cancel the task between the block's end and this.
        self._is_over = True
        self._listening.cancel()
        if self._pending is not None:
            self._pending.remove_done_callback(self._listen)
        if self._steps is not None:
            self._steps.close()
        if self._has_disconnected and self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected from exc

    def _listen(self, _: asyncio.Future[Any] | None = None) -> None:
        """Go on with `receive` up to its next wait, or to the disconnect."""
        while not (self._has_disconnected or self._is_over):
            self._steps = self._steps or self._receive().__await__()
            try:
                self._pending = next(self._steps)
            except StopIteration as end:
                self._steps = self._pending = None
                if end.value["type"] == "http.disconnect":
                    self._has_disconnected = True
                    self._task.cancel()
            else:
                self._wait()
                return

    def _wait(self) -> None:
        if self._pending is None:  # a bare `yield`, as of `asyncio.sleep(0)`
            self._listening = asyncio.get_running_loop().call_soon(self._listen)
        else:
            self._pending.add_done_callback(self._listen)
