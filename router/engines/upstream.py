"""A small HTTP client for one engine: sends requests over kept connections and hands on answers as they arrive.

Every streamed token takes this path. Per streamed event httpx costs ten times as much CPU as this protocol over
httptools. It knows nothing about what it carries.

An engine may send anything, as fast as it likes. What the reader waits for is parsed and handed on at once if it is not
much; all else a piece at a time, in time slices in which all engines take turns. What the reader does not
wait for is not parsed, and then its connection is not read, so the engine has to wait. A reader that has much work with
few bytes says so (`is_costly`, `call_again`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from tandem.protocol.fault_boundary import undone_on_error
from tandem.router.engines.addresses import Resolve
from tandem.router.engines.tls import tls_reason
from tandem.router.streams import DeltaQueue
from tandem.runtime.followed_tls import FollowedTls
from tandem.runtime.time_slicer import TimeSlicer

# Shorter than the 5 s after which uvicorn closes an idle connection, which would lose the request on it.
_MAX_IDLE_S = 2.0
_NO_TRACE: Mapping[str, str] = {}
_MAX_IDLE = 1024  # connections
_LINGER_S = 1.0  # wait for the end of an answer whose last event has arrived
QUICK_BYTES = 8 * 1024  # of an answer, parsed as they arrive; more wait for a time slice
PIECE_BYTES = 64 * 1024  # of an answer, parsed at once
COSTLY_PIECE_BYTES = 2048  # the same of a costly one
_MAX_UNPARSED_BYTES = 256 * 1024  # of an answer; above it, its connection is not read
MAX_ANSWER_BYTES = 32 * 1024 * 1024  # of an answer that is not streamed
MAX_HEADER_BYTES = 64 * 1024


class Unreachable(ConnectionError):
    """Nothing listens there, or it accepts no connection in time."""


class AnswerTooLarge(Exception):
    """An answer that is not streamed exceeds `MAX_ANSWER_BYTES`."""


class Upstream:
    """The connections to one engine. Used from one event loop only."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        connect_timeout_s: float,
        slicer: TimeSlicer | None = None,
        resolve: Resolve | None = None,
        tls: FollowedTls | None = None,
    ) -> None:
        """`resolve` returns the allowed addresses of the host; None allows whatever its name resolves to.

        `slicer` is shared with connections to other engines; None = it has one of its own. `tls` is given for https://
        only.
        """
        parts = urlsplit(url)
        self.netloc = parts.netloc  # those that share a slicer take turns by it
        is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if is_tls else 80)
        assert is_tls == (tls is not None), "an https:// URL is never connected to without TLS"
        self._tls = tls
        self.slicer = slicer or TimeSlicer()
        self._base_path = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._resolve = resolve
        given = {"host": parts.netloc, "user-agent": "tandem", "accept-encoding": "identity"}
        given |= {"content-type": "application/json"} | {name.lower(): value for name, value in headers.items()}
        self._head = "".join(f"{name}: {_checked(value)}\r\n" for name, value in given.items())
        self._open: set[_UpstreamConnection] = set()
        self._idle: list[_UpstreamConnection] = []

    async def post(self, path: str, content: bytes, request_id: str, trace: Mapping[str, str] = _NO_TRACE) -> Reply:
        """As `send`, by POST."""
        return await self.send("POST", path, content, request_id, trace)

    async def send(
        self, method: str, path: str, content: bytes, request_id: str, trace: Mapping[str, str] = _NO_TRACE
    ) -> Reply:
        """Send a request and wait for the head of its answer. The caller closes the reply.

        `trace` is headers for the engine's own tracing.
        NOTE: `path` must be checked: it goes into the head of the request as it is.
        Raises `Unreachable`, or another `OSError` when the connection breaks. It waits without a timeout.
        """
        context = None if self._tls is None else await self._tls.current()
        connection = self._take(context) or await self._connect(context)
        head = f"{method} {self._base_path}{path} HTTP/1.1\r\n{self._head}x-request-id: {request_id}\r\n"
        if trace:
            head += "".join(f"{name}: {_checked(value)}\r\n" for name, value in trace.items())
        reply = connection.send(f"{head}content-length: {len(content)}\r\n\r\n".encode("latin-1") + content)
        with undone_on_error(reply.close):
            await reply.wait_for_head()
        return reply

    def close(self) -> None:
        """Close all connections in the next iteration of the event loop; requests that wait for an answer fail."""
        for connection in self._open:
            connection.close()

    def _take(self, context: ssl.SSLContext | None) -> _UpstreamConnection | None:
        """The connection that was used last, if it is young enough and its certificates are those of now.

        Otherwise all idle ones are too old: close them.
        """
        last = self._idle[-1] if self._idle else None
        if last is not None and last.context is context and time.monotonic() - last.idle_since_s < _MAX_IDLE_S:
            return self._idle.pop()
        while self._idle:
            self._idle.pop().close()
        return None

    async def _connect(self, context: ssl.SSLContext | None) -> _UpstreamConnection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._resolve is None:
                    return await self._connect_to(self._host, context)
                *others, last = await self._resolve(self._host, self._port)
                for address in others:
                    with contextlib.suppress(OSError):
                        return await self._connect_to(address, context)
                return await self._connect_to(last, context)
        except TimeoutError as exc:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from exc
        except OSError as exc:
            raise Unreachable(tls_reason(exc)) from exc

    async def _connect_to(self, address: str, context: ssl.SSLContext | None) -> _UpstreamConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _UpstreamConnection(self, context),
            address,
            self._port,
            ssl=context,
            server_hostname=self._host if self._tls else None,
        )
        return connection

    def note_open(self, connection: _UpstreamConnection) -> None:
        """A connection was made."""
        self._open.add(connection)

    def give_back(self, connection: _UpstreamConnection) -> None:
        """A connection is free for the next request."""
        if len(self._idle) >= _MAX_IDLE:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: _UpstreamConnection) -> None:
        """A connection is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class Reply(DeltaQueue[bytes]):
    """One answer: the parts of its body. It ends complete, or raises an `OSError` to its reader."""

    def __init__(self, connection: _UpstreamConnection) -> None:
        super().__init__()
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.is_costly = False  # its reader has much work with few bytes: all of them are parsed in time slices
        self.is_bulky = False  # its reader holds many bytes, and the next ones may give it work with all of them
        self._is_due = False  # the reader is to be called again
        self._connection = connection

    async def wait_for_head(self) -> None:
        """Return when status and headers have arrived."""
        while not self.status:
            await self._arrival()

    @property
    def is_event_stream(self) -> bool:
        """Whether its body is server-sent events."""
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def read(self) -> bytes:
        """The bytes that arrived since the last call, at least one; b"" at the end."""
        return b"".join(await self.take())

    async def read_all(self, max_bytes: int = 0) -> bytes:
        """The rest of it, up to `max_bytes`; 0 = `MAX_ANSWER_BYTES`. Raises `AnswerTooLarge`."""
        parts: list[bytes] = []
        num_left = max_bytes = max_bytes or MAX_ANSWER_BYTES

        def keep(items: list[bytes]) -> bool:
            nonlocal num_left
            parts.extend(items)
            num_left -= sum(map(len, items))
            if num_left < 0:
                raise AnswerTooLarge(f"the answer is larger than {max_bytes} bytes; ask for a stream")
            return True

        await self.read_into(keep)
        return b"".join(parts)

    def close(self, *, is_ending: bool = False) -> None:
        """Stop reading. `is_ending`: only the end of the body is missing, so the connection may be kept."""
        self._connection.end(self, is_ending=is_ending)

    def drop_unread(self) -> None:
        """Drop what was not read, so that it does not hold up the connection."""
        self._take_all()
        self._is_due = False

    def add(self, data: bytes) -> None:
        """A part of the body arrived."""
        self._items.append(data)

    def call_again(self) -> None:
        """The reader goes on with what it has, in a time slice: it is called with nothing new."""
        self._is_due = True
        self._connection.go_on()

    def deliver_slice(self) -> None:
        """Push what has arrived, or call the reader that goes on with what it has."""
        if self._is_due:
            self._is_due = False
            self._items.append(b"")
        self.deliver()

    @property
    def has_rest(self) -> bool:
        """Whether the reader has not finished with what was parsed."""
        return self._is_due or bool(self._items)

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits for more."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def _is_at_end(self) -> bool:
        return super()._is_at_end and not self._is_due

    def _arrival(self) -> asyncio.Future[None]:
        self._connection.go_on()
        return super()._arrival()


class _UpstreamConnection(asyncio.Protocol):
    """One connection: at most one request at a time."""

    def __init__(self, upstream: Upstream, context: ssl.SSLContext | None) -> None:
        self.idle_since_s = 0.0
        self.context = context  # of its TLS
        self._upstream = upstream
        self._reply: Reply | None = None
        self._is_lost = False
        self._is_tls = False
        self._has_answered = False
        self._num_head_bytes = 0  # received since the last complete head or byte of a body
        self._lingering: asyncio.TimerHandle | None = None
        self._unparsed: deque[bytes] = deque()
        self._num_unparsed_bytes = 0
        self._start = 0  # of what is unparsed in the first of them
        self._waits_for_slice = False
        self._is_paused = False
        self._error: Exception | None = None  # with which the connection was lost

    # -- called by the upstream and the reply

    def send(self, request: bytes) -> Reply:
        """Send a request. The reply is filled as the answer arrives."""
        self._reply = reply = Reply(self)
        self._parser = httptools.HttpResponseParser(self)
        self._can_stay = False
        self._num_head_bytes = 0
        if self._is_lost:
            reply.fail(self._loss(None))
        else:
            self._transport.write(request)
        return reply

    def end(self, reply: Reply, *, is_ending: bool) -> None:
        """The reply is no longer read: keep the connection if the answer is complete or about to be."""
        if self._reply is not reply or self._lingering is not None:
            return
        if is_ending and not reply.is_complete and not self._is_lost:
            self._lingering = asyncio.get_running_loop().call_later(_LINGER_S, self.close)
            reply.drop_unread()
            self.go_on()
            return
        self._reply = None
        reply.drop_unread()
        if reply.is_complete and self._can_stay and not (self._is_lost or self._unparsed):
            self._upstream.give_back(self)
        else:
            self.close()

    def close(self) -> None:
        self._unparsed.clear()
        self._num_unparsed_bytes = self._start = 0
        self._is_paused = False
        self._transport.abort()  # at once, so that the engine stops computing

    def go_on(self) -> None:
        """Hand on what has arrived, as soon as there is time."""
        has_rest = self._reply is not None and self._reply.has_rest
        if (self._unparsed or has_rest or self._is_lost) and not self._waits_for_slice:
            self._waits_for_slice = True
            self._upstream.slicer.add(self._use_slice, self._upstream.netloc)

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self._upstream.note_open(self)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or reply.is_complete:  # no request is open
            self.close()
        elif (
            len(data) <= QUICK_BYTES
            and reply.is_awaited
            and not (self._unparsed or reply.is_costly or reply.is_bulky or reply.has_rest)
        ):
            self._parse(reply, data)
        else:
            self._unparsed.append(data)
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > _MAX_UNPARSED_BYTES:
                self._is_paused = True
                self._transport.pause_reading()
            self.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._error = exc
        self._upstream.forget(self)
        self._stop_lingering()
        self._end_reply()

    # -- parsing

    def _use_slice(self, _: float) -> None:
        """Hand on the next piece, if the reader waits for it."""
        self._waits_for_slice = False
        reply = self._reply
        if reply is not None and self._is_wanted(reply):
            if reply.has_rest:
                reply.deliver_slice()
            elif self._unparsed and not reply.is_complete:
                self._parse(reply, self._next_piece(COSTLY_PIECE_BYTES if reply.is_costly else PIECE_BYTES))
            if self._is_wanted(reply):
                self.go_on()
        if self._is_lost:
            self._end_reply()
        elif self._is_paused and self._num_unparsed_bytes <= _MAX_UNPARSED_BYTES:
            self._is_paused = False
            self._transport.resume_reading()

    def _next_piece(self, max_bytes: int) -> bytes:
        """Up to `max_bytes`, however small the parts are in which they came: a turn for each would be too few turns."""
        parts = []
        while self._unparsed and max_bytes:
            first = self._unparsed[0]
            part = first[self._start : self._start + max_bytes]
            parts.append(part)
            max_bytes -= len(part)
            self._start += len(part)
            self._num_unparsed_bytes -= len(part)
            if self._start == len(first):
                self._unparsed.popleft()
                self._start = 0
        return b"".join(parts)

    def _is_wanted(self, reply: Reply) -> bool:
        return reply.is_awaited or self._lingering is not None

    def _parse(self, reply: Reply, data: bytes) -> None:
        """Parse a piece of the answer, and hand on what is in it."""
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._give_up(reply, f"no HTTP: {exc}")
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self._give_up(reply, f"its header is larger than {MAX_HEADER_BYTES} bytes")
        reply.deliver()
        if self._lingering is not None:
            reply.drop_unread()
            if reply.is_complete:
                self._stop_lingering()
                self.end(reply, is_ending=False)

    def _give_up(self, reply: Reply, reason: str) -> None:
        reply.fail(ConnectionError(reason))
        self.close()

    def _end_reply(self) -> None:
        """The connection is lost: tell the reader, once it has all that came."""
        reply = self._reply
        if reply is None or reply.is_complete or self._unparsed or reply.has_rest:
            return
        is_open_ended = not {"content-length", "transfer-encoding"} & reply.headers.keys()
        if self._error is None and reply.status and is_open_ended:
            reply.is_complete = True  # without a length, the end of the connection is the end of the answer
            reply.deliver()
        else:
            reply.fail(self._loss(self._error))

    def _loss(self, exc: Exception | None) -> OSError:
        if isinstance(exc, ssl.SSLError):  # TLS 1.3: an engine refuses our certificate after the handshake
            return ConnectionError(tls_reason(exc))
        if isinstance(exc, OSError) and not isinstance(exc, ConnectionError):
            return exc
        # A server that wants another certificate may hang up or reset the connection; which of them we see is chance.
        is_new_tls = self._is_tls and not self._has_answered
        hint = " before any answer; it may ask for another certificate of ours" if is_new_tls else ""
        return ConnectionResetError(f"the engine closed the connection{hint}")

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None and not self._reply.status:  # trailers are not read
            self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._reply is not None, "an answer is expected"
        status = self._parser.get_status_code()
        if self._reply.is_complete:
            self._can_stay = False  # nobody asked for another answer
        elif status >= 200:
            self._num_head_bytes = 0
            self._reply.status = status
            self._has_answered = True
        else:
            self._reply.headers.clear()  # they belong to an interim answer

    def on_body(self, data: bytes) -> None:
        self._num_head_bytes = 0
        if self._reply is not None and not self._reply.is_complete:
            self._reply.add(data)

    def on_message_complete(self) -> None:
        if self._reply is not None and self._reply.status and not self._reply.is_complete:
            self._reply.is_complete = True
            self._can_stay = self._parser.should_keep_alive()


def _checked(value: str) -> str:
    """The value of a header. Raises `ValueError` if it would start another header."""
    if "\r" in value or "\n" in value:
        raise ValueError("a header's value contains a line break")
    return value
