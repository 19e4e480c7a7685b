"""The FastAPI app of a router in front of engines: the OpenAI routes, the admin routes and the life of the fleet."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import ConfigError, ModelNotFound, RequestError, ServingError
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.engines.addresses import check_addresses
from tandem.router.engines.config import EngineSpec, check_tokenizer, spec_from
from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.forward import Forwarder, read_object
from tandem.router.engines.metrics import EngineCollector
from tandem.router.engines.prompts import PromptReader
from tandem.router.engines.together import ClusterView
from tandem.router.http.app import RouterApp, json_response
from tandem.router.http.errors import error_body, error_response
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.openai.visibility import metrics_response, visible_decisions, visible_pools
from tandem.router.processes.sibling_bus import PeerRouterBus
from tandem.router.text.tokenizer import TokenizerPool
from tandem.router.workers.metrics import WorkerCollector
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.tenants import CacheScopes

__all__ = ["KEY_PREFIX", "create_engines_app"]

# Over HTTP only variables of this prefix, or such that the file names too, may be sent to a URL as a key: the admin of
# engines need not be the one who may read every secret of the process.
KEY_PREFIX = "TANDEM_ENGINE_"


class AdminRefused(ServingError):
    """The admin routes are off, or the token is missing or wrong."""

    status = 401
    error_type = "invalid_request_error"
    code = "invalid_admin_token"


class AdminOff(AdminRefused):
    """No admin token is configured."""

    status = 403
    code = "admin_api_off"


class EngineNotFound(RequestError):
    """No engine of this name is registered."""

    status = 404
    code = "engine_not_found"


def create_engines_app(
    fleet: EngineFleet,
    specs: Iterable[EngineSpec],
    readers: Mapping[str, PromptReader],
    metrics_registry: CollectorRegistry,
    *,
    admin_token: str = "",
    bus: PeerRouterBus | None = None,
    api_keys: Mapping[bytes, str],
) -> RouterApp:
    """The app. It takes the engines of `specs` into the fleet at its start and closes the fleet at its end.

    With a `bus`, which it starts and closes too, it is one of several processes and speaks for all of them. `api_keys`
    are as `load_api_keys` gives them.
    """
    config = fleet.config
    metrics = EdgeMetrics(metrics_registry)
    pool = TokenizerPool(config.tokenizer_threads)
    scopes = CacheScopes(fleet.tenants, has_keys=bool(api_keys))
    forwarder = Forwarder(fleet, scopes, readers, pool, metrics)
    metrics_registry.register(EngineCollector(fleet, lambda: forwarder.num_retries))
    metrics_registry.register(WorkerCollector(fleet.registry))
    metrics_registry.register(AdmissionCollector(forwarder.queues))
    together = ClusterView(fleet, forwarder.queues, metrics_registry, bus)
    first_specs = list(specs)
    fleet.siblings.lasting = {spec.name for spec in first_specs}
    fleet.trusted_urls = frozenset(spec.url for spec in first_specs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await together.start()
            fleet.add_all(first_specs)
            yield
        finally:
            forwarder.queues.close()
            await together.close()  # first, while there are engines to give a last account of
            await fleet.close()
            pool.close()

    app = RouterApp(config, metrics, api_keys, lifespan=lifespan)
    app.state.queues = forwarder.queues
    _add_generation_routes(app, forwarder)
    _add_route_routes(app, forwarder, together)
    _add_catalog_routes(app, fleet)
    _add_operation_routes(app, fleet, together)
    _add_admin_routes(app, fleet, together, admin_token, {spec.api_key_env for spec in first_specs}, readers)
    return app


def _add_generation_routes(app: RouterApp, forwarder: Forwarder) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_raw_route(path, partial(forwarder.answer, path))


def _add_route_routes(app: FastAPI, forwarder: Forwarder, together: ClusterView) -> None:
    @app.post("/v1/route/explain")
    async def explain(request: Request) -> Response:
        return json_response(await forwarder.explain(request))

    @app.get("/v1/route/decisions")
    async def decisions(request: Request) -> Response:
        return json_response({"object": "list", "data": visible_decisions(await together.decisions(), request)})


def _add_catalog_routes(app: FastAPI, fleet: EngineFleet) -> None:
    started_at_s = int(time.time())

    def card(model: str) -> dict[str, Any]:
        if model not in fleet.models:
            raise ModelNotFound(f"The model '{model[:200]}' does not exist.", param="model")
        max_model_len = fleet.max_model_len(model)
        about = {"id": model, "object": "model", "created": started_at_s, "owned_by": "tandem"}
        return about | {"max_model_len": max_model_len}

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [card(model) for model in fleet.models]})

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        return json_response(card(model_id))


def _add_operation_routes(app: FastAPI, fleet: EngineFleet, together: ClusterView) -> None:
    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if fleet.is_ready:
            return json_response({"status": "ready"})
        now = fleet.clock()
        reasons = ", ".join(f"{engine.name} ({engine.refusal(now)})" for engine in fleet.engines)
        message = f"No engine is ready: {reasons or 'none is registered'}."
        return error_response(503, error_body(message, "server_error", code="not_ready"))

    @app.get("/metrics")
    async def scrape_metrics(request: Request) -> Response:
        return metrics_response(await together.metrics(), request)

    @app.get("/v1/pools")
    async def show_pools(request: Request) -> Response:
        return json_response(visible_pools(await together.pools(), request))


def _add_admin_routes(
    app: FastAPI,
    fleet: EngineFleet,
    together: ClusterView,
    admin_token: str,
    known_keys: set[str],
    tokenizers: Container[str],
) -> None:
    removals = BackgroundTasks()

    @app.get("/v1/engines")
    async def list_engines(request: Request) -> Response:
        _check_admin(request, admin_token)
        return json_response({"object": "list", "data": (await together.pools())["engines"]})

    @app.post("/v1/engines")
    async def add_engine(request: Request) -> Response:
        _check_admin(request, admin_token)
        _, body = await read_object(request)
        try:
            spec = spec_from(body, "engine")
            if spec.api_key_env and spec.api_key_env not in known_keys and not spec.api_key_env.startswith(KEY_PREFIX):
                raise ConfigError(
                    f"engine: api_key_env={spec.api_key_env!r} cannot be used over HTTP; name a variable that begins "
                    f"with {KEY_PREFIX}"
                )
            check_tokenizer(spec, tokenizers)
            if not (fleet.engines_config.allow_local_engines or spec.url in fleet.trusted_urls):
                await check_addresses(spec, fleet.engines_config.connect_timeout_s)
            engine = fleet.add(spec)
        except ConfigError as exc:
            raise RequestError(exc.message, code="invalid_engine") from exc
        return json_response(engine.to_json(fleet.clock()), 201)

    @app.delete("/v1/engines/{name}")
    async def remove_engine(name: str, request: Request) -> Response:
        _check_admin(request, admin_token)
        engine = fleet.get(name)
        if engine is None:
            names = ", ".join(engine.name for engine in fleet.engines) or "none"
            raise EngineNotFound(f"Engine '{name[:100]}' is not registered; there are: {names}.", param="name")
        if not engine.is_removed:
            # It drains on its own: whoever asked need not wait, and cannot stop it by hanging up.
            removals.start(f"removal of engine {name}", lambda: fleet.remove(name))
            await asyncio.sleep(0)  # it is draining when this answer is made
        return json_response(engine.to_json(fleet.clock()), 202)


def _check_admin(request: Request, admin_token: str) -> None:
    if not admin_token:
        raise AdminOff("The admin API is off: start the router with --admin-token-file, or set TANDEM_ADMIN_TOKEN.")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), admin_token.encode()):
        raise AdminRefused("The admin API needs its token: Authorization: Bearer TOKEN.")
