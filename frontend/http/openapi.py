"""The OpenAPI document of an app: its routes, each with an `Operation` that says what it takes and answers.

FastAPI would show none of that: generation bypasses it, and other routes read their bodies themselves. Schemas
are made from the structs that decode the bodies, so the document cannot say anything else than the server checks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.routing import BaseRoute, Route

from tandem.frontend.http.answer_shapes import Error, ErrorBody, MessagesError
from tandem.frontend.http.refusals import Refusal
from tandem.frontend.http.request_id import REQUEST_ID_HEADER
from tandem.frontend.http.request_options import EXPLAIN_HEADER, ROUTING_HEADER, SLO_HEADER, TENANT_HEADER
from tandem.frontend.http.sessions import CONVERSATION_HEADER, MAX_CONVERSATION_ID_CHARS, SESSION_HEADERS
from tandem.protocol.errors import ConfigError, ServingError, error_kinds
from tandem.protocol.routing import STRATEGIES
from tandem.scheduling.admission.tenants import TENANT_NAME

Json = dict[str, Any]

_JSON, _EVENTS = "application/json", "text/event-stream"
_REF = "#/components/schemas/{name}"
_MESSAGES_PATH = "/v1/messages"
_TAGS = ("generation", "models", "tokens", "cache", "other routes of engines", "operations", "engines")
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing, wrong, expired or revoked.",
    403: "The request's Host, or the web page that sent it, is not allowed; or an operator's key is needed.",
    404: "There is nothing of this name: a model, a response, a pin, a worker or an engine.",
    408: "The request did not arrive in time.",
    409: "This cannot be done now.",
    413: "The body is larger than `--max-body-bytes`.",
    414: "The URL is longer than 8,192 bytes.",
    415: "The body is not declared as JSON.",
    429: "Too much is waiting, or a limit of the API key is used up. `Retry-After` says when to try again.",
    431: "The header is too large.",
    500: "A bug of the server's. It ended only this request.",
    501: "The served model is of a kind that cannot answer this.",
    502: "A worker or an engine failed.",
    503: "Nothing can serve the request now.",
    504: "Nothing came from a worker or an engine within `--request-timeout-s`.",
}
_OF_ALL = (400, 403, 408, 414, 431, 500, 503)
_OF_BODIES = (413, 415, 429)
_RETRY = {
    "retry-after": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    "retry-after-ms": {"description": "The same in milliseconds.", "schema": {"type": "integer", "minimum": 1}},
}
_KEY_SCHEMES = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "A key made by `tandem keys create`."},
    "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_ADMIN_SCHEME = {"type": "http", "scheme": "bearer", "description": "The token of `--admin-token-file`."}


class Parameter(NamedTuple):
    """An optional parameter of a request."""

    name: str
    place: Literal["query", "header"]
    schema: Json
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one route takes and answers. Its types are structs, or JSON schemas."""

    tag: str
    answer: Any = None  # of the answer's body
    media_type: str = _JSON
    status: int | None = 200  # None = it never succeeds
    event: Any = None  # of the data of a stream's events; None = there are no streams
    done: str = ""  # data of a stream's last event that is not JSON; "" = there is no such event
    body: Any = None  # of the request's body; None = it has none
    example: Any = None  # of a body
    refused: Mapping[str, tuple[Any, ...]] | None = None  # fields that are not served -> the values that are accepted
    exactly_one: Mapping[str, tuple[str, ...]] | None = None  # names of structs -> fields of which one must be given
    errors: tuple[int, ...] = ()  # in addition to those that every route has
    passes_errors: bool = False  # whether an engine's errors are passed on, with any status from 400 to 499
    parameters: tuple[Parameter, ...] = ()
    access: Literal["key", "open", "admin"] = "key"


Operations = Mapping[tuple[str, str], Operation]  # by method and path

GENERATION_HEADERS = (
    Parameter(TENANT_HEADER, "header", {"type": "string", "pattern": f"^{TENANT_NAME.pattern}$"}, "The tenant."),
    Parameter(
        SLO_HEADER,
        "header",
        {"type": "number", "exclusiveMinimum": 0},
        "Milliseconds within which the first token must come; a request that cannot meet this gets 429.",
    ),
    Parameter(
        ROUTING_HEADER,
        "header",
        {"enum": list(STRATEGIES)},
        "The routing strategy, where the operator lets clients choose (`--routing cost,header`); else it is ignored.",
    ),
    Parameter(EXPLAIN_HEADER, "header", {"enum": ["0", "1"]}, "`1`: the response explains the routing decision."),
)
CONVERSATION_HEADERS = (
    Parameter(
        CONVERSATION_HEADER,
        "header",
        {"type": "string", "maxLength": MAX_CONVERSATION_ID_CHARS},
        "The conversation, if the field `conversation_id` is not set; empty = none.",
    ),
    *(
        Parameter(name, "header", {"type": "string"}, "The client's session: the conversation, if nothing names it.")
        for name in SESSION_HEADERS
    ),
)


# Errors without a class of their own: status, code and reason.
_OTHER_CODES = (
    (400, "missing_required_parameter", "A required field is missing."),
    (400, "unsupported_parameter", "The field is not served, or not for clients to set."),
    (400, "invalid_engine", "The body of `POST /v1/engines` does not describe an engine that may be added."),
    (409, "not_managed", "The workers or engines are not run by this server, so it cannot end them."),
    (503, "not_ready", "`/ready`: nothing can serve requests now."),
)

# Every request may have it, and every answer has it.
_REQUEST_ID = Parameter(
    REQUEST_ID_HEADER,
    "header",
    {"type": "string"},
    "The request's id in logs and traces: up to 128 of `A-Z a-z 0-9 . _ : / + = @ -`. Another value is replaced.",
)
_ANSWERED_ID = {
    "description": "The request's id: the client's, if it is valid, or one that was made here.",
    "required": True,
    "schema": {"type": "string"},
}


def documented_routes(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """Method, path and summary of each route that belongs into the document."""
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            endpoint = getattr(route.endpoint, "answer", route.endpoint)
            summary = " ".join((inspect.getdoc(endpoint) or "").split())
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method, route.path, summary


def openapi_document(
    routes: Iterable[BaseRoute], operations: Operations, *, version: str, description: str, has_keys: bool
) -> Json:
    """The document of those routes that have an operation. `has_keys`: requests need an API key."""
    builder = _Builder(operations, has_keys)
    paths: dict[str, Json] = {}
    for method, path, summary in documented_routes(routes):
        operation = operations.get((method, path))
        if operation is not None:
            shown = path.replace(":path", "")
            paths.setdefault(shown, {})[method.lower()] = builder.operation(method, path, summary, operation)
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version, "description": description},
        "paths": dict(sorted(paths.items())),
        "components": builder.components(),
        "tags": [{"name": name} for name in _TAGS if any(one.tag == name for one in operations.values())],
    }
    if has_keys:
        document["security"] = [{name: []} for name in _KEY_SCHEMES]
    return document


class _Builder:
    """Makes operations, and the components that they refer to."""

    def __init__(self, operations: Operations, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._has_admin = any(operation.access == "admin" for operation in operations.values())
        used = [one for each in operations.values() for one in (each.body, each.answer, each.event)]
        types = [Error, MessagesError, *(one for one in used if not isinstance(one, dict | None))]
        references, self._schemas = msgspec.json.schema_components(types, ref_template=_REF)
        self._references = dict(zip(types, references, strict=True))
        refused = {one.body.__name__: one.refused for one in operations.values() if one.refused}
        exactly_one = {name: fields for one in operations.values() for name, fields in (one.exactly_one or {}).items()}
        self._schemas[ErrorBody.__name__]["properties"]["code"]["description"] = _codes()
        for name, schema in self._schemas.items():
            _complete(schema, refused.get(name) or {})
            if name in exactly_one:
                # Within `allOf`: for generators of clients, `oneOf` beside `properties` would be all there is.
                schema["allOf"] = [{"oneOf": [_given(field) for field in exactly_one[name]]}]

    def components(self) -> Json:
        """Schemas and security schemes."""
        schemes: Json = dict(_KEY_SCHEMES) if self._has_keys else {}
        if self._has_admin:
            schemes["adminToken"] = _ADMIN_SCHEME
        return {
            "schemas": dict(sorted(self._schemas.items())),
            "headers": {REQUEST_ID_HEADER: _ANSWERED_ID},
            "securitySchemes": schemes,
        }

    def operation(self, method: str, path: str, summary: str, operation: Operation) -> Json:
        """The entry of one route."""
        first, _, rest = summary.partition(". ")
        shown: Json = {
            "tags": [operation.tag],
            "summary": first.removesuffix("."),
            "operationId": _operation_id(method, path),
            "parameters": [*_path_parameters(path), *map(_parameter, (*operation.parameters, _REQUEST_ID))],
            "responses": self._responses(path, operation),
        }
        if rest:
            shown["description"] = rest
        for response in shown["responses"].values():
            headers = response.get("headers", {})
            response["headers"] = headers | {REQUEST_ID_HEADER: {"$ref": f"#/components/headers/{REQUEST_ID_HEADER}"}}
        if operation.body is not None:
            content: Json = {"schema": self._schema(operation.body)}
            if operation.example is not None:
                content["example"] = operation.example
            shown["requestBody"] = {"required": True, "content": {_JSON: content}}
        if operation.access == "open":
            shown["security"] = []
        elif operation.access == "admin":
            shown["security"] = [{"adminToken": []}]
        return shown

    def _schema(self, of: Any) -> Json:
        return of if isinstance(of, dict) else self._references[of]

    def _responses(self, path: str, operation: Operation) -> Json:
        responses: Json = {}
        if operation.status is not None:
            responses[str(operation.status)] = self._success(operation)
        error = MessagesError if path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/") else Error
        for status in sorted(self._statuses(operation)):
            # The server's protocol answers these before it knows the path.
            shape = Error if status in (408, 414, 431) else error
            responses[str(status)] = {"description": _ERRORS[status], "content": _content(self._schema(shape))}
            if status == 429:
                responses[str(status)]["headers"] = _RETRY
        if operation.passes_errors:
            refusal = {"description": "The engine's refusal, as it wrote it.", "content": _content({})}
            responses |= {"4XX": refusal, "501": refusal}
        return responses

    def _success(self, operation: Operation) -> Json:
        content = _content(self._schema(operation.answer), operation.media_type)
        if operation.event is not None:
            content[_EVENTS] = {"schema": _event_schema(self._schema(operation.event), operation.done)}
        return {"description": "Done.", "content": content}

    def _statuses(self, operation: Operation) -> set[int]:
        statuses = {*_OF_ALL, *operation.errors}
        if operation.body is not None:
            statuses |= {*_OF_BODIES}
        if operation.access == "admin" or (operation.access == "key" and self._has_keys):
            statuses.add(401)
        return statuses


def _content(schema: Json, media_type: str = _JSON) -> Json:
    return {media_type: {"schema": schema}}


def _event_schema(data: Json, done: str) -> Json:
    """A stream's schema. Before OpenAPI 3.2 it is that of each event."""
    json_text: Json = {"type": "string", "contentMediaType": _JSON, "contentSchema": data}
    return {
        "description": "Each of the server-sent events that come with `stream`.",
        "type": "object",
        "properties": {
            "event": {"type": "string", "description": "The type that `data` has too, where it has one."},
            "data": {"anyOf": [json_text, {"const": done}]} if done else json_text,
        },
        "required": ["data"],
    }


def _complete(schema: Json, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Add to an object's schema that other fields are ignored, and which values unserved fields may have."""
    properties = schema.get("properties")
    if properties is None:
        return
    schema["additionalProperties"] = True
    for name, field in properties.items():
        if field.get("default", 0) is None:  # that optional fields may be null is in their types
            del field["default"]
        if field.get("enum") in ([True], [False]):
            properties[name] = {key: value for key, value in field.items() if key != "enum"} | _only(field["enum"][0])
    for name, values in refused.items():
        allowed = [*map(_only, values), {"type": "null"}]
        properties.setdefault(name, {"description": "Not served: other values are refused.", "anyOf": allowed})


def _only(value: Any) -> Json:
    """The schema of one value. Generators of clients know no `enum` of lists or truth values."""
    if not isinstance(value, list):
        return {"const": value}
    items = {"const": value[0]} if value else {}
    return {"type": "array", "items": items, "minItems": len(value), "maxItems": len(value)}


def _given(field: str) -> Json:
    """The schema of an object that has this field; null is as if it were left out."""
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def _path_parameters(path: str) -> Iterator[Json]:
    for name in _PATH_PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _parameter(parameter: Parameter) -> Json:
    name, place, schema, description = parameter
    return {"name": name, "in": place, "required": False, "schema": schema, "description": description}


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"\w+", path.replace(":path", ""))
    return "_".join([method.lower(), *words])


def _codes() -> str:
    """All codes of errors, as a list in Markdown."""
    # A `ConfigError` ends the command before anything is served.
    served = (kind for kind in error_kinds() if not issubclass(kind, ConfigError))
    kinds: list[type[ServingError] | type[Refusal]] = [*served, *Refusal.__subclasses__()]
    reasons = {(kind.status, kind.code): _first_paragraph(kind) for kind in kinds if kind.code}
    rows = sorted({*_OTHER_CODES, *((status, code, reason) for (status, code), reason in reasons.items())})
    return "\n".join(["For programs; null if the status says it all.", "", *(f"- {s} `{c}`: {r}" for s, c, r in rows)])


def _first_paragraph(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
