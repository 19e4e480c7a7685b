"""uvicorn's HTTP protocol, with limits on what a client may send or delay, and a way past ASGI for tokens.

    open -> head -> body -> response -> idle -> head ...      a client that owes us something has a deadline to send it

A request that does not wait for the response to the one before it, and one for which nobody needs an API key, takes
turns with others of its kind: each iteration of the event loop starts one. Errors found here have OpenAI's body, as the
app's errors do. No limit costs anything per streamed token.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.frontend.http.connections import ADMIT, Connections, has_left, network_of
from tandem.frontend.http.refusals import (
    HeaderTooLarge,
    InvalidHttp,
    Refusal,
    RequestTimeout,
    TooManyBodies,
    TooManyConnections,
    UrlTooLong,
)
from tandem.frontend.http.request_id import new_request_id
from tandem.frontend.http.response_writer import DIRECT_WRITE

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 8192
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10  # of the URL and all header lines together
PIECE_BYTES = 4096  # the most bytes that are parsed at once
MIN_BODY_PIECE_BYTES = 256  # the same for a part of a body, after which other requests may follow
MAX_UNPARSED_BYTES = 64 * 1024  # bytes after requests that wait; beyond it the connection is not read
MIN_BYTES_PER_S = 16 * 1024  # a large body or response gets more time: as long as it takes at this rate
_LINGER_S = 2.0  # for a client to read our last response, or to end a body that nobody reads
_READ_TIMEOUT_S = 60.0  # for a client to read what it asked for, and the time that what it has read takes at that rate
_SLOW_S = 5.0  # a client that has used up this much of that time makes room for others
_FIRST = itemgetter(0)
_END = b"\r\n\r\n"  # of a head
_OPERATOR_PATHS = (b"/health", b"/ready", b"/metrics")
_TAKES_TURNS = (b"/metrics", b"/dashboard", b"/docs", b"/openapi.json")  # open paths that take time, and what is below


class _ReadFlow(FlowControl):
    """uvicorn's flow control, which here never resumes reading while too many bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport, unparsed: bytearray) -> None:
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        """Resume reading if there is room for more."""
        if len(self._unparsed) < MAX_UNPARSED_BYTES:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Its requests get the ASGI extension that `ResponseWriter` uses.

    Pipelined requests are answered in order. While a request waits for the one before it, nothing more is parsed; a
    bounded number of bytes is still read, so that a client that leaves is noticed. While the client does not read, no
    other request is started.
    """

    def __init__(self, shared: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._shared = shared
        self.network = ""
        self._running: RequestResponseCycle | None = None  # the request being answered; `cycle` is the latest to arrive
        self._held: tuple[RequestResponseCycle, Any] | None = None  # the same, if it has to wait for its turn to start
        self._is_in_line = False  # whether `_go_on` will be called
        self._is_its_turn = False  # to start a request
        self._is_costly = False  # what it sent took too long once, so that it always waits in line
        self._is_wanted = False  # whether the request being answered is one that may not end for another client's
        self._deadline_s = math.inf  # when the client must have sent what it owes us
        self._is_idle = False  # between two requests
        self._is_lingering = False  # our last response is written, and input is dropped until the client hangs up
        self._pending_refusal: Refusal | None = None  # to be sent after the responses to earlier requests
        self._unparsed = bytearray()  # bytes that arrived after requests that wait
        self._num_stray_bytes = 0  # received since the last complete head or byte of a body
        self._num_unfinished_bytes = 0  # of a body that is not complete
        self._num_unsent_bytes = 0  # when we looked last
        self._looked_s = 0.0
        self._patience_s = _READ_TIMEOUT_S  # how long the client may go on without reading
        self._is_slow = False  # whether it has used up much of that

    # -- called by the event loop (or by `TlsConnection` in its place), and by `Connections`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow = _ReadFlow(self.transport, self._unparsed)
        self.network = network_of(self.transport.get_extra_info("peername"))
        self._looked_s = self._shared.now_s
        if self._shared.admit(self):
            self.expect_request()
        else:
            self.transport.abort()

    def expect_request(self) -> None:
        """The client has its time for the first request from now on; over TLS it had the same for the handshake."""
        self._deadline_s = self._shared.now_s + self._shared.header_timeout_s
        self.note_progress()

    def note_progress(self) -> None:
        """The client has sent something: those that have sent nothing make room before it."""
        self._shared.stop_waiting(self)
        self._shared.wait_for(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._shared.remove(self)
        self._disconnect_app()
        super().connection_lost(exc)
        self._forget_requests()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._is_lingering or self._pending_refusal is not None:
            return
        if self._is_idle:
            self._is_idle = False
            self._deadline_s = self._shared.now_s + self._shared.header_timeout_s
        has_time = not self._is_in_line and not self._is_costly and self._shared.has_time()
        if has_time and not self._unparsed and self._may_parse and len(data) <= PIECE_BYTES and _has_one_head(data):
            self._parse_piece(data)
        else:
            self._unparsed += data
            if has_time:
                self._parse_unparsed(self._shared.reads.end_s())
                self._is_costly = self._is_in_line and self._may_parse
            else:
                self._read_later()
            if len(self._unparsed) >= MAX_UNPARSED_BYTES:
                self.flow.pause_reading()
        if self._shared.num_unfinished_bytes > self._shared.max_unfinished_bytes:
            self._shared.limit_bodies()

    def pause_writing(self) -> None:
        """The client does not read: no more is written until it does."""
        self._look(self._shared.now_s)
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self._look(self._shared.now_s)
        super().resume_writing()
        if not self._is_answering:
            self._shared.wait_for(self)
        if self._held is not None or self._unparsed:
            self._stand_in_line()

    def check_deadlines(self, now_s: float) -> None:
        """End the connection if its client is too slow."""
        self._look(now_s)
        if self._patience_s < 0:
            self._disconnect_app()
            self.transport.abort()
            return
        if now_s <= self._deadline_s or (self.transport.is_closing() and not self._is_lingering):
            return
        if self._is_lingering:
            self.transport.abort()
        elif self.flow.read_paused:  # the app is the one that does not read
            self._deadline_s = now_s + self._shared.body_timeout_s
        elif self._num_stray_bytes == 0 and not self._is_answering:
            self.transport.close()
        else:
            self.refuse(RequestTimeout("The request did not arrive in time."))

    def release_body(self) -> None:
        """Stop counting the unfinished body: the app has it, or it is dropped."""
        self._shared.num_unfinished_bytes -= self._num_unfinished_bytes
        self._num_unfinished_bytes = 0

    def refuse_unfinished_body(self) -> None:
        """Refuse this connection's unfinished body, if there is one, to free memory for others."""
        if self._num_unfinished_bytes:
            most = self._shared.max_unfinished_bytes
            self.refuse(TooManyBodies(f"The bodies that arrive at once exceed {most} bytes; try again later."))

    def shed(self) -> None:
        """Make room for another connection: at once if this one was about to end, else when its client has read."""
        is_leaving = self._is_lingering or self.transport.is_closing()
        self._shared.remove(self) if is_leaving else self._shared.leave(self)
        self._disconnect_app()
        self.transport.abort() if is_leaving else self.transport.close()

    def shutdown(self) -> None:
        """The server ends: close the connection, now or after the response under way."""
        if self._is_lingering:
            self.transport.abort()
        else:
            super().shutdown()

    def _forget_requests(self) -> None:
        """End all circles of references, so that this connection leaves nothing to the garbage collector.

        That of 100,000 connections takes it a second, in which everything stalls.
        """
        self.cycle = self._running = self._held = self.scope = None  # type: ignore[assignment]  # as before a request
        self._pending_refusal = None
        self.pipeline.clear()
        self._unparsed.clear()

    # -- parsing

    @property
    def _may_parse(self) -> bool:
        """Whether what arrives belongs to the request being answered, or nothing is being answered."""
        return not self._is_answering or (self.cycle.more_body and not self.pipeline)

    def _parse_unparsed(self, end_s: float) -> None:
        """Parse what arrived, up to a request that has to wait for the response to another one.

        What would take longer than until `end_s` goes on in another iteration of the event loop.
        """
        while self._unparsed and self._may_parse and not self._is_lingering and self._pending_refusal is None:
            end = _end_of_head(self._unparsed, MIN_BODY_PIECE_BYTES if self._is_answering else 0)
            size = PIECE_BYTES if end < 0 else end + len(_END)
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._parse_piece(piece)
            if self._unparsed and self._may_parse and self._shared.reads.clock() >= end_s:
                self._read_later()
                return

    def _parse_piece(self, piece: bytes) -> None:
        """Parse a few bytes, and refuse the request if they break a limit or are not HTTP."""
        self._num_stray_bytes += len(piece)
        try:
            self._parse(piece)
        except httptools.HttpParserError as exc:
            self.refuse(_refusal_of(exc))
        else:
            if self._num_stray_bytes > MAX_HEADER_BYTES:
                self.refuse(self._header_too_large())

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which calls back with what it finds."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            # The parser takes what follows for the other protocol. We stay with HTTP/1.1, as a server may, so it is a
            # body: a second parser reads it.
            names = (b"content-length", b"transfer-encoding")
            framing = [b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in names]
            callbacks = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
            self.parser = httptools.HttpRequestParser(callbacks)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n" % b"".join(framing))
            self.parser.feed_data(data[exc.args[0] :])

    def on_message_begin(self) -> None:
        """The first byte of a request arrived."""
        super().on_message_begin()
        self._num_stray_bytes = max(1, self._num_stray_bytes)  # 0 if the same piece ended another request

    def on_url(self, url: bytes) -> None:
        """A part of a URL arrived."""
        if len(self.url) + len(url) > MAX_URL_BYTES:
            raise UrlTooLong(f"The URL is longer than {MAX_URL_BYTES} bytes.")
        super().on_url(url)

    def on_headers_complete(self) -> None:
        """The head of a request is complete. NOTE: its task is created here, but starts in the next loop iteration."""
        self._check_head()
        super().on_headers_complete()
        if self.pipeline:  # uvicorn stopped reading, but only reading notices a client that leaves
            self.flow.resume_reading()
        self.scope["extensions"] = {DIRECT_WRITE: {"write": partial(_write, self.cycle)}, ADMIT: {"admit": self._admit}}
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self.headers = []  # trailers are appended here; they must not count as headers, which are already checked
        self._num_stray_bytes = 0
        if self.pipeline:  # its body may lie here unread: the client owes nothing until the request runs
            self._deadline_s = math.inf
            self._stop_waiting()
        else:
            self._wait_for_body()

    def on_body(self, body: bytes) -> None:
        """A part of a body arrived."""
        super().on_body(body)
        self._num_stray_bytes = 0
        if self.cycle.response_complete:
            return
        self._deadline_s += len(body) / MIN_BYTES_PER_S
        self._num_unfinished_bytes += len(body)
        self._shared.num_unfinished_bytes += len(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self.parser.should_upgrade():
            return  # its body is still to come
        super().on_message_complete()
        self.release_body()
        self._num_stray_bytes = 0
        self._deadline_s = math.inf
        if self.cycle.response_complete:
            self._wait_for_request()
        else:
            self._stop_waiting()

    # -- responses

    def on_response_complete(self) -> None:
        """The app has sent its whole response."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._wait_unless_read()
            return
        if self.pipeline:
            self._hold(*self.pipeline.pop())
            if not self.pipeline and self.cycle.more_body:
                self._wait_for_body()
        self.flow.resume_reading()
        if not self.cycle.response_complete or self._is_lingering:
            return
        if self._pending_refusal is not None:
            self.refuse(self._pending_refusal)
        elif self.cycle.more_body:
            self._discard_body()
        elif self._unparsed:
            self._wait_for_turn()
        else:
            self._wait_for_request()

    def _wait_for_body(self) -> None:
        """The client has to send the rest of a request."""
        self._deadline_s = self._shared.now_s + self._shared.body_timeout_s
        self._shared.wait_for(self)

    def _wait_for_request(self) -> None:
        """The client may send another request."""
        self._wait_unless_read()
        self._is_idle = self._num_stray_bytes == 0
        timeout_s = self._shared.keep_alive_timeout_s if self._is_idle else self._shared.header_timeout_s
        self._deadline_s = self._shared.now_s + timeout_s

    def _wait_unless_read(self) -> None:
        """The answer is written: what is left to do is the client's, unless it is busy reading a large one."""
        if not (self._is_wanted and self.flow.write_paused):
            self._shared.wait_for(self)

    def _discard_body(self) -> None:
        """The app answered before it had the whole body, so the rest is not wanted."""
        self.release_body()
        if self.expect_100_continue:
            self.linger()  # the client may leave the body out; we could not tell it from the next request
        else:
            self._deadline_s = min(self._deadline_s, self._shared.now_s + _LINGER_S)
            if self._unparsed:
                self._stand_in_line()

    def _stop_waiting(self) -> None:
        """The client has sent what it owes. One that does not read, or need not be served, still makes room."""
        if self._is_wanted and not self._is_slow:
            self._shared.stop_waiting(self)

    # -- turns

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._is_its_turn or not (self.flow.write_paused or self.url.startswith(_TAKES_TURNS)):
            self._is_wanted = not (self._is_its_turn and self.network)
            self._start(cycle, app)
        else:
            self._shared.stop_waiting(self)  # from now on it waits for something else
            self._hold(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_first = self._running is None
        self._running, self._held = cycle, None
        if is_first and has_left(self.transport) and not self._shared.serves_who_left(cycle.scope["method"]):
            self.transport.abort()  # it waited in the listener's queue until its client gave up
            return
        if cycle.scope["http_version"] != "1.1":
            app = partial(_answer_unchunked, cycle, app)
        super()._start_asgi_task(cycle, partial(_answer, app))

    def _hold(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start this request when it is its turn."""
        self._running, self._held = cycle, (cycle, app)
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """The client owes nothing but to read, yet a client without a key makes room for others."""
        self._deadline_s = math.inf
        self._is_wanted = not self.network
        if self.network:
            self._shared.wait_for(self)
        self._stand_in_line()

    def _stand_in_line(self) -> None:
        if not self._is_in_line:
            self._is_in_line = True
            self._shared.turns.add(self._take_turn, self.network)

    def _take_turn(self, _: float) -> None:
        self._is_in_line = False
        if not self.flow.write_paused:  # a client that reads again gets another turn
            self._is_its_turn = True
            self._go_on(self._shared.reads.end_s())
            self._is_its_turn = False

    def _read_later(self) -> None:
        if not self._is_in_line:
            self._is_in_line = True
            self._shared.reads.add(self._read, self.network)
            if not self._is_answering:
                self.note_progress()

    def _read(self, end_s: float) -> None:
        self._is_in_line = False
        self._go_on(end_s)

    def _go_on(self, end_s: float) -> None:
        """Parse what has arrived, and start a request if it is its turn or needs none."""
        if self._is_lingering or self.transport.is_closing():
            return
        if self._held is not None:
            self._start(*self._held) if self._is_its_turn else self._stand_in_line()
        self._parse_unparsed(end_s)
        self.flow.resume_reading()
        if self._deadline_s == math.inf and not self._is_answering:
            self._wait_for_request()

    def _admit(self, *, has_key: bool) -> None:
        """The request being answered is one that does not end for another client's, unless its own does not read."""
        if has_key and self.network:
            self._shared.know(self)
        if not self._is_wanted:
            self._is_wanted = True
            if not self._owes_body:
                self._stop_waiting()

    # -- a client that does not read

    def _look(self, now_s: float) -> None:
        """Note how much the client has read. While a response is being written, that cannot be told: it is not blamed.

        Each response that is read to its end gives the client all its time again.
        """
        was_slow = self._is_slow
        num_unsent, elapsed_s = self.transport.get_write_buffer_size(), now_s - self._looked_s
        num_read = max(0, self._num_unsent_bytes - num_unsent)
        is_known = self.flow.write_paused or not self._is_answering or num_unsent == self._num_unsent_bytes
        self._num_unsent_bytes, self._looked_s = num_unsent, now_s
        if num_unsent == 0:
            self._patience_s = _READ_TIMEOUT_S
        elif is_known:
            self._patience_s = min(_READ_TIMEOUT_S, self._patience_s - elapsed_s + num_read / MIN_BYTES_PER_S)
        self._is_slow = self._patience_s < _READ_TIMEOUT_S - _SLOW_S
        if self._is_slow:
            self._shared.wait_for(self)
        elif was_slow and self._is_answering and not self._owes_body:
            self._stop_waiting()

    def _disconnect_app(self) -> None:
        """Tell the running requests that nobody reads their response."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.flow.resume_writing()

    # -- refusals

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _owes_body(self) -> bool:
        return self._running is not None and self.cycle is self._running and self.cycle.more_body

    def _check_head(self) -> None:
        """Raise a `Refusal` for a request that the app must not see."""
        num_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        num_hosts = list(map(_FIRST, self.headers)).count(b"host")
        if len(self.headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            raise self._header_too_large()
        if num_hosts != 1 and (num_hosts or self.parser.get_http_version() == "1.1"):
            raise InvalidHttp("A request needs one Host header.")
        if not self._shared.make_room_for(self) and self.url.partition(b"?")[0] not in _OPERATOR_PATHS:
            raise TooManyConnections(
                f"All {self._shared.max_connections} connections of this server (--max-connections) are in use; "
                "try again later."
            )

    def _header_too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(f"The header is larger than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines.")

    def refuse(self, refusal: Refusal) -> None:
        """Send an error after the responses to earlier requests, and end the connection.

        If the error could be read as part of another response, the connection just ends.
        """
        self._unparsed.clear()
        if self._is_answering:
            if self.cycle.more_body and self.cycle is not self._running:
                self.pipeline.popleft()  # the request that is refused
                self.cycle = self.pipeline[0][0] if self.pipeline else cast(RequestResponseCycle, self._running)
            if not self.cycle.more_body:
                self._pending_refusal = refusal
                self._deadline_s = math.inf
                return
            self._disconnect_app()
            if self.cycle.response_started:
                self._shared.leave(self)
                self.transport.close()
                return
        request_id = new_request_id().shown  # the app has not seen the request
        logger.debug("request %s of %s is refused: %s", request_id, self.client, refusal)
        self.transport.write(refusal.response(self.server_state.default_headers, request_id))
        self.linger()

    def linger(self) -> None:
        """Write no more, and drop input until the client hangs up too.

        To close with data unread would reset the connection, and the client might never see our response.
        """
        self._is_lingering = True
        self._shared.leave(self)
        self._deadline_s = self._shared.now_s + _LINGER_S
        self.flow.resume_reading()
        if not self.transport.is_closing():
            self.transport.write_eof()


def _refusal_of(error: httptools.HttpParserError) -> Refusal:
    """The answer to an error of the parser.

    A local variable of the handler that held the cause would make a circle: the cause's traceback holds that frame.
    """
    cause = error.__context__  # what a callback raised: "User callback error" alone says nothing
    reason = cause if isinstance(cause, httptools.HttpParserError) else error
    return cause if isinstance(cause, Refusal) else InvalidHttp(f"This is not valid HTTP: {reason}.")


def _end_of_head(data: bytes | bytearray, start: int) -> int:
    """Where the next head ends, in the first 4 KB; -1 without one. Bodies have few CRs, and to find one is quick."""
    first = data.find(b"\r", start, PIECE_BYTES)
    return -1 if first < 0 else data.find(_END, first, PIECE_BYTES)


def _has_one_head(data: bytes) -> bool:
    """Whether no other request can follow the first one."""
    end = _end_of_head(data, 0)
    return end < 0 or data.find(b"\r", end + len(_END)) < 0


async def _answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and end the circle between a request and its extensions: see `_forget_requests`."""
    try:
        await app(scope, receive, send)
    finally:
        scope["extensions"].clear()


async def _answer_unchunked(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer an HTTP/1.0 client, which does not know chunks: a body of unknown length ends with the connection."""
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
    """Write a part of a response's body now. If that is impossible, return False: `send` must do it, and may wait."""
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused or cycle.disconnected:
        return False
    if data:  # an empty chunk would be the end of the body
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
