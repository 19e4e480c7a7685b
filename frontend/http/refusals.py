"""Requests that the HTTP protocol itself answers, with an error, before the app sees them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.frontend.http.errors import error_body
from tandem.frontend.http.request_id import REQUEST_ID_HEADER


class Refusal(Exception):
    """Base of these errors. The connection ends after the response."""

    status: int
    code: str | None

    def response(self, default_headers: Iterable[tuple[bytes, bytes]], request_id: str) -> bytes:
        """The whole response, with an error body as OpenAI clients expect it."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        body = msgspec.json.encode(error_body(str(self), error_type, code=self.code))
        head = [STATUS_LINE[self.status], *(b"%b: %b\r\n" % header for header in default_headers)]
        head.append(b"%b: %b\r\n" % (REQUEST_ID_HEADER.encode(), request_id.encode()))
        if self.status == 503:
            head.append(b"retry-after: 1\r\n")
        head.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        return b"".join(head) + body


class InvalidHttp(Refusal):
    """The bytes are not valid HTTP, or the request does not have exactly one Host header."""

    status, code = 400, None


class PlainHttp(Refusal):
    """A request without TLS came to a port that speaks TLS."""

    status, code = 400, "plain_http"


class RequestTimeout(Refusal):
    """The request did not arrive in time."""

    status, code = 408, "request_timeout"


class UrlTooLong(Refusal):
    """The URL is longer than 8,192 bytes."""

    status, code = 414, "url_too_long"


class HeaderTooLarge(Refusal):
    """The header has more than 32,768 bytes with its URL, or more than 128 lines."""

    status, code = 431, "header_too_large"


class TooManyConnections(Refusal):
    """All `--max-connections` are in use."""

    status, code = 503, "too_many_connections"


class TooManyBodies(Refusal):
    """More bodies arrive at once than memory is set aside for."""

    status, code = 503, "too_many_bodies"
