"""What the connections of one HTTP server share: limits, a clock, and the order in which it waits for clients."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from tandem.protocol.config import RouterConfig

__all__ = ["NUM_RESERVED", "Connection", "Connections"]

logger = logging.getLogger(__name__)

MAX_UNFINISHED_BODIES = 64  # as many of the largest size are kept in memory at once
NUM_RESERVED = 64  # connections above max_connections, so that health checks and metrics get through
_MAX_TICK_S = 0.5
_WARN_INTERVAL_S = 60.0


class Connection(Protocol):
    """One connection, as the others see it."""

    def check_deadlines(self, now_s: float) -> None:
        """End the connection if its client is too slow."""

    def release_body(self) -> None:
        """Stop counting the unfinished body: the app has it, or it is dropped."""

    def refuse_unfinished_body(self) -> None:
        """Make room for other bodies, if one has begun to arrive here."""

    def shed(self) -> None:
        """Make room for another connection."""


class Connections:
    """Limits and bookkeeping of all connections of one server."""

    def __init__(self, config: RouterConfig, max_connections: int) -> None:
        """`max_connections` is the config's, or less if the process may not open as many files."""
        self.max_connections = max_connections
        self.max_header_bytes = config.max_header_bytes
        self.header_timeout_s = config.header_timeout_s
        self.body_timeout_s = config.body_timeout_s
        self.max_unfinished_bytes = MAX_UNFINISHED_BODIES * config.max_body_bytes
        self.num_unfinished_bytes = 0  # bytes of bodies that have begun to arrive
        self.now_s = 0.0
        self.open: set[Connection] = set()
        # Connections whose client owes us a request or the rest of one, the one that we have waited for longest first.
        self.waiting: OrderedDict[Connection, None] = OrderedDict()
        self._ticked_s = time.monotonic()
        self._warned_s = -math.inf

    def tick(self) -> None:
        """Advance the clock. Time in which this process stood still does not count against clients."""
        now = time.monotonic()
        self.now_s += min(now - self._ticked_s, _MAX_TICK_S)
        self._ticked_s = now

    def sweep(self, connections: Iterable[Any]) -> None:
        """End the connections whose clients are too slow."""
        for connection in list(connections):
            connection.check_deadlines(self.now_s)

    def make_room_for(self, connection: Connection) -> bool:
        """Whether this connection fits, after closing others that have waited longer for their clients.

        Clients that send their request at once are not affected.
        """
        if len(self.open) <= self.max_connections:
            return True
        if self.now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = self.now_s
            logger.warning("max_connections=%d reached; those that wait longest are closed", self.max_connections)
        self.waiting.pop(connection, None)
        while self.waiting and len(self.open) > self.max_connections:
            next(iter(self.waiting)).shed()
        return len(self.open) <= self.max_connections

    def admit(self, connection: Connection, num_open: int) -> bool:
        """Add a new connection, the last of `num_open`. Returns whether there is room for it at all.

        The connection sets its own deadline for what its client owes.
        """
        if num_open > self.max_connections + NUM_RESERVED:
            return False
        self.open.add(connection)
        self.make_room_for(connection)  # even if there is none, its request may be an operator's
        self.waiting[connection] = None
        return True

    def limit_bodies(self) -> None:
        """Refuse the unfinished bodies that began first, until the others fit into memory."""
        for connection in list(self.waiting):
            if self.num_unfinished_bytes <= self.max_unfinished_bytes:
                return
            connection.refuse_unfinished_body()

    def remove(self, connection: Connection) -> None:
        """A connection has ended, or is about to."""
        connection.release_body()
        self.open.discard(connection)
        self.waiting.pop(connection, None)
