"""uvicorn's HTTP protocol with limits on what a client may send or leave unsent, and with a way past ASGI for tokens.

    open -> head -> body -> answer -> idle -> head ...      a client that owes us something has a deadline to send it

An error that is found here carries OpenAI's body, as the app's errors do. No limit costs anything per streamed token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, cast

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tandem.protocol.config import RouterConfig
from tandem.router.http.errors import error_body
from tandem.router.http.response_writer import DIRECT_WRITE

__all__ = ["Connections", "HttpProtocol"]

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 8192
MAX_HEADERS = 128
PIECE_BYTES = 4096  # parsed at once: its requests are all made, however many wait before them
MAX_UNPARSED_BYTES = 64 * 1024  # behind requests that wait; beyond it the connection is not read
MIN_BODY_BYTES_PER_S = 16 * 1024  # a large body gets body_timeout_s and as long as it takes at this rate
MAX_UNFINISHED_BODIES = 64  # as many of the largest size are kept in memory at once
NUM_RESERVED = 64  # connections above max_connections, so that health checks and metrics get through
_LINGER_S = 2.0  # for a client to read our last words, or to end a body that nobody reads
_STALL_S = 60.0  # without a byte read of an answer that waits to be sent
_MAX_TICK_S = 0.5
_WARN_INTERVAL_S = 60.0
_FIRST = itemgetter(0)
_OPERATOR_PATHS = (b"/health", b"/ready", b"/metrics")


class _Refused(Exception):
    """A request that is answered here, with an error, before the app sees it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Connections:
    """What the connections of one server share: limits, a clock, and the order in which we wait for clients."""

    def __init__(self, config: RouterConfig, max_connections: int) -> None:
        """`max_connections` is the config's, or less where the process may not open as many files."""
        self.max_connections = max_connections
        self.max_header_bytes = config.max_header_bytes
        self.header_timeout_s = config.header_timeout_s
        self.body_timeout_s = config.body_timeout_s
        self.max_unfinished_bytes = MAX_UNFINISHED_BODIES * config.max_body_bytes
        self.num_unfinished_bytes = 0  # of bodies that have begun to arrive
        self.now_s = 0.0
        self.open: set[HttpProtocol] = set()
        # Connections whose client owes us a request or the rest of one, in the order in which we began to wait.
        self.waiting: OrderedDict[HttpProtocol, None] = OrderedDict()
        self._ticked_s = time.monotonic()
        self._warned_s = -math.inf

    def tick(self) -> None:
        """Advance the clock. Time in which this process itself stood still does not count against clients."""
        now = time.monotonic()
        self.now_s += min(now - self._ticked_s, _MAX_TICK_S)
        self._ticked_s = now

    def sweep(self, connections: Iterable[Any]) -> None:
        """End the connections whose clients are too slow."""
        for connection in list(connections):
            connection.check(self.now_s)

    def has_room_for(self, connection: HttpProtocol) -> bool:
        """Whether there is room for this one, when those have ended that keep us waiting longer than it.

        Clients that send their request at once are not hit.
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

    def drop_bodies(self) -> None:
        """End those that have sent part of a body for longest, until what is left is little enough."""
        for connection in list(self.waiting):
            if self.num_unfinished_bytes <= self.max_unfinished_bytes:
                return
            connection.drop_body()

    def forget(self, connection: HttpProtocol) -> None:
        """A connection has ended, or is about to."""
        connection.body_ended()
        self.open.discard(connection)
        self.waiting.pop(connection, None)


class _Flow(FlowControl):
    """Pauses reading, and does not resume it while too many bytes wait to be parsed, whoever asks for it."""

    def __init__(self, transport: asyncio.Transport, unparsed: bytearray) -> None:
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        """Read on, if there is room for more."""
        if len(self._unparsed) < MAX_UNPARSED_BYTES:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Offers requests the extension that `ResponseWriter` uses.

    Requests may be pipelined: they are answered in order. While one waits for the one that is answered, nothing more is
    parsed; a bounded number of bytes is read, so that a client that leaves is noticed.
    """

    def __init__(self, shared: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._shared = shared
        self._running: RequestResponseCycle | None = None  # the request being answered; `cycle` is the latest to come
        self._due_s = math.inf  # when what we wait for must have come
        self._is_idle = False  # between two requests
        self._is_ending = False  # our last words are said
        self._last_words: _Refused | None = None  # to be said when the requests before have their answers
        self._unparsed = bytearray()  # what came behind requests that wait
        self._num_barren_bytes = 0  # that came since there last was a whole head, or a byte of a body
        self._num_body_bytes = 0  # of a body that is not there as a whole
        self._num_unsent_bytes = 0
        self._unsent_since_s = 0.0

    # -- of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow = _Flow(self.transport, self._unparsed)
        shared = self._shared
        if len(self.connections) > shared.max_connections + NUM_RESERVED:
            self.transport.abort()
            return
        shared.open.add(self)
        shared.has_room_for(self)  # where there is none its request may still be an operator's
        shared.waiting[self] = None
        self._due_s = shared.now_s + shared.header_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._shared.forget(self)
        self._tell_app()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._is_ending or self._last_words is not None:
            return
        if self._is_idle:
            self._is_idle = False
            self._due_s = self._shared.now_s + self._shared.header_timeout_s
        if len(data) <= PIECE_BYTES and not self.pipeline:
            self._parse_piece(data)
        else:
            self._unparsed += data
            self._parse_on()
            if len(self._unparsed) >= MAX_UNPARSED_BYTES:
                self.flow.pause_reading()
        if self._shared.num_unfinished_bytes > self._shared.max_unfinished_bytes:
            self._shared.drop_bodies()

    def check(self, now_s: float) -> None:
        """End the connection if its client is too slow."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent == 0 or num_unsent != self._num_unsent_bytes:
            self._num_unsent_bytes, self._unsent_since_s = num_unsent, now_s
        elif now_s - self._unsent_since_s > _STALL_S:
            self._tell_app()
            self.transport.abort()
            return
        if now_s <= self._due_s or (self.transport.is_closing() and not self._is_ending):
            return
        if self._is_ending:
            self.transport.abort()
        elif self.flow.read_paused:  # it is the app that does not read
            self._due_s = now_s + self._shared.body_timeout_s
        elif self._num_barren_bytes == 0 and not self._is_answering:
            self.transport.close()
        else:
            self._refuse(_Refused(408, "The request did not arrive in time.", "request_timeout"))

    def body_ended(self) -> None:
        """What came of a body is with the app, or gone."""
        self._shared.num_unfinished_bytes -= self._num_body_bytes
        self._num_body_bytes = 0

    def drop_body(self) -> None:
        """Make room for other bodies, if one has begun to arrive here."""
        if self._num_body_bytes:
            self._refuse(_Refused(503, "Too many bodies arrive at once; try again later.", "too_many_bodies"))

    def shed(self) -> None:
        """Make room for another connection."""
        self._shared.forget(self)
        self._tell_app()
        self.transport.abort() if self._is_ending else self.transport.close()

    def shutdown(self) -> None:
        """The server ends: close the connection, now or after the answer under way."""
        if self._is_ending:
            self.transport.abort()
        else:
            super().shutdown()

    # -- of the parser

    def _parse_on(self) -> None:
        """Parse what came, up to a request that has to wait for another one's answer."""
        while self._unparsed and not self.pipeline and not self._is_ending and self._last_words is None:
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            self._parse_piece(piece)

    def _parse_piece(self, piece: bytes) -> None:
        """Parse a few bytes, and refuse what they are if need be."""
        self._num_barren_bytes += len(piece)
        try:
            self._parse(piece)
        except httptools.HttpParserError as exc:
            cause = exc.__context__  # what a callback raised: "User callback error" alone says nothing
            why = cause if isinstance(cause, httptools.HttpParserError) else exc
            self._refuse(cause if isinstance(cause, _Refused) else _Refused(400, f"This is no valid HTTP: {why}."))
        else:
            if self._num_barren_bytes > self._shared.max_header_bytes:
                self._refuse(self._too_large())

    def _parse(self, data: bytes) -> None:
        """Have the parser call back with what came."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            # The parser takes what follows for the other protocol. It is a body: we stay with HTTP/1.1, as one may.
            names = (b"content-length", b"transfer-encoding")
            framing = [b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in names]
            callbacks = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
            self.parser = httptools.HttpRequestParser(callbacks)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n" % b"".join(framing))
            self.parser.feed_data(data[exc.args[0] :])

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        super().on_message_begin()
        self._num_barren_bytes = max(1, self._num_barren_bytes)  # 0 where the same piece ended another request

    def on_url(self, url: bytes) -> None:
        """A part of a URL came."""
        if len(self.url) + len(url) > MAX_URL_BYTES:
            raise _Refused(414, f"The URL is longer than {MAX_URL_BYTES} bytes.", "url_too_long")
        super().on_url(url)

    def on_headers_complete(self) -> None:
        """The head of a request is there. NOTE: its task is made here, but begins in the loop's next turn."""
        self._check_head()
        super().on_headers_complete()
        if self.pipeline:  # uvicorn stopped reading, but a client that leaves is only noticed by reading
            self.flow.resume_reading()
        self.scope["extensions"] = {DIRECT_WRITE: {"write": partial(_write, self.cycle)}}
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self.headers = []  # what a trailer brings is no header of the request, whose rules were checked
        self._num_barren_bytes = 0
        if self.pipeline:  # its body may lie here unread: the client owes nothing before it is the request's turn
            self._due_s = math.inf
            self._shared.waiting.pop(self, None)
        else:
            self._await_body()

    def on_body(self, body: bytes) -> None:
        """A part of a body came."""
        super().on_body(body)
        self._num_barren_bytes = 0
        if self.cycle.response_complete:
            return
        self._due_s += len(body) / MIN_BODY_BYTES_PER_S
        self._num_body_bytes += len(body)
        self._shared.num_unfinished_bytes += len(body)

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        if self.parser.should_upgrade():
            return  # but for its body
        super().on_message_complete()
        self.body_ended()
        self._num_barren_bytes = 0
        self._due_s = math.inf
        if self.cycle.response_complete:
            self._await_next()
        else:
            self._shared.waiting.pop(self, None)

    # -- of the answer

    def on_response_complete(self) -> None:
        """The answer to a request is sent, as far as we are concerned."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            if not self.pipeline and self.cycle.more_body:
                self._await_body()
        if self._unparsed:
            self._parse_on()
        self.flow.resume_reading()
        if not self.cycle.response_complete or self._is_ending:
            return
        if self._last_words is not None:
            self._refuse(self._last_words)
        elif self.cycle.more_body:
            self._drop_body()
        else:
            self._await_next()

    def _await_body(self) -> None:
        """The client has to send the rest of a request."""
        self._due_s = self._shared.now_s + self._shared.body_timeout_s
        self._shared.waiting[self] = None

    def _await_next(self) -> None:
        """The client may send another request."""
        self._shared.waiting[self] = None
        self._is_idle = self._num_barren_bytes == 0
        timeout_s = self.timeout_keep_alive if self._is_idle else self._shared.header_timeout_s
        self._due_s = self._shared.now_s + timeout_s

    def _drop_body(self) -> None:
        """The app answered before it had the whole body: what still comes of it is not wanted."""
        self.body_ended()
        if self.expect_100_continue:
            self._end()  # the client may leave the body out, and we could not tell it from the next request
        else:
            self._due_s = min(self._due_s, self._shared.now_s + _LINGER_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] != "1.1":
            app = partial(_answer_unchunked, cycle, app)
        super()._start_asgi_task(cycle, app)

    def _tell_app(self) -> None:
        """Let what runs know that nobody reads its answer."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.flow.resume_writing()

    # -- refusals

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_head(self) -> None:
        """Raise `_Refused` for a request that the app must not see."""
        num_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        num_hosts = list(map(_FIRST, self.headers)).count(b"host")
        if len(self.headers) > MAX_HEADERS or num_bytes > self._shared.max_header_bytes:
            raise self._too_large()
        if num_hosts != 1 and (num_hosts or self.parser.get_http_version() == "1.1"):
            raise _Refused(400, "A request needs one Host header.")
        if not self._shared.has_room_for(self) and self.url.partition(b"?")[0] not in _OPERATOR_PATHS:
            message = f"All {self._shared.max_connections} connections of this server are in use; try again later."
            raise _Refused(503, message, "too_many_connections")

    def _too_large(self) -> _Refused:
        message = f"The header is larger than {self._shared.max_header_bytes} bytes or {MAX_HEADERS} lines."
        return _Refused(431, message, "header_too_large")

    def _refuse(self, refused: _Refused) -> None:
        """Answer with an error behind the answers to the requests before, and end.

        Where it could be read as part of an answer there is only the end.
        """
        logger.debug("refused %s: %s", self.client, refused)
        self._unparsed.clear()
        if self._is_answering:
            if self.cycle.more_body and self.cycle is not self._running:
                self.pipeline.popleft()  # the request that is refused
                self.cycle = self.pipeline[0][0] if self.pipeline else cast(RequestResponseCycle, self._running)
            if not self.cycle.more_body:
                self._last_words = refused
                self._due_s = math.inf
                return
            self._tell_app()
            if self.cycle.response_started:
                self._shared.forget(self)
                self.transport.close()
                return
        error_type = "server_error" if refused.status >= 500 else "invalid_request_error"
        body = orjson.dumps(error_body(str(refused), error_type, code=refused.code))
        head = [STATUS_LINE[refused.status]]
        head += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        if refused.status in (429, 503):
            head.append(b"retry-after: 1\r\n")
        head.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self._end()

    def _end(self) -> None:
        """Say no more, and drop what comes until the client hangs up too.

        To close with data unread would reset the connection, and the client might never see our answer.
        """
        self._is_ending = True
        self._shared.forget(self)
        self._due_s = self._shared.now_s + _LINGER_S
        self.flow.resume_reading()
        if not self.transport.is_closing():
            self.transport.write_eof()


async def _answer_unchunked(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""
    has_length = True

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = b"content-length" in map(bytes.lower, map(_FIRST, message.get("headers", ())))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unchunked)


def _write(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a part of a response's body now, or return False: then `send` must do it, and wait if need be."""
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused or cycle.disconnected:
        return False
    if data:  # an empty chunk would be the end of the body
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
