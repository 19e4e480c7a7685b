"""What the routes that `tandem serve` and `tandem route` share take and answer, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from tandem.frontend.http import answer_shapes as shapes
from tandem.frontend.http.openapi import Operation

__all__ = ["SHARED_OPERATIONS"]

_ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_QUESTION = _ANY_OBJECT | {"description": "The body of a generation request."}

SHARED_OPERATIONS = {
    ("GET", "/v1/models"): Operation(tag="models", answer=shapes.ModelList),
    ("GET", "/v1/models/{model_id:path}"): Operation(tag="models", answer=shapes.ModelCard, errors=(404,)),
    ("GET", "/health"): Operation(tag="operations", answer=shapes.Health, access="open"),
    ("GET", "/ready"): Operation(tag="operations", answer=shapes.ReadyStatus, access="open"),
    ("GET", "/version"): Operation(tag="operations", answer=shapes.Version),
    ("GET", "/metrics"): Operation(tag="operations", answer={"type": "string"}, media_type="text/plain", access="open"),
    ("GET", "/v1/pools"): Operation(tag="operations", answer=_ANY_OBJECT),
    ("GET", "/v1/dashboard"): Operation(
        tag="operations", answer={"type": "string"}, media_type="text/event-stream", errors=(429,)
    ),
    ("GET", "/v1/dashboard/history"): Operation(tag="operations", answer=_ANY_OBJECT),
    ("POST", "/v1/pools/roles"): Operation(
        tag="operations",
        body=shapes.RoleChange,
        example={"worker": "prefill-0", "role": "decode"},
        answer=_ANY_OBJECT,
        errors=(404, 409, 502),
    ),
    ("POST", "/v1/pools/drain"): Operation(
        tag="operations",
        body=shapes.Drain,
        example={"worker": "decode-0", "grace_s": 30, "restart": True},
        answer=_ANY_OBJECT,
        errors=(404, 409, 502),
    ),
    ("POST", "/v1/pools/add"): Operation(
        tag="operations", body=shapes.NewWorker, example={"role": "decode"}, answer=_ANY_OBJECT, errors=(409, 502)
    ),
    ("POST", "/v1/pools/migrate"): Operation(
        tag="operations",
        body=shapes.Migration,
        example={"worker": "decode-0", "to": "decode-1"},
        answer=shapes.Migrated,
        errors=(404, 501, 502),
    ),
    ("POST", "/v1/route/explain"): Operation(
        tag="operations", body=_QUESTION, answer=shapes.DecisionList, errors=(404, 429, 502)
    ),
    ("GET", "/v1/route/decisions"): Operation(tag="operations", answer=shapes.DecisionList),
}
