"""ASGI layers around the routes: the limit on a body's size, request counts, and the last resort for our faults."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics import EdgeMetrics
from router.openai.errors import BodyTooLarge, internal_error_response, serving_error_response

__all__ = ["BodyLimit", "RequestObserver"]

logger = logging.getLogger(__name__)


class BodyLimit:
    """Refuses a body over `max_bytes` before it is read: by its declared length, else by counting."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless its body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await serving_error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0
        is_started = False

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        async def noting_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, counting_receive, noting_send)
        except BodyTooLarge as exc:
            if is_started:
                raise
            await serving_error_response(exc)(scope, receive, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._max_bytes} bytes.")


class RequestObserver:
    """Counts requests by route and status, and answers an unexpected exception with a 500 in JSON."""

    def __init__(self, app: ASGIApp, metrics: EdgeMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and see how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            logger.exception("Request to %s failed", scope["path"])
            if status:
                raise  # too late for an answer: the server closes the connection
            await internal_error_response()(scope, receive, noting_send)
        finally:
            # The route's template, not the path, so that clients cannot add label values.
            endpoint = getattr(scope.get("route") or scope.get("endpoint"), "path", "unmatched")
            self._metrics.requests.labels(endpoint, str(status or 499)).inc()
