"""TLS between a client's socket and `HttpProtocol`, over OpenSSL in memory.

    socket <-> TlsConnection <-> HttpProtocol      the middle one: a protocol to its left, a transport to its right

`HttpProtocol` exists from the first moment, so that a handshake has a deadline and a place in the limits. The only
write buffer is the socket's, so that flow control is as without TLS. The event loops' own TLS has neither.

A client can send little that costs much: handshakes, and records of a byte or of none. So each iteration of the event
loop has a bounded time for them, and streams go on in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import Any, cast

from tandem.frontend.http.connections import Connections, has_left
from tandem.frontend.http.protocol import HttpProtocol
from tandem.frontend.http.refusals import PlainHttp
from tandem.frontend.http.tls import HandshakeFailure, ServerTls
from tandem.protocol.fault_boundary import undone_on_error
from tandem.runtime.time_slicer import TimeSlicer

logger = logging.getLogger(__name__)

_RECORD_BYTES = 16 * 1024  # the most content of a record
_MAX_HANDSHAKE_BYTES = 64 * 1024  # a client's chain of certificates takes some KB
_MAX_EMPTY_BYTES = 20 * 1024  # without any content: a record takes 18 KB, and few updates of keys are ever due


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """One client: the protocol of its socket, and the transport of its `HttpProtocol`."""

    def __init__(self, shared: Connections, tls: ServerTls, http: HttpProtocol) -> None:
        super().__init__()
        self._shared = shared
        self._tls = tls
        self._http = http
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = tls.loaded.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._deadline_s = shared.now_s + shared.header_timeout_s  # of the handshake; `HttpProtocol` sees to it
        self._is_in_handshake = True
        self._num_empty_bytes = 0  # received since there was content
        self._waits_for_slice = False
        self._is_reading_paused = False  # whether `HttpProtocol` has paused it
        self._has_ended = False  # TLS is over: nothing more is encrypted, and input is dropped

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._http.connection_made(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go."""
        return self._tls.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Encrypted bytes arrived."""
        if self._has_ended:
            return
        data = self._tls.buffer[:nbytes]
        if self._is_in_handshake and not self._num_empty_bytes and data[:1].isupper():  # a method: TLS begins with 22
            self._refuse_plain_http()
            return
        self._num_empty_bytes += nbytes
        self._incoming.write(data)
        if self._is_in_handshake:
            self._wait_for_slice(self._tls.handshakes)
        elif self._shared.has_time():
            self._read()
        else:
            self._wait_for_slice(self._shared.reads)

    def eof_received(self) -> None:
        """The client has closed its side without TLS's closing message: close the socket, as without TLS."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._fail("client_left")
        self._has_ended = True
        self._http.connection_lost(exc)
        # OpenSSL's memory is tens of KB, and a full garbage collection may be far away.
        del self._http, self._session, self._incoming, self._outgoing

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """The socket's buffer has room again."""
        self._http.resume_writing()

    # -- what has arrived

    def _wait_for_slice(self, slicer: TimeSlicer) -> None:
        self._waits_for_slice = True
        self.transport.pause_reading()
        slicer.add(self._use_slice, self._http.network)

    def _use_slice(self, _: float) -> None:
        self._waits_for_slice = False
        if self._has_ended or self.is_closing():
            return
        if self._is_in_handshake and has_left(self.transport):  # unnoticed, because reading was paused
            self._fail("client_left")
            self.abort()
            return
        with undone_on_error(self.abort):
            self._shake_hands() if self._is_in_handshake else self._read()
        if not (self._is_reading_paused or self.is_closing()):
            self.transport.resume_reading()

    def _shake_hands(self) -> None:
        """Go on with the handshake."""
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            if self._outgoing.pending:  # an answer to a whole message of the client
                self._http.note_progress()
            self._flush()
            if self._num_empty_bytes > _MAX_HANDSHAKE_BYTES:
                self._fail("refused")
                self.abort()
        except ssl.SSLError as exc:
            logger.debug("the TLS handshake of %s failed: %s", self.get_extra_info("peername"), exc)
            self._fail("refused")
            self._flush()  # TLS tells the client why
            self._has_ended = True
            self._http.linger()
        else:
            self._flush()
            self._is_in_handshake = False
            self._num_empty_bytes = 0
            self._http.expect_request()
            self._read()

    def _refuse_plain_http(self) -> None:
        """Leave the connection to HTTP, without TLS in between, for the client to read why."""
        self._fail("plain_http")
        self._http.transport = self.transport
        self.transport.set_protocol(self._http)
        self._http.refuse(PlainHttp("This port speaks HTTPS: write https:// in the URL."))
        del self._http

    def _fail(self, reason: HandshakeFailure) -> None:
        """Count a connection that ends before its handshake does."""
        if self._is_in_handshake:
            self._is_in_handshake = False
            self._tls.count_failure(reason)

    def _read(self) -> None:
        """Hand on the content that has arrived, and send what TLS itself answers."""
        content, is_open = bytearray(), True
        try:
            while is_open and (self._incoming.pending or self._session.pending()):
                part = self._session.read(_RECORD_BYTES)
                content += part
                is_open = bool(part)  # else the client has closed its side of TLS
        except ssl.SSLWantReadError:
            pass  # a part of a record, or a record for TLS itself
        except ssl.SSLError as exc:
            self._break(exc)
            return
        self._flush()
        if content:
            self._num_empty_bytes = 0
            self._http.data_received(bytes(content))
        elif self._num_empty_bytes > _MAX_EMPTY_BYTES:
            self._break("too many records without content")
        if not is_open and not self._has_ended:
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending and not self.is_closing():
            self.transport.write(self._outgoing.read())

    def _break(self, reason: object) -> None:
        """The connection cannot go on."""
        logger.debug("the TLS connection with %s ends: %s", self.get_extra_info("peername"), reason)
        self._flush()
        self.abort()

    def _end_tls(self) -> None:
        """Send the end of TLS, once."""
        if not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(ssl.SSLError):  # it wants to read the client's closing message: nobody needs it
                self._session.unwrap()
            self._flush()

    # -- the transport of `HttpProtocol`

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send this."""
        if self._has_ended or not data:
            return
        try:
            num_written = self._session.write(data)
            self._flush()
            while num_written < len(data):  # longer than a record
                num_written += self._session.write(memoryview(data)[num_written:])
                self._flush()
        except ssl.SSLError as exc:
            self._break(exc)

    def write_eof(self) -> None:
        """Tell the client that nothing more follows, and drop what it still sends."""
        self._end_tls()
        self.transport.write_eof()

    def close(self) -> None:
        """Send what was written, and close the connection; before the end of the handshake at once."""
        if self._is_in_handshake:
            self.abort()
        self._end_tls()
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._fail("timeout" if self._shared.now_s > self._deadline_s else "shed")
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
        """The socket's, and "sslcontext"."""
        return self._tls.loaded.context if name == "sslcontext" else self.transport.get_extra_info(name, default)
