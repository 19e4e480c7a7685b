"""The FastAPI app of a router in front of engines: OpenAI routes, admin routes and routes that show the fleet."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.dashboard.routes import add_dashboard
from tandem.frontend.http.app import RouterApp, json_response
from tandem.frontend.http.audit import ADMIN_TOKEN, audited
from tandem.frontend.http.exposition import Scraper
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.shared_routes import (
    add_decision_routes,
    add_model_routes,
    add_operation_routes,
    add_worker_routes,
    product_version,
)
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.relay.apis import APIS
from tandem.frontend.relay.attempts import AttemptLimits
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.relay.forwarder import Forwarder, read_object
from tandem.frontend.relay.prompts import PromptReader
from tandem.frontend.relay.stored_responses import StoredResponses
from tandem.frontend.route_operations import ROUTE_DESCRIPTION, ROUTE_OPERATIONS
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import ServingError
from tandem.router.engines.dispatcher import Dispatcher
from tandem.scheduling.admission.tenants import CacheScopes, Tenants
from tandem.text.tokenizer import TokenizerPool

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import Tracing


class AdminRefused(ServingError):
    """The admin routes are off, or the token is missing or wrong."""

    status = 401
    error_type = "invalid_request_error"
    code = "invalid_admin_token"


class AdminOff(AdminRefused):
    """No admin token is configured."""

    status = 403
    code = "admin_api_off"


def create_engines_app(
    dispatcher: Dispatcher,
    connections: EngineConnections,
    readers: Mapping[str, PromptReader],
    metrics_registry: CollectorRegistry,
    *,
    config: RouterConfig,
    engines_config: ExternalEnginesConfig,
    scrape: Scraper,
    traffic: Callable[[], Iterable[Metric]] | None = None,
    api_keys: ApiKeys,
    tenants: Tenants = Tenants(),
    admin_token: str = "",
    started_at_s: int | None = None,
    tracing: Tracing | None = None,
) -> RouterApp:
    """The app. Its counters go to `metrics_registry`; `scrape` gives the text of `/metrics`.

    Without `traffic` the dashboard shows the requests of this app alone.
    """
    metrics = FrontendMetrics(metrics_registry)
    pool = TokenizerPool()
    scopes = CacheScopes(tenants, has_keys=api_keys.is_required)
    limits = AttemptLimits(
        engines_config.max_attempts,
        config.request_timeout_s,
        max_moves=config.max_moves,
        probe_timeout_s=engines_config.probe_timeout_s,
    )
    forwarder = Forwarder(dispatcher, connections, scopes, readers, pool, metrics, limits)

    app = RouterApp(
        config,
        metrics,
        api_keys,
        operations=ROUTE_OPERATIONS,
        description=ROUTE_DESCRIPTION,
        tracing=tracing,
        version=product_version(),
        running=partial(_running, dispatcher, connections, pool),
    )
    _add_forwarded_routes(app, forwarder, StoredResponses(dispatcher, connections, config.request_timeout_s))
    add_decision_routes(app, explain=forwarder.explain, decisions=dispatcher.decisions)
    add_model_routes(
        app,
        names=lambda: dispatcher.models,
        adapters=lambda: dispatcher.adapters,
        max_model_len=dispatcher.max_model_len,
        capabilities=dispatcher.capabilities,
        created_s=int(time.time()) if started_at_s is None else started_at_s,
    )
    add_operation_routes(app, not_ready=lambda: dispatcher.unready, scrape=scrape, pools=dispatcher.pools)
    add_dashboard(app, overview=dispatcher.overview, traffic=traffic or metrics.traffic, api_keys=api_keys)
    add_worker_routes(app, dispatcher)
    _add_admin_routes(app, dispatcher, admin_token)
    return app


@asynccontextmanager
async def _running(dispatcher: Dispatcher, connections: EngineConnections, pool: TokenizerPool) -> AsyncIterator[None]:
    try:
        async with dispatcher.running():
            yield
    finally:
        connections.close()
        pool.close()


def _add_forwarded_routes(app: RouterApp, forwarder: Forwarder, stored: StoredResponses) -> None:
    for api in APIS:
        answer = partial(forwarder.answer, api)
        answer.__doc__ = api.summary  # for the reference of all routes
        app.add_raw_route(api.path, answer)

    @app.get("/v1/responses/{response_id}")
    async def read_response(response_id: str, request: Request) -> Response:
        """A response that its engine has stored; with `stream=true` the events of one that runs in the background."""
        return await stored.forward(request, response_id)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a stored response, if its engine can."""
        return await stored.forward(request, response_id)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(response_id: str, request: Request) -> Response:
        """The items that a stored response was made from."""
        return await stored.forward(request, response_id, "/input_items")

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a response that runs in the background."""
        return await stored.forward(request, response_id, "/cancel")


def _add_admin_routes(app: FastAPI, dispatcher: Dispatcher, admin_token: str) -> None:
    @app.get("/v1/engines")
    async def list_engines(request: Request) -> Response:
        """The registered engines with their state, load and learned costs."""
        _check_admin(request, admin_token)
        return json_response({"object": "list", "data": (await dispatcher.pools())["engines"]})

    @app.post("/v1/engines")
    async def add_engine(request: Request) -> Response:
        """Add an engine. The body has the keys of an engine in the `--engines` file."""
        _check_admin(request, admin_token)
        _, body = await read_object(request)
        with audited(request, "engine.add", str(body.get("name", "")), key_id=ADMIN_TOKEN):
            return json_response(await dispatcher.add_engine(body), 201)

    @app.delete("/v1/engines/{name}")
    async def remove_engine(name: str, request: Request) -> Response:
        """Remove an engine: it gets no new requests, and ends those that run. Answers 202 at once."""
        _check_admin(request, admin_token)
        with audited(request, "engine.drain", name, key_id=ADMIN_TOKEN):
            return json_response(await dispatcher.remove_engine(name), 202)


def _check_admin(request: Request, admin_token: str) -> None:
    if not admin_token:
        raise AdminOff("The admin API is off: start the router with --admin-token-file, or set TANDEM_ADMIN_TOKEN.")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), admin_token.encode()):
        raise AdminRefused("The admin API needs its token: Authorization: Bearer TOKEN.")
