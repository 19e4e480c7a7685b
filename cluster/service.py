"""The contract of what `tandem serve` serves: workers of one kind of engine, and the router in front of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from tandem.cluster.frontend import HttpFrontend
from tandem.cluster.supervisor import Supervisor
from tandem.frontend.keys.api_keys import ApiKeys


class Service(Protocol):
    """What is served: the workers of one kind of engine, and the router in front of them."""

    supervisor: Supervisor

    async def start(self) -> None:
        """Begin to decide."""

    def load(self) -> None:
        """Do the long work that HTTP depends on. Called in a thread, while the workers load."""

    def mean_output_tokens(self) -> float:
        """Mean length of answers, which the autoscaler expects of the next ones."""

    def serve_http(
        self, listener: socket.socket, api_keys: ApiKeys
    ) -> contextlib.AbstractAsyncContextManager[tuple[HttpFrontend, Callable[[], str | None]]]:
        """Serve HTTP while the block runs. The function tells why requests should not be sent here now; None = send."""

    def shut_down(self) -> None:
        """End every request with an error and refuse new ones: the server stops."""

    async def close(self) -> None:
        """Close all connections to the workers."""
