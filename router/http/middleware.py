"""The ASGI layer around the routes: who may call, request counts, the limit on a body's size, and errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.protocol.errors import ServingError
from tandem.router.http.authentication import authenticate
from tandem.router.http.errors import BodyTooLarge, ClientDisconnected, internal_error_response, serving_error_response
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.origin_checks import check_host_and_origin

__all__ = ["EdgeMiddleware", "MiddlewareSettings"]

logger = logging.getLogger(__name__)

_FIRST = itemgetter(0)
_VARY = (b"vary", b"Origin")


@dataclass(frozen=True, slots=True)
class MiddlewareSettings:
    """What holds for every request of an app."""

    metrics: EdgeMetrics
    tenants: Mapping[bytes, str]  # by the digests of their API keys; empty = no key is asked for
    max_body_bytes: int
    allow_origins: Collection[str]
    allow_hosts: Collection[str] | None = None  # None = any


class EdgeMiddleware:
    """Lets an app, or one of its routes, have the requests that keep the rules, and answers for it where it raises.

    It is one layer, as each costs a call for every chunk of a stream. Refusals get CORS headers and are counted too.
    """

    def __init__(self, app: ASGIApp, rules: MiddlewareSettings, path: str = "") -> None:
        """`path` is what requests are counted under; "" = the path of the route that the app found."""
        self._app = app
        self._rules = rules
        self._path = path
        self._cors = CORSMiddleware(
            self._serve, allow_origins=rules.allow_origins, allow_methods=["*"], allow_headers=["*"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif b"origin" in map(_FIRST, scope["headers"]):
            await self._cors(scope, receive, send)
        else:  # not from a web page: all that CORS adds to its answer is this
            await self._serve(scope, receive, send, _VARY)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *headers: tuple[bytes, bytes]) -> None:
        status = 0

        def noting_send(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            return send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), noting_send)
        except Exception as exc:
            response = _response_to(exc)
            if status or response is None:
                logger.exception("Request to %s failed", scope["path"])
            if status:
                raise  # too late for an answer: the server closes the connection
            await (response or internal_error_response())(scope, receive, noting_send)
        finally:
            # The route's template, not the path, so that clients cannot add label values.
            path = self._path or getattr(scope.get("route") or scope.get("endpoint"), "path", "unmatched")
            self._rules.metrics.requests.labels(path, str(status or 499)).inc()

    def _check(self, scope: Scope) -> None:
        """Raise a `RequestError` for what can be refused before the body is read."""
        headers = dict(scope["headers"])
        check_host_and_origin(
            headers, scope["method"], scope["path"], self._rules.allow_hosts, self._rules.allow_origins
        )
        authenticate(scope, self._rules.tenants)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._rules.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, raising `BodyTooLarge` for a body that did not declare its length."""
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._rules.max_body_bytes:
                raise self._too_large()
            return message

        return counting_receive

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._rules.max_body_bytes} bytes.")


def _response_to(exc: Exception) -> Response | None:
    """What an exception is answered with; None for a fault of ours."""
    if isinstance(exc, ServingError):
        return serving_error_response(exc)
    if isinstance(exc, (ClientDisconnect, ClientDisconnected)):
        return Response(status_code=499)  # nobody reads it; it is for the counters
    return None
