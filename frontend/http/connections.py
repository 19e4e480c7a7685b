"""What the connections of one HTTP server share: limits, a clock, and who is closed when there are too many.

A connection waits for its client while the client owes a request or the rest of one, or has to read before we can go
on; and it waits all the time if nobody needs a key for what it asks. Those that wait may be closed for others: first of
a network from which too many wait, each time the one that has waited longest. A connection on which a valid API key was
shown counts for no network.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import time
from collections import OrderedDict
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import Any, Protocol

from tandem.protocol.config import RouterConfig
from tandem.runtime.time_slicer import TimeSlicer

logger = logging.getLogger(__name__)

# Extension of ASGI. Its "admit" says that this request is not to be ended for another client's.
ADMIT = "tandem.admit"
MAX_UNFINISHED_BODIES = 64  # as many of the largest size are kept in memory at once
NUM_RESERVED = 64  # connections above max_connections, so that health checks and metrics get through
_FEW = 8  # connections that wait from one address, and are not too many whatever others have
_MAX_READ_AT_ONCE = 32  # requests: some ms of work
_MAX_READ_S = 0.005  # the same for what takes longer: a chunk of a body may hold a single byte
_MAX_TICK_S = 0.5
_WARN_INTERVAL_S = 60.0


class Connection(Protocol):
    """One connection, as the others see it."""

    network: str  # where its client is; "" = not counted, because it has a key

    def check_deadlines(self, now_s: float) -> None:
        """End the connection if its client is too slow."""

    def release_body(self) -> None:
        """Stop counting the unfinished body: the app has it, or it is dropped."""

    def refuse_unfinished_body(self) -> None:
        """Refuse this connection's unfinished body, if there is one, to free memory for others."""

    def shed(self) -> None:
        """Make room for another connection."""


class Connections:
    """Limits and bookkeeping of all connections of one server."""

    def __init__(self, config: RouterConfig, max_connections: int) -> None:
        """`max_connections` is the config's, or less if the process may not open as many files."""
        self.max_connections = max_connections
        self.header_timeout_s = config.header_timeout_s
        self.body_timeout_s = config.body_timeout_s
        self.keep_alive_timeout_s = config.keep_alive_timeout_s
        self.max_unfinished_bytes = MAX_UNFINISHED_BODIES * config.max_body_bytes
        self.num_unfinished_bytes = 0  # bytes of bodies that have begun to arrive
        self.now_s = 0.0
        self.reads = TimeSlicer()  # of what arrives when much arrives at once
        # Requests that do not start at once: each iteration of the event loop starts one.
        self.turns = TimeSlicer(budget_s=0.0)
        self._call_soon = asyncio.get_running_loop().call_soon
        self._num_read = 0  # requests in this iteration
        self._read_until_s = math.inf
        self.open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the one that has waited longest first
        self._by_network: dict[str, OrderedDict[Connection, None]] = {}  # the same, without those that have a key
        self._leaving: OrderedDict[Connection, None] = OrderedDict()  # no longer open, but not gone
        self._left_s, self._num_left = 0.0, 0  # clients of this second that closed their side before they were read
        self._ticked_s = time.monotonic()
        self._warned_s = -math.inf

    def tick(self) -> None:
        """Advance the clock. Time in which this process stood still does not count against clients."""
        now = time.monotonic()
        self.now_s += min(now - self._ticked_s, _MAX_TICK_S)
        self._ticked_s = now

    def has_time(self) -> bool:
        """Whether this iteration of the event loop may read one more request."""
        if self._num_read == 0:
            self._call_soon(self._begin_iteration)
            self._read_until_s = self.reads.clock() + _MAX_READ_S
        self._num_read += 1
        return self._num_read <= _MAX_READ_AT_ONCE and self.reads.clock() < self._read_until_s

    def serves_who_left(self, method: str) -> bool:
        """Whether a client that has closed its side is answered: a few of those that send no body, such as `nc -N`.

        If many come, they are those that do not wait for an answer.
        """
        if self.now_s - self._left_s >= 1.0:
            self._left_s, self._num_left = self.now_s, 0
        self._num_left += 1
        return method != "POST" and self._num_left <= _FEW

    def sweep(self, connections: Iterable[Any]) -> None:
        """End the connections whose clients are too slow."""
        for connection in list(connections):
            connection.check_deadlines(self.now_s)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, which waits for its client. Returns whether there is room for it at all.

        There are more of them than `max_connections`, because its request may be an operator's. The connection sets its
        own deadline for what its client owes.
        """
        self.open.add(connection)
        limit = self.max_connections + NUM_RESERVED
        while self._leaving and len(self.open) + len(self._leaving) > limit:
            next(iter(self._leaving)).shed()
        self._shed_down_to(limit)
        if len(self.open) > limit:
            self.open.discard(connection)
            return False
        self.wait_for(connection)
        return True

    def make_room_for(self, connection: Connection) -> bool:
        """Whether this connection fits, after closing others that wait for their clients.

        Clients that send their request at once, and read what they asked for, are not affected.
        """
        if len(self.open) <= self.max_connections:
            return True
        if self.now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = self.now_s
            logger.warning("max_connections=%d reached; those that wait longest are closed", self.max_connections)
        self.stop_waiting(connection)
        self._shed_down_to(self.max_connections)
        return len(self.open) <= self.max_connections

    def wait_for(self, connection: Connection) -> None:
        """From now on, or already, this connection waits for its client, unless it is about to end."""
        if connection in self._waiting or connection not in self.open:
            return
        self._waiting[connection] = None
        if network := connection.network:
            if network not in self._by_network:
                self._by_network[network] = OrderedDict()
            self._by_network[network][connection] = None

    def stop_waiting(self, connection: Connection) -> None:
        """This connection does not wait, or no longer."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._discount(connection)

    def know(self, connection: Connection) -> None:
        """Its client has a valid API key: others from its network are not closed instead, nor it instead of them."""
        if connection in self._waiting:
            self._discount(connection)
        connection.network = ""

    def limit_bodies(self) -> None:
        """Refuse the unfinished bodies that began first, until the others fit into memory."""
        for connection in list(self._waiting):
            if self.num_unfinished_bytes <= self.max_unfinished_bytes:
                return
            connection.refuse_unfinished_body()

    def leave(self, connection: Connection) -> None:
        """A connection is about to end, and only has to tell its client so."""
        self.remove(connection)
        self._leaving[connection] = None

    def remove(self, connection: Connection) -> None:
        """A connection has ended, or ends at once."""
        connection.release_body()
        self.stop_waiting(connection)
        self.open.discard(connection)
        self._leaving.pop(connection, None)

    def _begin_iteration(self) -> None:
        self._num_read = 0

    def _discount(self, connection: Connection) -> None:
        if network := connection.network:
            del self._by_network[network][connection]
            if not self._by_network[network]:
                del self._by_network[network]

    def _shed_down_to(self, limit: int) -> None:
        while self._waiting and len(self.open) > limit:
            self._next_to_shed().shed()

    def _next_to_shed(self) -> Connection:
        most: OrderedDict[Connection, None] = max(self._by_network.values(), key=len, default=OrderedDict())
        share = max(_FEW, len(self._waiting) // (len(self._by_network) + 1))  # one more: those that have a key
        return next(iter(most if len(most) > share else self._waiting))


def network_of(peer: Any) -> str:
    """Where a client is, by the name of its socket: an IPv4 address, or a customer's part of an IPv6 address."""
    host = peer[0] if isinstance(peer, tuple) else "a socket without an address"
    if ":" not in host:
        return str(host)
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the client has closed its side, although what it sent before is still being read.

    It takes microseconds; to serve clients that gave up before they were accepted takes 1 ms each, while others wait.
    """
    if (client := transport.get_extra_info("socket")) is None:
        return False
    poll = select.poll()
    poll.register(client, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))
