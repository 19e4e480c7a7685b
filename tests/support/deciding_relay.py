"""Stands between a frontend process and the deciding process: can lose what the latter says, and say more to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tandem.frontend.processes.message_link import MessageLink


class DecidingRelay:
    """Passes on the messages of one frontend process, which connects to `endpoint`. To be entered as a context."""

    def __init__(self, deciding_endpoint: str, endpoint: str) -> None:
        self.endpoint = endpoint
        self._deciding_endpoint = deciding_endpoint
        self._is_silent = False
        self._to_frontend = MessageLink(self.say, lambda: self._to_deciding.close())
        self._to_deciding = MessageLink(self._hear, self._to_frontend.close)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._to_deciding, self._deciding_endpoint)
        self._server = await loop.create_unix_server(lambda: self._to_frontend, self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self._to_frontend.close()
        self._to_deciding.close()

    def say(self, data: bytes) -> None:
        """Send a message to the deciding process, which takes it for the frontend's."""
        self._to_deciding.send(data)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What the deciding process sends meanwhile is lost."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def _hear(self, data: bytes) -> None:
        if not self._is_silent:
            self._to_frontend.send(data)
