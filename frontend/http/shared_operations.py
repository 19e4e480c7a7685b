"""What the routes that `tandem serve` and `tandem route` share take and answer, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from tandem.frontend.http import answer_shapes as shapes
from tandem.frontend.http.openapi import Operation

_ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_QUESTION = _ANY_OBJECT | {"description": "The body of a generation request."}


def _change(body: Any, example: dict[str, Any], errors: tuple[int, ...], *, answer: Any = _ANY_OBJECT) -> Operation:
    return Operation(tag="operations", body=body, example=example, answer=answer, errors=errors)


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
    ("POST", "/v1/pools/roles"): _change(shapes.RoleChange, {"worker": "prefill-0", "role": "decode"}, (404, 409, 502)),
    ("POST", "/v1/pools/drain"): _change(
        shapes.Drain, {"worker": "decode-0", "grace_s": 30, "restart": True}, (404, 409, 502)
    ),
    ("POST", "/v1/pools/add"): _change(shapes.NewWorker, {"role": "decode"}, (409, 502)),
    ("POST", "/v1/pools/migrate"): _change(
        shapes.Migration, {"worker": "decode-0", "to": "decode-1"}, (404, 501, 502), answer=shapes.Migrated
    ),
    ("POST", "/v1/route/explain"): Operation(
        tag="operations", body=_QUESTION, answer=shapes.DecisionList, errors=(404, 429, 502)
    ),
    ("GET", "/v1/route/decisions"): Operation(tag="operations", answer=shapes.DecisionList),
}
