"""What every app of a router is wrapped in: limits, counting, CORS, and errors in the shape OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.config import RouterConfig
from protocol.errors import ServingError
from router.api_keys import load_api_keys
from router.metrics import EdgeMetrics
from router.openai.errors import ClientDisconnected, http_exception_response, serving_error_response
from router.openai.keys import KeyCheck
from router.openai.middleware import BodyLimit, RequestObserver

__all__ = ["add_layers", "add_raw_route", "json_response"]


def add_raw_route(app: FastAPI, path: str, answer: ASGIApp) -> None:
    """Have POSTs to this path answered without FastAPI's dependencies or a response object in between."""
    app.router.routes.append(Route(path, _RawRoute(path, answer), methods=["POST"]))


@dataclass(frozen=True, slots=True)
class _RawRoute:
    """Not a function, which Starlette would call with a request; its path is for the counters."""

    path: str
    answer: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(scope, receive, send)


def add_layers(
    app: FastAPI, config: RouterConfig, metrics: EdgeMetrics, api_keys: Mapping[bytes, str] | None = None
) -> None:
    """Add middleware and error handlers. `api_keys` are tenants by digest; without, the config's file is read.

    Raises `ConfigError` for a file that cannot be used.
    """
    # The last one added is the outermost: refusals get CORS headers and are counted too.
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if keys := load_api_keys(config.api_key_file) if api_keys is None else api_keys:
        app.add_middleware(KeyCheck, tenants=keys)
    app.add_middleware(RequestObserver, metrics=metrics)
    app.add_middleware(
        CORSMiddleware, allow_origins=config.cors_allow_origins, allow_methods=["*"], allow_headers=["*"]
    )
    app.add_exception_handler(HTTPException, http_exception_response)
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(ClientDisconnected, _client_gone)


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """The body as JSON."""
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _serving_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, ServingError), exc
    return serving_error_response(exc)


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; it is for the counters
