"""The base of both apps: FastAPI inside one middleware, and raw routes that bypass FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.frontend.http.authentication import Authenticator
from tandem.frontend.http.errors import http_exception_response
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.middleware import EdgeMiddleware, MiddlewareSettings
from tandem.frontend.http.openapi import Operations, openapi_document
from tandem.frontend.http.origin_checks import hosts_allowed
from tandem.frontend.http.pages import add_page
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.audit_log import AuditLog
from tandem.protocol.config import RouterConfig
from tandem.runtime.background import BackgroundTasks

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing

_DOCS_PAGE = Path(__file__).parent / "static"
_IS_HEAD = "tandem.is_head"  # in the ASGI scope


class RouterApp(FastAPI):
    """FastAPI with our limits, counters, CORS and OpenAI-shaped errors, also for raw routes."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: FrontendMetrics,
        api_keys: ApiKeys,
        *,
        operations: Operations = MappingProxyType({}),
        description: str = "",
        tracing: Tracing | None = None,
        running: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        **options: Any,
    ) -> None:
        """`operations` and `description` are for the OpenAPI document; `options` are passed to FastAPI.

        `running` is entered when the app starts and left when it ends.
        """
        # FastAPI's own document lacks routes that are answered without it, and its pages load scripts from a CDN.
        super().__init__(title="Tandem", description=description, openapi_url=None, lifespan=self._lifespan, **options)
        self._operations = operations
        self._running = running
        self._has_keys = api_keys.is_required
        self._settings = MiddlewareSettings(
            metrics,
            Authenticator(api_keys, metrics),
            config.max_body_bytes,
            config.cors_allow_origins,
            hosts_allowed(config),
            tracing,
            config.allows_routing_header,
        )
        self.audit_log = AuditLog(config.audit_log, metrics.lost_audit_lines.inc)
        self._raw: dict[str, EdgeMiddleware] = {}
        self._on_drain: list[Callable[[], None]] = []
        self._along: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.add_middleware(EdgeMiddleware, settings=self._settings)
        self.add_exception_handler(HTTPException, self._answer_http_exception)
        self._add_documents()

    def add_raw_route(self, path: str, answer: ASGIApp) -> None:
        """Answer POSTs to this path by an ASGI app, without FastAPI's layers in between."""
        self._raw[path] = EdgeMiddleware(answer, self._settings, path)
        # FastAPI knows the path too: it refuses other methods, and redirects from paths with a slash at their end.
        self.router.routes.append(Route(path, _RawRoute(path, answer), methods=["POST"]))

    def add_answers(self, path: str, summary: str, create: Callable[[Request], Awaitable[Response]]) -> None:
        """`add_raw_route` by responses. `summary` is for the OpenAPI document."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await create(Request(scope, receive))
            await response(scope, receive, send)

        answer.__doc__ = summary
        self.add_raw_route(path, answer)

    @property
    def is_leaving(self) -> bool:
        """Whether the server is going to end."""
        return self._settings.leaving.is_set()

    def leave(self) -> None:
        """The server is going to end: it is no longer ready, and no connection is used again."""
        self._settings.leaving.set()

    def on_drain(self, end: Callable[[], None]) -> None:
        """Register `end`, which is called when the server begins to drain: it ends streams that would never end."""
        self._on_drain.append(end)

    def run_along(self, what: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register `run`, which goes on forever beside the app. `what` names it in logs."""
        self._along[what] = run

    def drain(self) -> None:
        """The server accepts no more connections, and waits for its running requests."""
        for end in self._on_drain:
            end()

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document. It is made when it is first asked for: that takes some 20 ms."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi_document(
                self.router.routes,
                self._operations,
                version=self.version,
                description=self.description,
                has_keys=self._has_keys,
            )
        return self.openapi_schema

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        background = BackgroundTasks()
        try:
            async with self._running():
                for what, run in self._along.items():
                    background.keep(what, run)
                yield
        finally:
            await background.close()
            await asyncio.to_thread(self.audit_log.close)

    def _answer_http_exception(self, request: Request, exc: Exception) -> Response:
        """Response for an unknown route or method. Starlette would allow only the methods of one route of the path."""
        assert isinstance(exc, HTTPException), exc
        if exc.status_code == 405:
            exc.headers = {"allow": ", ".join(self._methods_of(request.scope["path"]))}
        return http_exception_response(request, exc)

    def _methods_of(self, path: str) -> list[str]:
        """Of all routes with the path template of the first one that matches: one without parameters goes first."""
        routes = [route for route in self.router.routes if isinstance(route, Route) and route.path_regex.match(path)]
        same = [route for route in routes if route.path == routes[0].path]
        return sorted({method for route in same for method in route.methods or ()})

    def _add_documents(self) -> None:
        @self.get("/openapi.json", include_in_schema=False)
        async def show_openapi() -> Response:
            """The OpenAPI document of these routes."""
            return json_response(self.openapi())

        add_page(self, "/docs", _DOCS_PAGE, "The OpenAPI document as a page, which can send requests.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI app."""
        method = scope["method"] if scope["type"] == "http" else ""
        raw = self._raw.get(scope["path"]) if method == "POST" else None
        if method == "HEAD":  # answered like a GET; the server knows the method and leaves out the body
            scope = {**scope, "method": "GET", _IS_HEAD: True}
        await (super().__call__(scope, receive, send) if raw is None else raw(scope, receive, send))


@dataclass(frozen=True, slots=True)
class _RawRoute:
    """A raw route as Starlette sees it: not a function, which it would call with a request. `path` is for counters."""

    path: str
    answer: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send)


def is_head(scope: Scope) -> bool:
    """Whether only the head of the answer is wanted: a body that never ends would be dropped forever."""
    return bool(scope.get(_IS_HEAD))


def json_response(body: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
