"""Generates docs/http_api.md from the routes of both apps, the request schemas, the headers and the errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import inspect as types
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.ignored_fields import IGNORED_HEADER
from tandem.frontend.http.refusals import Refusal
from tandem.frontend.http.request_id import REQUEST_ID_HEADER
from tandem.frontend.http.request_options import EXPLAIN_HEADER, SLO_HEADER, TENANT_HEADER
from tandem.frontend.http.sessions import CONVERSATION_HEADER, SESSION_HEADERS
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.messages.schema import (
    ContentBlock,
    ContextEdit,
    ContextManagement,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    OutputFormat,
    Quantity,
    Thinking,
    Thread,
)
from tandem.frontend.openai.other_fields import UNSERVED
from tandem.frontend.openai.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    GenerationFields,
    JsonSchemaFormat,
    PinFields,
    PrefetchFields,
    ResponseFormat,
    StreamOptions,
    Structure,
    StructuredOutputs,
    TokenizeRequest,
    UnpinFields,
)
from tandem.frontend.openai.tool_fields import AllowedTools, FunctionName, NamedToolChoice, Tool, ToolFunction
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.responses.schema import (
    CustomFormat,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from tandem.frontend.route_app import create_engines_app
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import ConfigError, ServingError
from tandem.protocol.sampling import SamplingParams

__all__ = ["http_api_page", "route_app", "serve_app"]


_PARTS: dict[Any, str] = {
    StreamOptions: "`stream_options`",
    ChatMessage: "message",
    ContentPart: "content part",
    Tool: "tool",
    ToolFunction: "function of a tool",
    NamedToolChoice: "tool choice",
    AllowedTools: "`allowed_tools`",
    FunctionName: "function's name",
    ResponseFormat: "`response_format`",
    JsonSchemaFormat: "`json_schema`",
    Structure: "structure",
    StructuredOutputs: "`structured_outputs`",
    ReasoningOptions: "`reasoning`",
    FunctionTool: "tool of `/v1/responses`",
    CustomTool: "custom tool",
    CustomFormat: "`format` of a custom tool",
    NamespaceTool: "namespace",
    TextOptions: "`text`",
    TextFormat: "`format`",
    InputMessage: "message",
    ContentBlock: "block",
    MessageTool: "tool",
    MessageToolChoice: "tool choice",
    Thinking: "`thinking`",
    OutputConfig: "`output_config`",
    OutputFormat: "output format",
    ContextManagement: "`context_management`",
    ContextEdit: "edit",
    Thread: "thread",
    Quantity: "quantity",
}
_TITLES: dict[type[msgspec.Struct], str] = {
    GenerationFields: "Chat and completions",
    ChatRequest: "`/v1/chat/completions`",
    CompletionRequest: "`/v1/completions`",
    Tool: "A tool",
    ToolFunction: "A function of a tool",
    NamedToolChoice: "A tool choice that names functions",
    AllowedTools: "`allowed_tools` of a tool choice",
    FunctionName: "A function's name",
    StreamOptions: "`stream_options`",
    ResponseFormat: "`response_format`",
    JsonSchemaFormat: "`json_schema` of `response_format`",
    Structure: "A structure of `response_format`",
    StructuredOutputs: "`structured_outputs`",
    ResponsesRequest: "`/v1/responses`",
    ReasoningOptions: "`reasoning` of `/v1/responses`",
    FunctionTool: "A function of `/v1/responses`",
    CustomTool: "A custom tool of `/v1/responses`",
    CustomFormat: "`format` of a custom tool",
    NamespaceTool: "A namespace of `/v1/responses`",
    TextOptions: "`text` of `/v1/responses`",
    TextFormat: "`format` of `text`",
    ChatMessage: "A message",
    ContentPart: "A content part of a message",
    CountTokensRequest: "`/v1/messages/count_tokens`",
    MessagesRequest: "`/v1/messages`",
    InputMessage: "A message of `/v1/messages`",
    ContentBlock: "A block of a message",
    MessageTool: "A tool of `/v1/messages`",
    MessageToolChoice: "A tool choice of `/v1/messages`",
    Thinking: "`thinking`",
    OutputConfig: "`output_config`",
    OutputFormat: "`format` of `output_config`",
    ContextManagement: "`context_management`",
    ContextEdit: "An edit of `context_management`",
    Thread: "`thread`",
    Quantity: "A quantity of an edit",
    TokenizeRequest: "`/tokenize`",
    DetokenizeRequest: "`/detokenize`",
    PinFields: "`/v1/cache/pin`",
    UnpinFields: "`/v1/cache/unpin`",
    PrefetchFields: "`/v1/cache/prefetch`",
}
_REQUEST_HEADERS = {
    "traceparent": "the client's span, and `tracestate`, as W3C defines them; used with `--tracing` (docs/tracing.md)",
    "authorization": "`Bearer KEY`, if the server has API keys (`--api-key-file`). `/health`, `/ready`, `/metrics` "
    "and the page `/dashboard` need none. `/v1/engines` needs the admin token instead",
    "x-api-key": "the key alone, instead of `authorization`, as clients of `/v1/messages` send it",
    "content-type": "`application/json`, or a type that ends with `+json`; required with a JSON body",
    "content-encoding": "`gzip` or `deflate`, if the body is compressed; others get 415",
    "host": "one of `--allowed-hosts`; a server on loopback also takes `localhost`, `--host` and addresses by which "
    "the machine reaches itself. Any name, if neither is the case; `/health` and `/ready` take any name",
    "origin": "if a web page sends a request that may change something: the server's own origin, or one of "
    "`--cors-allow-origins`",
    TENANT_HEADER: "the tenant, 1 to 64 letters, digits, `.`, `_` or `-`; a tenant's API key overrides it",
    SLO_HEADER: "milliseconds within which the first token must come; a request that cannot meet this gets 429",
    EXPLAIN_HEADER: "`1`: the response explains the routing decision",
    REQUEST_ID_HEADER: "id for the request, 1 to 128 letters, digits or characters of `._:/+=@-`. Any other one is "
    "ignored, and the server chooses an id",
    CONVERSATION_HEADER: "conversation of the request, if the field `conversation_id` is not set; engines get it too",
    "`, `".join(SESSION_HEADERS): "the client's session, which is the conversation if nothing else names it. Values of "
    "more than 256 characters, or with others than printable ASCII, are ignored",
}
_RESPONSE_HEADERS = {
    "accept-encoding": "the encodings in which a request's body may be sent, with 415",
    "connection": "`close` once the server has been told to end: send the next request on a new connection",
    "traceresponse": "the request's span, with `--tracing`: version, trace id, span id and flags, as in `traceparent`",
    REQUEST_ID_HEADER: "id of the request, which all log lines about it name. Engines are told it too; if the client "
    "chose it, with a suffix that makes it unique",
    IGNORED_HEADER: "what the body has and the answer is without: hints, fields that nobody here knows, misspelt ones "
    "with the name that was meant. Absent if nothing was ignored",
    EXPLAIN_HEADER: "the routing decision as JSON, if asked for; a stream also has it in its last chunk with choices, "
    "as `tandem_explain`, and only there if its first token took longer than 2 s",
    "retry-after": "seconds to wait, with 429 and some 503",
    "retry-after-ms": "the same in milliseconds, with 429",
    "x-tandem-engine": "the engine that answered; not on a stream that began with pings. `route` only",
    "x-tandem-expected-cached-tokens": "prompt tokens that the engine was expected to have cached; missing where "
    "`x-tandem-engine` is. `route` only",
    "content-security-policy": "on pages: they may use nothing but files of this server",
    "x-content-type-options": "`nosniff`, on pages and on the dashboard's events",
    "x-accel-buffering": "`no`, on streams: nginx must not buffer them",
}
# Errors without a class of their own: status, code and reason.
_OTHER_ERRORS = [
    (400, "missing_required_parameter", "A required field is missing."),
    (400, "unknown_parameter", "A field whose name is almost that of another one, which the message names."),
    (400, "unsupported_parameter", "The field is not served, or not for clients to set."),
    (409, "not_managed", "The workers or engines are not run by this server, so it cannot end them."),
    (400, "invalid_engine", "The body of `POST /v1/engines` does not describe an engine that may be added."),
    (404, "", "There is no such route."),
    (405, "", "The route has no such method."),
    (503, "not_ready", "`/ready`: nothing can serve requests now."),
]

_INTRODUCTION = """\
# HTTP API

<!-- Generated from the routes, schemas and errors in router/ by `make generated`. -->

`tandem serve` and `tandem route` speak the OpenAI API, and Anthropic's Messages API on `/v1/messages`
([messages.md](messages.md)), with the routes, fields, headers and errors below. Streams are server-sent events that end
with `data: [DONE]` (of `/v1/responses` and `/v1/messages`: with an event whose type says so), and they send pings while
there is nothing else to send ([deployment.md](deployment.md#behind-a-proxy)). Other bodies are JSON. In a request body
every optional field may be null. `tandem serve` refuses a field whose name is almost that of one it has (`temprature`)
and passes over other unknown ones; `tandem route` passes all of them on to the engine. A server tells the same of
itself as an OpenAPI document (`/openapi.json`), with the shapes of answers, and shows it as a page (`/docs`), which
uses nothing of any other host.
"""
_BODIES = """\
## Request bodies

`tandem serve` checks all of these. `tandem route` reads `model`, `messages`, `prompt`, `input`, `stream`, `max_tokens`,
`cache_salt` and `priority`, and passes the body on: the engine checks it. `POST /v1/route/explain` takes a body of
`/v1/chat/completions`, `/v1/completions` or, of `tandem route`, `/v1/responses`; `POST /v1/engines` takes the keys of
an engine in the engines file ([engines.md](engines.md)). How large all fields of a request may be together is in
`frontend/openai/request_limits.py`.
"""
_UNSERVED = """\
### Fields that are not served

`tandem serve` refuses these with 400 `unsupported_parameter`, because to ignore them would change the answer. Null and
the values of the second column ask for nothing and are accepted. A field that is listed above for a route is served
there.

| Field | Accepted |
|---|---|"""
_ERRORS = """\
## Errors

The body is `{"error": {"message", "type", "param", "code"}}`; `param` names the field. `type` is `rate_limit_error` for
429, `invalid_request_error` for other faults of the request, and `server_error` for the rest. Once a
stream has begun, the same body is its last event, without `[DONE]` behind it.

Of `/v1/messages` and `/v1/messages/count_tokens` the body is Anthropic's: `{"type": "error", "error": {"type",
"message", "param", "code"}}`. Its inner `type` follows from the status: `authentication_error` (401),
`permission_error` (403), `not_found_error` (404), `request_too_large` (413), `rate_limit_error` (429),
`overloaded_error` (503), `invalid_request_error` for other faults of the request, and `api_error` for the rest. What
`tandem route` passes on from an engine is as the engine wrote it.

| Status | Code | Reason |
|---|---|---|"""


class _Route(NamedTuple):
    path: str
    methods: str
    summary: str


def http_api_page() -> str:
    """The text of docs/http_api.md."""
    return "\n".join([_INTRODUCTION, *_routes(), *_bodies(), *_unserved(), *_headers(), *_errors()]) + "\n"


# -- routes


def _routes() -> Iterator[str]:
    apps = {"`serve`": serve_app(), "`route`": route_app()}
    commands: dict[tuple[str, str], list[str]] = {}
    summaries: dict[tuple[str, str], str] = {}
    for command, app in apps.items():
        for path, methods, summary in _routes_of(app):
            commands.setdefault((path, methods), []).append(command)
            summaries.setdefault((path, methods), summary)
    yield from ("## Routes", "", "| Route | Of | What it does |", "|---|---|---|")
    for (path, methods), summary in sorted(summaries.items()):
        yield f"| `{methods} {path}` | {', '.join(commands[path, methods])} | {summary} |"
    yield from ("", "`HEAD` is answered as `GET`, without the body.", "")


def _routes_of(app: RouterApp) -> Iterator[_Route]:
    for route in app.router.routes:
        if isinstance(route, Route):
            endpoint = getattr(route.endpoint, "answer", route.endpoint)
            summary = " ".join((inspect.getdoc(endpoint) or "").split())
            methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
            yield _Route(route.path.replace(":path", ""), methods, summary)


def serve_app() -> RouterApp:
    """The app of `tandem serve`, without backend and tokenizer: only its routes are read."""
    backend, tokenizer = (
        SimpleNamespace(decisions=None, pools=None, overview=None, set_role=None),
        SimpleNamespace(start_id=0, chat_template="", response_template=None, to_json=None),
    )
    return create_app(cast(Any, backend), cast(Any, tokenizer), RouterConfig(), CollectorRegistry(), api_keys=ApiKeys())


def route_app() -> RouterApp:
    """The app of `tandem route`, without dispatcher and engines."""
    dispatcher = SimpleNamespace(
        decisions=None, pools=None, overview=None, max_model_len=None, capabilities=None, set_role=None
    )
    return create_engines_app(
        cast(Any, dispatcher),
        EngineConnections(ExternalEnginesConfig()),
        {},
        CollectorRegistry(),
        config=RouterConfig(),
        engines_config=ExternalEnginesConfig(),
        scrape=cast(Any, None),
        api_keys=ApiKeys(),
    )


# -- request bodies


def _bodies() -> Iterator[str]:
    yield _BODIES
    for struct, title in _TITLES.items():
        yield from (f"### {title}", "")
        fields = _fields(struct)
        if base := next((base for base in struct.__mro__[1:] if base in _TITLES), None):
            yield from (f"The fields of *{_TITLES[base]}*, and:", "")
            shared = {field.name: _type(field.type) for field in _fields(base)}
            fields = tuple(field for field in fields if shared.get(field.name) != _type(field.type))
        yield from ("| Field | Type | Default | Meaning |", "|---|---|---|---|")
        for field in fields:
            yield f"| `{field.name}` | {_type(field.type)} | {_default(struct, field)} | {_meaning(field)} |"
        yield ""


def _fields(struct: type[msgspec.Struct]) -> tuple[types.Field, ...]:
    return cast(types.StructType, types.type_info(struct)).fields


def _meaning(field: types.Field) -> str:
    schema = field.type.extra_json_schema if isinstance(field.type, types.Metadata) else None
    return str((schema or {})["description"])


def _default(struct: type[msgspec.Struct], field: types.Field) -> str:
    """A default of the sampling parameters; the others are in the fields' descriptions."""
    if field.required:
        return "required"
    default = next((one.default for one in _fields(SamplingParams) if one.name == field.name), None)
    is_sampled = issubclass(struct, GenerationFields) and isinstance(default, bool | int | float)
    return f"`{msgspec.json.encode(default).decode()}`" if is_sampled and field.name != "seed" else ""


def _type(kind: types.Type) -> str:
    """A type and its range, in words."""
    match kind:
        case types.Metadata():
            return _type(kind.type)
        case types.UnionType():
            return " or ".join(_type(one) for one in kind.types if not isinstance(one, types.NoneType))
        case types.IntType():
            return f"integer{_range(kind)}"
        case types.FloatType():
            return f"number{_range(kind)}"
        case types.StrType():
            return f"string{_length(kind, 'characters')}"
        case types.ListType():
            items = (
                f"({_type(kind.item_type)})" if isinstance(kind.item_type, types.UnionType) else _type(kind.item_type)
            )
            return f"list of {items}{_length(kind, 'items')}"
        case types.DictType():
            return f"object of {_type(kind.value_type)}{_length(kind, 'items')}"
        case types.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case types.StructType():
            return _PARTS[kind.cls]
        case types.BoolType():
            return "boolean"
        case types.AnyType() | types.RawType():
            return "any value"
    raise AssertionError(f"no words for {kind}")


def _range(kind: types.IntType | types.FloatType) -> str:
    low = f" from {_number(kind.ge)}" if kind.ge is not None else ""
    low = f" above {_number(kind.gt)}" if kind.gt is not None else low
    return f"{low} to {_number(kind.le)}" if kind.le is not None else low


def _number(value: float) -> str:
    """The number; a large power of two, or the integer below one, as a power."""
    for offset, text in ((0, ""), (1, " - 1")):
        size = abs(value) + offset
        if isinstance(size, int) and size >= 2**20 and size.bit_count() == 1:
            return f"{'-' if value < 0 else ''}2^{size.bit_length() - 1}{text}"
    return f"{value:g}"


def _length(kind: types.StrType | types.ListType | types.DictType, items: str) -> str:
    if kind.max_length is not None:
        low = f"{kind.min_length} to " if kind.min_length else "at most "
        return f" ({low}{kind.max_length} {items})"
    return " (not empty)" if kind.min_length else ""


def _unserved() -> Iterator[str]:
    yield _UNSERVED
    for name, values in UNSERVED.items():
        yield f"| `{name}` | {', '.join(f'`{msgspec.json.encode(value).decode()}`' for value in values)} |"
    yield ""


# -- headers and errors


def _headers() -> Iterator[str]:
    for title, headers in (("Request headers", _REQUEST_HEADERS), ("Response headers", _RESPONSE_HEADERS)):
        yield from (f"## {title}", "", "| Header | Meaning |", "|---|---|")
        yield from (f"| `{name}` | {meaning} |" for name, meaning in headers.items())
        yield ""


def _errors() -> Iterator[str]:
    yield _ERRORS
    rows = {*_OTHER_ERRORS, *map(_error, _subclasses(ServingError)), *map(_error, Refusal.__subclasses__())}
    for status, code, reason in sorted(rows):
        yield f"| {status} | {f'`{code}`' if code else ''} | {reason} |"


def _error(kind: type[ServingError] | type[Refusal]) -> tuple[int, str, str]:
    reason = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    return kind.status, kind.code or "", " ".join(reason.split())


def _subclasses(base: type[ServingError]) -> Iterator[type[ServingError]]:
    for kind in base.__subclasses__():
        # Errors of commands answer no request, and a ConfigError ends the command before anything is served.
        if kind is not ConfigError and kind.__module__.startswith(("tandem.protocol.", "tandem.router.")):
            yield kind
            yield from _subclasses(kind)
