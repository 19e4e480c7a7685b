"""The FastAPI app of `tandem serve`: routes, layers and life cycle around one backend and one tokenizer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.dashboard.routes import add_dashboard
from tandem.frontend.http.app import RouterApp, json_response
from tandem.frontend.http.authentication import check_operator
from tandem.frontend.http.exposition import Scraper, registry_text
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.shared_routes import (
    add_decision_routes,
    add_model_routes,
    add_operation_routes,
    add_worker_routes,
    product_version,
)
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.messages.routes import add_messages_routes
from tandem.frontend.openai.answer_formats import choose_formats
from tandem.frontend.openai.answer_shapes import PoolCheck
from tandem.frontend.openai.cache import list_pins, pin_prefix, prefetch_pin, unpin_prefix
from tandem.frontend.openai.chat import create_chat_completion, plan_chat
from tandem.frontend.openai.completions import create_completion, plan_completion
from tandem.frontend.openai.serving_context import ServingContext, model_capabilities, read_body
from tandem.frontend.openai.tokenization import detokenize, tokenize
from tandem.frontend.response_store import LocalResponses, ResponseStore
from tandem.frontend.responses.routes import add_responses_routes
from tandem.frontend.serve_operations import SERVE_DESCRIPTION, SERVE_OPERATIONS
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import NotServed
from tandem.router.backend import Backend
from tandem.router.readiness import ReadinessCheck, ReadinessProbe
from tandem.scheduling.admission.tenants import CacheScopes, Tenants
from tandem.text.structured_output.checker import GrammarChecker
from tandem.text.tokenizer import Tokenizer, TokenizerPool

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    config: RouterConfig,
    registry: CollectorRegistry,
    *,
    readiness: ReadinessCheck | None = None,
    scrape: Scraper | None = None,
    traffic: Callable[[], Iterable[Metric]] | None = None,
    responses: ResponseStore | None = None,
    started_at_s: int | None = None,
    api_keys: ApiKeys,
    tenants: Tenants = Tenants(),
    tracing: Tracing | None = None,
) -> RouterApp:
    """The app. At its end it stops its own threads; the caller closes the backend.

    Without `readiness` it probes the backend itself, without `scrape` it exposes the metrics of `registry`, without
    `traffic` the dashboard shows the requests of this app alone, and without `responses` it keeps them in this process.
    `started_at_s` (Unix time) is shown as the models' creation time. `tenants` say who shares cached prefixes.
    """
    context = ServingContext(
        backend,
        tokenizer,
        TokenizerPool(),
        FrontendMetrics(registry),
        CacheScopes(tenants, has_keys=api_keys.is_required),
        choose_formats(config, tokenizer),
        GrammarChecker(tokenizer.to_json),
        responses or LocalResponses(),
    )
    prober = ReadinessProbe(backend, tokenizer.start_id or 0) if readiness is None else None
    ready = readiness or prober
    assert ready is not None

    app = RouterApp(
        config,
        context.metrics,
        api_keys,
        operations=SERVE_OPERATIONS,
        description=SERVE_DESCRIPTION,
        tracing=tracing,
        version=product_version(),
        running=partial(_running, context, prober),
    )
    app.state.readiness = ready
    _add_api_routes(app, context, started_at_s or int(time.time()))
    add_dashboard(app, overview=backend.overview, traffic=traffic or context.metrics.traffic, api_keys=api_keys)
    scrape = scrape or (lambda: registry_text(registry, config, [backend.model]))
    add_operation_routes(app, not_ready=lambda: ready.reason, scrape=scrape, pools=backend.pools)
    return app


@asynccontextmanager
async def _running(context: ServingContext, prober: ReadinessProbe | None) -> AsyncIterator[None]:
    try:
        async with prober or nullcontext():
            yield
    finally:
        context.pool.close()
        await context.grammars.close()


def _add_api_routes(app: RouterApp, context: ServingContext, created_s: int) -> None:
    _add_generation_routes(app, context)
    add_responses_routes(app, context)
    add_messages_routes(app, context)
    _add_tokenizer_routes(app, context)
    _add_embeddings_route(app, context.backend)
    _add_cache_routes(app, context)
    _add_pool_check(app, context.backend)
    add_worker_routes(app, context.backend)
    add_decision_routes(app, explain=partial(_explain, context), decisions=context.backend.decisions)
    add_model_routes(
        app,
        names=lambda: [context.backend.model],
        max_model_len=lambda _: context.backend.max_model_len,
        capabilities=lambda _: model_capabilities(context),
        created_s=created_s,
    )


def _add_generation_routes(app: RouterApp, context: ServingContext) -> None:
    summary = "at once or as a stream of server-sent events."
    chat, completions = partial(create_chat_completion, context), partial(create_completion, context)
    app.add_answers("/v1/chat/completions", f"Answer a conversation, {summary}", chat)
    app.add_answers("/v1/completions", f"Continue one or many prompts, {summary}", completions)


class _Kind(msgspec.Struct):
    """The field by which a chat body differs from a completion body."""

    messages: msgspec.Raw = msgspec.Raw(b"null")


async def _explain(context: ServingContext, request: Request) -> list[dict[str, Any]]:
    """The decision that would be made now for each prompt. Nothing is sent or booked. Raises a `ServingError`."""
    _, kind = await read_body(request, _Kind)
    plan = plan_completion if bytes(kind.messages) == b"null" else plan_chat
    answer = await plan(context, request, time.perf_counter())
    requests = [choice.request for choice in answer.choices if choice.is_first_sibling]
    return [await context.backend.explain(one) for one in requests]


def _add_tokenizer_routes(app: FastAPI, context: ServingContext) -> None:
    @app.post("/tokenize")
    async def tokenize_prompt(request: Request) -> Response:
        """Token ids of a prompt or of messages, as in a request with them."""
        return json_response(await tokenize(context, request))

    @app.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        return json_response(await detokenize(context, request))


def _add_embeddings_route(app: FastAPI, backend: Backend) -> None:
    @app.post("/v1/embeddings")
    async def embed() -> Response:
        """Refused with 501: the models that are served here generate text."""
        raise NotServed(
            f"The model '{backend.model}' generates text and makes no embeddings. `tandem route` forwards this route "
            "to engines that do."
        )


def _add_cache_routes(app: FastAPI, context: ServingContext) -> None:
    @app.post("/v1/cache/pin")
    async def pin(request: Request) -> Response:
        """Keep a prefix or a conversation in the KV cache for a while. Returns the pin, and where its blocks are."""
        return json_response(await pin_prefix(context, request))

    @app.post("/v1/cache/unpin")
    async def unpin(request: Request) -> Response:
        """End a pin."""
        return json_response(await unpin_prefix(context, request))

    @app.post("/v1/cache/prefetch")
    async def prefetch(request: Request) -> Response:
        """Bring the blocks of a pin up into host memory or the pool. Returns the pin as it is before that."""
        return json_response(await prefetch_pin(context, request))

    @app.get("/v1/cache/pins")
    async def pins(request: Request) -> Response:
        """The live pins that this key may see. Query parameter `cache_salt`: only those with this salt."""
        return json_response(await list_pins(context, request))


def _add_pool_check(app: FastAPI, backend: Backend) -> None:
    @app.post("/v1/pools/check")
    async def check_pools(request: Request) -> Response:
        """Check every worker's block pool, and name what it still holds. Needs an operator's key."""
        check_operator(request)
        workers = await backend.manager.check_integrity()
        return json_response(PoolCheck(idle=not any(workers.values()), workers=workers))
