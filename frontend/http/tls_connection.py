"""TLS between a client's socket and `HttpProtocol`, over OpenSSL in memory.

    socket -> TlsConnection: handshake -> HttpProtocol is made, and this is its transport

The event loops' own TLS reports a connection only after its handshake. Here a connection has a deadline, and counts
against the limits, from its first moment. Its only write buffer is that of the socket: flow control is as without TLS.

A client can send little that costs much: handshakes, and records of a byte or of none. So each iteration of the event
loop has a bounded time for handshakes, and one for records, and streams go on in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Callable
from typing import Any, cast

from uvicorn.server import ServerState

from tandem.frontend.http.connections import Connections, has_left, network_of
from tandem.frontend.http.protocol import HttpProtocol
from tandem.frontend.http.refusals import PlainHttp
from tandem.frontend.http.request_id import new_request_id
from tandem.frontend.http.tls import HandshakeFailure, ServerTls
from tandem.frontend.http.tls_records import TlsRecords
from tandem.protocol.fault_boundary import undone_on_error
from tandem.runtime.time_slicer import TimeSlicer

__all__ = ["TlsConnection"]

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_MAX_HANDSHAKE_BYTES = 64 * 1024  # a client's chain of certificates takes some KB
_MAX_UNREAD_BYTES = 1 << 20  # bytes unread by a client that makes TLS itself answer (new keys, renegotiation)
_MAX_EMPTY_RECORDS = 32  # an update of keys takes a client nothing and us 20 us; it is due after some 2^24 records
_LINGER_S = 2.0  # for a client to read why its handshake failed


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """One client: a protocol towards its socket, and a transport towards `HttpProtocol` once the handshake is complete.

    Until then it takes the place of that protocol in the server's limits and at its end.
    """

    def __init__(
        self, shared: Connections, tls: ServerTls, state: ServerState, make_http: Callable[[], HttpProtocol]
    ) -> None:
        super().__init__()
        self._shared = shared
        self._tls = tls
        self._state = state
        self._make_http = make_http
        self._http: HttpProtocol | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = tls.loaded.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._records = TlsRecords()
        self._num_handshake_bytes = 0
        self._num_empty_records = 0  # more than those that had content
        self._is_costly = False  # its records took too long once, so that they always wait for a time slice
        self._waits_for_slice = False
        self.network = ""
        self._is_reading_paused = False  # whether `HttpProtocol` has paused it
        self._deadline_s = math.inf  # deadline of the handshake
        self._has_failed = False  # whether the handshake has failed, which was counted
        self._has_ended = False  # TLS is over: nothing more is encrypted, and input is dropped

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._write_socket = self.transport.write
        self._state.connections.add(cast(HttpProtocol, self))
        self.network = network_of(self.transport.get_extra_info("peername"))
        if self._shared.admit(self):
            self._deadline_s = self._shared.now_s + self._shared.header_timeout_s
        else:
            self._give_up("shed")

    def data_received(self, data: bytes) -> None:
        """Encrypted bytes arrived."""
        if self._has_ended:
            return
        if self._http is None and self._num_handshake_bytes == 0 and data[:1].isupper():  # a method: TLS begins with 22
            self._refuse_plain_http()
            return
        self._records.add(data)
        if self._http is None:
            self._wait_for_slice(self._tls.handshakes)
        elif self._is_costly:
            self._wait_for_slice(self._tls.reads)
        else:
            self._take_records(self._tls.reads.end_s())
            self._is_costly = self._waits_for_slice

    def eof_received(self) -> None:
        """The client has closed its side without TLS's closing message: close the socket, as without TLS."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._has_ended = True
        if self._http is not None:
            self._http.connection_lost(exc)
        else:
            self._fail("client_left")
            self._forget()
        # OpenSSL's memory is tens of KB, and a full garbage collection may be far away.
        del self._session, self._incoming, self._outgoing, self._write_socket
        self._http = None
        self._records.clear()

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        """The socket's buffer has room again."""
        if self._http is not None:
            self._http.resume_writing()

    # -- called by `Connections` and the server, until the handshake is complete

    def check_deadlines(self, now_s: float) -> None:
        """End the connection if its client is too slow."""
        if now_s > self._deadline_s:
            self._give_up("timeout")

    def release_body(self) -> None:
        """There is no body yet."""

    def refuse_unfinished_body(self) -> None:
        """There is no body yet."""

    def shed(self) -> None:
        """Make room for another connection."""
        self._forget()
        self._give_up("shed")

    def shutdown(self) -> None:
        """The server ends."""
        self._give_up("shed")

    # -- what has arrived

    def _wait_for_slice(self, slicer: TimeSlicer) -> None:
        if not self._waits_for_slice:
            self._waits_for_slice = True
            self.transport.pause_reading()
            slicer.add(self._use_slice, self.network)

    def _use_slice(self, end_s: float) -> None:
        self._waits_for_slice = False
        if self._has_ended or self.is_closing():
            return
        if self._http is None and has_left(self.transport):  # unnoticed, because reading was paused
            self._give_up("client_left")
            return
        with undone_on_error(self.abort):
            self._take_records(end_s)
        if not (self._waits_for_slice or self._is_reading_paused or self.is_closing()):
            self.transport.resume_reading()

    def _take_records(self, end_s: float) -> None:
        """Give TLS the records that have arrived. Those for which there is no time now wait for a time slice."""
        while record := self._records.take():
            self._incoming.write(record)
            if self._http is not None:
                self._read()
            else:
                self._shake_hands(len(record))
            if self._has_ended or self.is_closing():
                return
            if self._records and self._tls.reads.clock() >= end_s:
                self._wait_for_slice(self._tls.handshakes if self._http is None else self._tls.reads)
                return

    # -- the handshake

    def _shake_hands(self, num_bytes: int) -> None:
        """Go on with the handshake, by a record of this size."""
        self._num_handshake_bytes += num_bytes
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._num_handshake_bytes > _MAX_HANDSHAKE_BYTES:
                self._give_up("refused")
            return
        except ssl.SSLError as exc:
            logger.debug("the TLS handshake of %s failed: %s", self.get_extra_info("peername"), exc)
            self._flush()  # TLS tells the client why
            self._fail("refused")
            self._linger()
            return
        self._flush()
        self._forget()
        self._http = self._make_http()
        self._http.connection_made(self)

    def _refuse_plain_http(self) -> None:
        refusal = PlainHttp("This port speaks HTTPS: write https:// in the URL.")
        self.transport.write(refusal.response(self._state.default_headers, new_request_id().shown))
        self._fail("plain_http")
        self._linger()

    def _fail(self, reason: HandshakeFailure) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._tls.count_failure(reason)

    def _give_up(self, reason: HandshakeFailure) -> None:
        self._fail(reason)
        self.transport.abort()

    def _linger(self) -> None:
        """Drop input until the client hangs up: to close with data unread would reset the connection."""
        self._has_ended = True
        self._records.clear()
        self._shared.leave(self)
        self._deadline_s = self._shared.now_s + _LINGER_S
        if not self.transport.is_closing():
            self.transport.write_eof()

    def _forget(self) -> None:
        self._state.connections.discard(cast(HttpProtocol, self))
        self._shared.remove(self)

    # -- the transport of `HttpProtocol`

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send this."""
        if self._has_ended or not data:
            return
        try:
            num_written = self._session.write(data)
            self._flush()
            while num_written < len(data):  # a record of TLS holds 16 KB
                num_written += self._session.write(memoryview(data)[num_written:])
                self._flush()
        except ssl.SSLError as exc:
            self._break(exc)

    def can_write_eof(self) -> bool:
        """Always true: the client may still send, although nobody reads it."""
        return True

    def write_eof(self) -> None:
        """Tell the client that nothing more follows, and drop what it still sends."""
        self._end_tls()
        if not self.transport.is_closing():
            self.transport.write_eof()

    def close(self) -> None:
        """Send what was written, and close the connection."""
        self._end_tls()
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._has_ended = True
        self.transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection closes."""
        return self.transport.is_closing()

    def pause_reading(self) -> None:
        """Read no more."""
        self._is_reading_paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._is_reading_paused = False
        if not self._waits_for_slice:
            self.transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that the client has not taken."""
        return self.transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The socket's, and for TLS "sslcontext" and "ssl_object"."""
        if name == "sslcontext":
            return self._session.context
        return self._session if name == "ssl_object" else self.transport.get_extra_info(name, default)

    # -- content

    def _read(self) -> None:
        """Hand on the content of a record, and send what TLS itself answers."""
        parts: list[bytes] = []
        is_open = True
        try:
            while self._incoming.pending or self._session.pending():
                part = self._session.read(_READ_BYTES)
                if not part:  # the client has closed its side
                    is_open = False
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass  # no content: the record was for TLS itself
        except ssl.SSLError as exc:
            self._break(exc)
            return
        self._num_empty_records = max(0, self._num_empty_records + (-1 if parts else 1))
        is_flooded = self._num_empty_records > _MAX_EMPTY_RECORDS
        if self._outgoing.pending:
            self._flush()
            is_flooded |= self.get_write_buffer_size() > _MAX_UNREAD_BYTES
        if is_flooded:
            logger.debug("%s sends what TLS itself has to answer, again and again", self.get_extra_info("peername"))
            self.abort()
            return
        assert self._http is not None, "the handshake is complete"
        if parts:
            self._http.data_received(b"".join(parts))
        if not is_open and not self._has_ended:
            self.close()

    def _flush(self) -> None:
        if not self.transport.is_closing():
            self._write_socket(self._outgoing.read())

    def _break(self, exc: ssl.SSLError) -> None:
        """A record cannot be read or written: the connection cannot go on."""
        logger.debug("TLS with %s broke: %s", self.get_extra_info("peername"), exc)
        self._flush()
        self.abort()

    def _end_tls(self) -> None:
        """Send the end of TLS, once."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(ssl.SSLError):  # it wants to read the client's closing message, which nobody needs
            self._session.unwrap()
        self._flush()
