"""ASGI middleware around all routes: access checks, request counts, the body size limit, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from tandem.frontend.http.authentication import OPEN_PATHS, Authenticator
from tandem.frontend.http.content_encoding import inflating
from tandem.frontend.http.errors import (
    BodyTooLarge,
    ClientDisconnected,
    error_response,
    internal_error_response,
    serving_error_body,
    serving_error_response,
)
from tandem.frontend.http.ignored_fields import IGNORED_HEADER, begin_ignored, ignored_headers
from tandem.frontend.http.json_body import LARGE_BODY_BYTES
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.origin_checks import check_host_and_origin, page_refused
from tandem.frontend.http.request_id import REQUEST_ID_HEADER, note_request_id
from tandem.frontend.http.request_options import note_may_route, note_span
from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.keys.limiter import KeyUse
from tandem.protocol.errors import RateLimitExceeded, ServingError
from tandem.runtime.time_slicer import TimeSlicer

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import LiveSpan, Tracing

logger = logging.getLogger(__name__)

_FIRST = itemgetter(0)
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_PREFLIGHT = b"access-control-request-method"
_VARY = (b"vary", b"Origin")
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class MiddlewareSettings:
    """The rules for every request of an app."""

    metrics: FrontendMetrics
    authenticator: Authenticator
    max_body_bytes: int
    allow_origins: Collection[str]
    allow_hosts: Collection[str] | None = None  # None = any
    tracing: Tracing | None = None
    may_route: bool = False  # whether clients may name a routing strategy
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # set when the server is going to end
    # To decode one of millions of bytes takes 0.1 s: others' streams go on between two of them.
    large_bodies: TimeSlicer = field(default_factory=lambda: TimeSlicer(budget_s=0.0, rests=True))


class _Cors(CORSMiddleware):
    """CORS whose refusals say how to allow a page."""

    @override
    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        body = serving_error_body(page_refused(request_headers["origin"]))
        return error_response(response.status_code, body, {"vary": "Origin"})


class EdgeMiddleware:
    """Enforces the rules and turns exceptions into error responses. Refused requests are counted and get CORS headers.

    It is one layer because each layer costs a call for every chunk of a stream.
    """

    def __init__(self, app: ASGIApp, settings: MiddlewareSettings, path: str = "") -> None:
        """Requests are counted under `path`; "" = the path of the route that the app finds."""
        self._app = app
        self._settings = settings
        self._path = path
        self._cors = _Cors(
            self._serve,
            allow_origins=settings.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif b"origin" in map(_FIRST, scope["headers"]):
            is_preflight = scope["method"] == "OPTIONS" and _PREFLIGHT in map(_FIRST, scope["headers"])
            await self._cors(scope, receive, _with_request_id(scope, send) if is_preflight else send)
        else:  # not from a web page: CORS would only add this header
            await self._serve(scope, receive, send, _VARY)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *headers: tuple[bytes, bytes]) -> None:
        status = 0
        key: ApiKey | None = None
        use: KeyUse | None = None
        num_computed_tokens = 0  # of a prompt whose request ends with an error
        request_id = note_request_id(scope).shown
        headers = ((_REQUEST_ID, request_id.encode()), *headers)
        ignored = begin_ignored()
        if self._settings.may_route:
            note_may_route(scope)
        span: LiveSpan | None = None
        if self._settings.tracing is not None and scope["path"] not in OPEN_PATHS:
            span = self._settings.tracing.begin_request(scope, request_id)
            note_span(scope, span)
            headers = (*headers, (b"traceresponse", span.traceparent.encode()))

        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers, *ignored_headers(ignored)]
                if self._settings.leaving.is_set():
                    message["headers"].append(_CLOSE)
            return send(message)

        try:
            received_headers = dict(scope["headers"])
            declared_bytes = _declared_bytes(received_headers)
            key = self._check(scope, received_headers, declared_bytes or 0)
            use = None if key is None else await self._settings.authenticator.begin_use(scope, key)
            if not _has_small_body(received_headers, declared_bytes):
                inflated = inflating(self._limited(receive), scope, self._settings.max_body_bytes)
                receive = self._in_turn(inflated, "" if key is None else key.tenant)
            await self._app(scope, receive, send_and_note)
        except Exception as exc:  # whatever the app raises gets an error response
            response = _response_to(exc, scope["path"])
            if span is not None:
                span.fail(exc)
            if isinstance(exc, ServingError):
                num_computed_tokens = exc.num_computed_tokens
            if key is not None and isinstance(exc, RateLimitExceeded):
                self._settings.authenticator.note_refusal(key.id, "rate_limit")
            if status or response is None:
                logger.exception("request %s to %r failed", request_id, scope["path"])  # a path may have line ends
            if status:
                raise  # the response has started: the server closes the connection
            await (response or internal_error_response(scope["path"]))(scope, receive, send_and_note)
        finally:
            if use is not None:
                is_refused = status >= 400 and status != 499  # a client that leaves has had its prompt computed
                use.end(is_refused=is_refused, num_computed_tokens=num_computed_tokens)
            # The route's template instead of the path, so that clients cannot add label values.
            path = self._path or getattr(scope.get("route") or scope.get("endpoint"), "path", "unmatched")
            self._settings.metrics.requests.labels(path, str(status or 499)).inc()
            if span is not None:
                span.answered(path, status or 499)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes], declared_bytes: int) -> ApiKey | None:
        """The request's API key. Raises a `RequestError` for a request that can be refused before its body is read."""
        check_host_and_origin(
            headers, scope["method"], scope["path"], self._settings.allow_hosts, self._settings.allow_origins
        )
        key = self._settings.authenticator.authenticate(scope)
        if declared_bytes > self._settings.max_body_bytes:
            raise self._too_large()
        return key

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that raises `BodyTooLarge`: a body of undeclared length may turn out too large."""
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._settings.max_body_bytes:
                raise self._too_large()
            return message

        return counting_receive

    def _in_turn(self, receive: Receive, tenant: str) -> Receive:
        """`receive` that hands out the end of a large body in the tenant's turn. Its receiver decodes it at once."""
        num_bytes = 0

        async def receive_in_turn() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > LARGE_BODY_BYTES and message["type"] == "http.request" and not message.get("more_body"):
                turn = asyncio.Event()
                self._settings.large_bodies.add(lambda _: turn.set(), tenant)
                await turn.wait()
            return message

        return receive_in_turn

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._settings.max_body_bytes} bytes.")


def _with_request_id(scope: Scope, send: Send) -> Send:
    """`send` that adds the id: CORS answers a preflight itself."""
    header = (_REQUEST_ID, note_request_id(scope).shown.encode())

    def send_with_id(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        return send(message)

    return send_with_id


def _declared_bytes(headers: Mapping[bytes, bytes]) -> int | None:
    """The length of the body that the head declares, at which the server ends it."""
    declared = headers.get(b"content-length", b"")
    return int(declared) if declared.isdigit() else None


def _has_small_body(headers: Mapping[bytes, bytes], declared_bytes: int | None) -> bool:
    """Whether the body can be read as it arrives: it is not encoded, and too small to need a limit or a turn."""
    is_plain = b"content-encoding" not in headers and b"transfer-encoding" not in headers
    return is_plain and declared_bytes is not None and declared_bytes <= LARGE_BODY_BYTES


def _response_to(exc: Exception, path: str) -> Response | None:
    """Response to a request of this path for an expected exception; None for a bug of ours."""
    if isinstance(exc, ServingError):
        return serving_error_response(exc, path)
    if isinstance(exc, (ClientDisconnect, ClientDisconnected)):
        return Response(status_code=499)  # nobody reads it; the status is for the counters
    return None
