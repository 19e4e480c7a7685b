"""What a tenant's key may see of things that concern all tenants: its own decisions, but no load figures of others.

An operator's key sees everything, and so does everyone if the server has no API keys.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.authentication import visible_tenant
from tandem.frontend.http.exposition import CLASSIC, OPENMETRICS, MetricsText, as_openmetrics, prefers_openmetrics

__all__ = ["metrics_response", "visible_decisions", "visible_pools"]

_MEMBER_FIELDS = ("worker_id", "name", "model", "state")  # the fields of a worker or an engine that do not show load


def visible_decisions(decisions: list[dict[str, Any]], request: Request) -> list[dict[str, Any]]:
    """The decisions that a request may see."""
    tenant = visible_tenant(request)
    return [one for one in decisions if tenant is None or one["tenant"] == tenant]


def visible_pools(pools: dict[str, Any], request: Request) -> dict[str, Any]:
    """The part of `/v1/pools` that a request may see: with a tenant's key, only names and states."""
    if visible_tenant(request) is None:
        return pools
    if "engines" in pools:
        return {"engines": _members(pools["engines"])}
    return {"roles": {role: _members(workers) for role, workers in pools["roles"].items()}}


def metrics_response(metrics: MetricsText, request: Request) -> Response:
    """Metrics in the text format that the request accepts. Samples of one tenant or one key are for operators."""
    text = metrics.everything if visible_tenant(request) is None else metrics.public
    is_openmetrics = prefers_openmetrics(request.headers.get("accept", ""))
    return Response(
        as_openmetrics(text) if is_openmetrics else text,
        headers={"content-type": OPENMETRICS if is_openmetrics else CLASSIC, "vary": "accept"},
    )


def _members(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: member[name] for name in _MEMBER_FIELDS if name in member} for member in members]
