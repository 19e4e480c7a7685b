"""The FastAPI app: routes, layers and life cycle around one backend and one tokenizer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.config import RouterConfig
from tandem.router.backend import Backend
from tandem.router.http.app import RouterApp, json_response
from tandem.router.http.authentication import check_operator
from tandem.router.http.errors import error_body, error_response
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.openai.cache import list_pins, pin_prefix, prefetch_pin, unpin_prefix
from tandem.router.openai.chat import create_chat_completion
from tandem.router.openai.completions import create_completion
from tandem.router.openai.models import detokenize, model_card, model_list, tokenize
from tandem.router.openai.readiness import Readiness, Ready
from tandem.router.openai.route_decisions import explain_route, list_decisions
from tandem.router.openai.schema import DetokenizeRequest
from tandem.router.openai.serving_context import ServingContext, read_body
from tandem.router.openai.visibility import metrics_response, visible_pools
from tandem.router.text.tokenizer import Tokenizer, TokenizerPool
from tandem.scheduling.tenants import CacheScopes, Tenants

__all__ = ["create_app"]


Scrape = Callable[[], Awaitable[bytes]]


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    config: RouterConfig,
    registry: CollectorRegistry,
    *,
    readiness: Ready | None = None,
    scrape: Scrape | None = None,
    started_at_s: int | None = None,
    api_keys: Mapping[bytes, str],
    tenants: Tenants = Tenants(),
) -> RouterApp:
    """The app. It frees its threads at its end, not the backend.

    Where nobody else knows whether the backend is ready, or what the metrics are, it probes the one from its start on,
    and shows those of `registry`. `started_at_s` (Unix time) is what models were created at. `api_keys` are as
    `load_api_keys` gives them; `tenants` say who shares cached prefixes.
    """
    metrics = EdgeMetrics(registry)
    context = ServingContext(
        backend,
        tokenizer,
        TokenizerPool(config.tokenizer_threads),
        metrics,
        started_at_s or int(time.time()),
        CacheScopes(tenants, has_keys=bool(api_keys)),
    )
    prober = Readiness(backend, tokenizer.start_id or 0) if readiness is None else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            async with prober or nullcontext():
                yield
        finally:
            context.pool.close()

    async def scrape_registry() -> bytes:
        return bytes(generate_latest(registry))

    app = RouterApp(config, metrics, api_keys, version=_version(), lifespan=lifespan)
    _add_generation_routes(app, context)
    _add_catalog_routes(app, context)
    _add_cache_routes(app, context)
    _add_route_routes(app, context)
    app.state.readiness = readiness or prober
    _add_operation_routes(app, backend, app.state.readiness, scrape or scrape_registry)
    return app


def _add_generation_routes(app: RouterApp, context: ServingContext) -> None:
    async def chat_completions(scope: Scope, receive: Receive, send: Send) -> None:
        response = await create_chat_completion(context, Request(scope, receive))
        await response(scope, receive, send)

    async def completions(scope: Scope, receive: Receive, send: Send) -> None:
        response = await create_completion(context, Request(scope, receive))
        await response(scope, receive, send)

    app.add_raw_route("/v1/chat/completions", chat_completions)
    app.add_raw_route("/v1/completions", completions)


def _add_catalog_routes(app: FastAPI, context: ServingContext) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(model_list(context))

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        return json_response(model_card(context, model_id))

    @app.post("/tokenize")
    async def tokenize_prompt(request: Request) -> Response:
        return json_response(await tokenize(context, request))

    @app.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        _, fields = await read_body(request, DetokenizeRequest)
        return json_response(await detokenize(context, fields))


def _add_cache_routes(app: FastAPI, context: ServingContext) -> None:
    @app.post("/v1/cache/pin")
    async def pin(request: Request) -> Response:
        return json_response(await pin_prefix(context, request))

    @app.post("/v1/cache/unpin")
    async def unpin(request: Request) -> Response:
        return json_response(await unpin_prefix(context, request))

    @app.post("/v1/cache/prefetch")
    async def prefetch(request: Request) -> Response:
        return json_response(await prefetch_pin(context, request))

    @app.get("/v1/cache/pins")
    async def pins(request: Request) -> Response:
        return json_response(await list_pins(context, request))


def _add_route_routes(app: FastAPI, context: ServingContext) -> None:
    @app.post("/v1/route/explain")
    async def explain(request: Request) -> Response:
        return json_response(await explain_route(context, request))

    @app.get("/v1/route/decisions")
    async def decisions(request: Request) -> Response:
        return json_response(await list_decisions(context, request))


def _add_operation_routes(app: FastAPI, backend: Backend, readiness: Ready, scrape: Scrape) -> None:
    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        reason = readiness.reason
        if reason is not None:
            return error_response(503, error_body(reason, "server_error", code="not_ready"))
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def scrape_metrics(request: Request) -> Response:
        return metrics_response(await scrape(), request)

    @app.get("/v1/pools")
    async def show_pools(request: Request) -> Response:
        return json_response(visible_pools(await backend.pools(), request))

    @app.post("/v1/pools/check")
    async def check_pools(request: Request) -> Response:
        check_operator(request)
        workers = await backend.check()
        return json_response({"idle": not any(workers.values()), "workers": workers})

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": _version()})


def _version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
