"""Stands between an edge process and its hub: it can lose what the hub says, and say more to the hub than the edge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tandem.frontend.processes.message_link import MessageLink


class HubRelay:
    """Passes on the messages of one edge, which connects to `endpoint`. To be entered as a context."""

    def __init__(self, hub_endpoint: str, endpoint: str) -> None:
        self.endpoint = endpoint
        self._hub_endpoint = hub_endpoint
        self._is_hub_silent = False
        self._to_edge = MessageLink(self.say, lambda: self._to_hub.close())
        self._to_hub = MessageLink(self._hear, self._to_edge.close)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._to_hub, self._hub_endpoint)
        self._server = await loop.create_unix_server(lambda: self._to_edge, self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self._to_edge.close()
        self._to_hub.close()

    def say(self, data: bytes) -> None:
        """Send a message to the hub, which takes it for the edge's."""
        self._to_hub.send(data)

    @contextmanager
    def silent_hub(self) -> Iterator[None]:
        """What the hub sends meanwhile is lost."""
        self._is_hub_silent = True
        try:
            yield
        finally:
            self._is_hub_silent = False

    def _hear(self, data: bytes) -> None:
        if not self._is_hub_silent:
            self._to_edge.send(data)
