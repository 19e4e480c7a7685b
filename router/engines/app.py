"""The FastAPI app of a router in front of engines: the OpenAI routes, the admin routes and the life of the fleet."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import ConfigError, RequestError, ServingError
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.engines.addresses import check_addresses
from tandem.router.engines.config import EngineSpec, check_tokenizer, spec_from
from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.forward import Forwarder, read_object
from tandem.router.engines.metrics import EngineCollector
from tandem.router.engines.prompts import PromptReader
from tandem.router.engines.together import ClusterView
from tandem.router.http.app import RouterApp, json_response
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.shared_routes import (
    add_decision_routes,
    add_model_routes,
    add_operation_routes,
    product_version,
)
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

    app = RouterApp(config, metrics, api_keys, version=product_version(), lifespan=lifespan)
    app.state.queues = forwarder.queues
    _add_generation_routes(app, forwarder)
    add_decision_routes(app, explain=forwarder.explain, decisions=together.decisions)
    add_model_routes(app, names=lambda: fleet.models, max_model_len=fleet.max_model_len, created_s=int(time.time()))
    add_operation_routes(app, not_ready=lambda: _not_ready(fleet), scrape=together.metrics, pools=together.pools)
    _add_admin_routes(app, fleet, together, admin_token, {spec.api_key_env for spec in first_specs}, readers)
    return app


def _add_generation_routes(app: RouterApp, forwarder: Forwarder) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.add_raw_route(path, partial(forwarder.answer, path))


def _not_ready(fleet: EngineFleet) -> str | None:
    """Why requests should not be sent here now; None if they should."""
    if fleet.is_ready:
        return None
    now = fleet.clock()
    reasons = ", ".join(f"{engine.name} ({engine.refusal(now)})" for engine in fleet.engines)
    return f"No engine is ready: {reasons or 'none is registered'}."


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
        """The registered engines with their state, load and learned costs."""
        _check_admin(request, admin_token)
        return json_response({"object": "list", "data": (await together.pools())["engines"]})

    @app.post("/v1/engines")
    async def add_engine(request: Request) -> Response:
        """Add an engine. The body has the keys of an engine in the `--engines` file."""
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
        """Remove an engine: it gets no new requests, and ends those that run. Answers 202 at once."""
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
