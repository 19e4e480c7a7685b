"""Routes that `tandem serve` and `tandem route` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http import answer_shapes as shapes
from tandem.frontend.http.app import RouterApp, json_response
from tandem.frontend.http.audit import audited
from tandem.frontend.http.authentication import check_operator, visible_tenant
from tandem.frontend.http.errors import error_body, error_response
from tandem.frontend.http.exposition import (
    CLASSIC,
    INTERVAL_S,
    OPENMETRICS,
    MetricsText,
    Scraper,
    as_openmetrics,
    prefers_openmetrics,
    shared_metrics,
)
from tandem.frontend.http.json_body import decode_body, read_json
from tandem.protocol.errors import ModelNotFound, RequestError
from tandem.protocol.messages import Role
from tandem.router.operator_api import OperatorApi

Json = dict[str, Any]
T = TypeVar("T", bound=msgspec.Struct)

_MEMBER_FIELDS = ("worker_id", "name", "model", "state")  # the fields of a worker or an engine that do not show load


def add_operation_routes(
    app: RouterApp,
    *,
    not_ready: Callable[[], str | None],
    scrape: Scraper,
    pools: Callable[[], Awaitable[Json]],
    scrape_interval_s: float = INTERVAL_S,
) -> None:
    """Add health, readiness, metrics, pools and version. `not_ready` gives the reason, or None when ready."""
    expose = shared_metrics(scrape, scrape_interval_s)

    @app.get("/health")
    async def health() -> Response:
        """The process answers."""
        return json_response(shapes.Health("ok"))

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests should be sent here: 200, or 503 `not_ready` with the reason."""
        reason = "The server is shutting down." if app.is_leaving else not_ready()
        if reason is not None:
            return error_response(503, error_body(reason, "server_error", code="not_ready"))
        return json_response(shapes.ReadyStatus("ready"))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format, or OpenMetrics if `Accept` prefers it. No tenants for a tenant's key."""
        return _metrics_response(await expose(), request)

    @app.get("/v1/pools")
    async def show_pools(request: Request) -> Response:
        """Workers or engines with their state, load and learned costs. A tenant's key gets names and states only."""
        return json_response(_visible_pools(await pools(), request))

    @app.get("/version")
    async def show_version() -> Response:
        """The version of Tandem."""
        return json_response(shapes.Version(product_version()))


def add_worker_routes(app: FastAPI, operator_api: OperatorApi) -> None:
    """Add the routes that change the workers which the server runs."""

    @app.post("/v1/pools/roles")
    async def change_role(request: Request) -> Response:
        """Let a worker serve as `prefill` or `decode` from now on: `{"worker": "prefill-0", "role": "decode"}`.

        Answers when it serves in its new role; requests of its old role end there. Needs an operator's key.
        """
        change = await _read(request, shapes.RoleChange, '{"worker": NAME, "role": "prefill" or "decode"}')
        with audited(request, "role.change", f"{change.worker} -> {change.role}"):
            return json_response(await operator_api.manager.set_role(change.worker, Role(change.role)))

    @app.post("/v1/pools/drain")
    async def drain_worker(request: Request) -> Response:
        """Let a worker leave, or start it again with `"restart": true`, without a request failing.

        Answers when it has begun; `/v1/pools` shows its end. Needs an operator's key.
        """
        drain = await _read(request, shapes.Drain, '{"worker": NAME, "grace_s": SECONDS, "restart": true or false}')
        with audited(request, "worker.restart" if drain.restart else "worker.drain", drain.worker):
            return json_response(await operator_api.manager.drain(drain.worker, drain.grace_s, restart=drain.restart))

    @app.post("/v1/pools/add")
    async def add_worker(request: Request) -> Response:
        """Start one more worker, like the existing ones: `{"role": "decode"}`.

        Answers when it has begun; `/v1/pools` tells when it serves, or why it was withdrawn. Needs an operator's key.
        """
        added = await _read(request, shapes.NewWorker, '{"role": "prefill" or "decode"}')
        with audited(request, "worker.add", added.role) as done:
            record = await operator_api.manager.add_worker(Role(added.role))
            done.target = str(record.get("worker", added.role))
            return json_response(record)

    @app.post("/v1/pools/migrate")
    async def migrate_answers(request: Request) -> Response:
        """Let answers that a worker decodes go on with another one: `{"worker": "decode-0", "to": "decode-1"}`.

        Their KV is copied while they are decoded on. Answers at once. Needs an operator's key.
        """
        migration = await _read(
            request, shapes.Migration, '{"worker": NAME}, and "to" or "request_id" if only some should move'
        )
        with audited(request, "answers.migrate", f"{migration.worker} -> {migration.to or 'any'}"):
            return json_response(await operator_api.migrate(migration.worker, migration.to, migration.request_id))


async def _read(request: Request, shape: type[T], hint: str) -> T:
    """An operator's body. Raises `RequestError`, or `Forbidden` for other keys."""
    check_operator(request)
    try:
        return decode_body(await read_json(request), shape)
    except RequestError as exc:
        exc.message += f" Send {hint}."
        raise


def add_decision_routes(
    app: FastAPI,
    *,
    explain: Callable[[Request], Awaitable[list[Json]]],
    decisions: Callable[[], Awaitable[list[Json]]],
) -> None:
    """Add the routes that say where requests go, and why."""

    @app.post("/v1/route/explain")
    async def explain_route(request: Request) -> Response:
        """What would be decided now for each prompt of a chat or completion body. Nothing is sent or booked."""
        return json_response(shapes.DecisionList("list", await explain(request)))

    @app.get("/v1/route/decisions")
    async def list_decisions(request: Request) -> Response:
        """The latest decisions, newest first. A tenant's key gets its own only."""
        return json_response(shapes.DecisionList("list", _visible_decisions(await decisions(), request)))


def add_model_routes(
    app: FastAPI,
    *,
    names: Callable[[], Iterable[str]],
    max_model_len: Callable[[str], int | None],
    capabilities: Callable[[str], Json | None],
    created_s: int,
    adapters: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Add the routes that say which models are served. `created_s` is a Unix time.

    `capabilities` are None where they are not known. `adapters` gives the base model of each LoRA adapter.
    """

    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")

    def card(name: str, base: str | None = None) -> shapes.ModelCard:
        return shapes.ModelCard(
            id=name,
            object="model",
            type="model",
            display_name=name,
            created=created_s,
            created_at=created_at,
            owned_by="tandem",
            root=name,
            parent=base,
            max_model_len=max_model_len(base or name),
            capabilities=capabilities(base or name),
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        """The served models, with their context length and what they can do. An adapter names its base as `parent`."""
        cards = [*map(card, names()), *(card(name, base) for name, base in adapters().items())]
        return json_response(shapes.ModelList("list", cards))

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        """One of the served models."""
        base = None if model_id in names() else adapters().get(model_id)
        if base is None and model_id not in names():
            text = f"The model '{model_id[:200]}' does not exist; GET /v1/models lists those that do."
            raise ModelNotFound(text, param="model")
        return json_response(card(model_id, base))


def product_version() -> str:
    """The version of the installed package."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


# -- what a tenant's key may see: its own decisions, but no load of others. Without API keys everyone sees everything.


def _visible_decisions(decisions: list[Json], request: Request) -> list[Json]:
    """The decisions that a request may see."""
    tenant = visible_tenant(request)
    return [one for one in decisions if tenant is None or one["tenant"] == tenant]


def _visible_pools(pools: Json, request: Request) -> Json:
    """The part of `/v1/pools` that a request may see: with a tenant's key, only names and states."""
    if visible_tenant(request) is None:
        return pools
    if "engines" in pools:
        return {"engines": _members(pools["engines"])}
    return {"roles": {role: _members(workers) for role, workers in pools["roles"].items()}}


def _metrics_response(metrics: MetricsText, request: Request) -> Response:
    """Metrics in the text format that the request accepts. Samples of one tenant or one key are for operators."""
    text = metrics.everything if visible_tenant(request) is None else metrics.public
    is_openmetrics = prefers_openmetrics(request.headers.get("accept", ""))
    return Response(
        as_openmetrics(text) if is_openmetrics else text,
        headers={"content-type": OPENMETRICS if is_openmetrics else CLASSIC, "vary": "accept"},
    )


def _members(members: list[Json]) -> list[Json]:
    return [{name: member[name] for name in _MEMBER_FIELDS if name in member} for member in members]
