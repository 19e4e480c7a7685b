"""Options of a request beyond OpenAI's: tenant, priority, TTFT SLO, and whether to explain the decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.types import Scope

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.request_id import RequestId, request_id_of
from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.keys.limiter import KeyUse
from tandem.protocol.errors import RequestError, ServingError
from tandem.protocol.routing import STRATEGIES
from tandem.runtime.tracing.client_context import client_trace_headers
from tandem.scheduling.admission.tenants import TENANT_NAME
from tandem.scheduling.request import DEFAULT_CLASS, DEFAULT_TENANT, ServiceClass

if TYPE_CHECKING:
    from tandem.runtime.tracing.tracing import LiveSpan

TENANT_HEADER = "x-tandem-tenant"
SLO_HEADER = "x-tandem-ttft-slo-ms"
ROUTING_HEADER = "x-tandem-routing"  # strategy of `protocol/routing.py`
EXPLAIN_HEADER = "x-tandem-explain"  # in a request: 1; in a response: the decision as JSON


# Keys in the ASGI scope.
_KEY, _KEY_USE, _SPAN, _MAY_ROUTE = "tandem.api_key", "tandem.key_use", "tandem.span", "tandem.may_route"


class RequestOptions(NamedTuple):
    """How a client wants its request served, and its id."""

    request_id: RequestId
    headers: Mapping[str, str]  # the first of each name
    service_class: ServiceClass = DEFAULT_CLASS
    explains: bool = False  # the response explains the routing decision
    span: LiveSpan | None = None  # the request's span, if it is traced

    @property
    def traceparent(self) -> str:
        """The header value that makes spans part of the request's trace; "" = it is not traced."""
        return self.span.traceparent if self.span is not None and self.span.is_sampled else ""


def request_options(request: Request, priority: int | None) -> RequestOptions:
    """The options in a request's headers, with the priority of its body or its API key. Raises `RequestError`."""
    if priority is None:
        key = key_of(request)
        priority = 0 if key is None else key.priority
    scope = request.scope
    # Made once, as each lookup in Starlette's headers walks over all of them.
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
    routing = _routing(headers, may_route=bool(scope.get(_MAY_ROUTE)))
    service_class = ServiceClass(_tenant(headers), priority, _slo_s(headers), routing)
    return RequestOptions(request_id_of(scope), headers, service_class, _explains(headers), span_of(scope))


def note_key(scope: Scope, key: ApiKey) -> None:
    """Note the API key that a request was accepted with."""
    scope[_KEY] = key


def note_may_route(scope: Scope) -> None:
    """Note that the operator lets clients name a routing strategy."""
    scope[_MAY_ROUTE] = True


def note_span(scope: Scope, span: LiveSpan) -> None:
    """Note the span of a request."""
    scope[_SPAN] = span


def span_of(scope: Scope) -> LiveSpan | None:
    """The span of a request; None if tracing is off."""
    span: LiveSpan | None = scope.get(_SPAN)
    return span


def trace_headers_of(scope: Scope) -> dict[str, str]:
    """Trace headers for a server that serves a request: our span's, or the client's own unchanged."""
    span = span_of(scope)
    return client_trace_headers(scope["headers"]) if span is None else span.headers


def note_key_use(scope: Scope, use: KeyUse) -> None:
    """Note what counts a request against the limits of its API key."""
    scope[_KEY_USE] = use


def key_use_of(request: Request) -> KeyUse | None:
    """What counts a request against the limits of its API key; None if nothing limits it."""
    use: KeyUse | None = request.scope.get(_KEY_USE)
    return use


def note_unserved(scope: Scope, error: Exception) -> None:
    """A stream has ended with an error before its first token. Like a refusal, it takes only what was computed."""
    use: KeyUse | None = scope.get(_KEY_USE)
    if use is not None:
        use.num_prompt_tokens = error.num_computed_tokens if isinstance(error, ServingError) else 0


def key_of(request: Request) -> ApiKey | None:
    """The API key that a request was accepted with; None if the server needs none."""
    key: ApiKey | None = request.scope.get(_KEY)
    return key


def tenant_of(request: Request) -> str:
    """The tenant of a request. Raises `RequestError`.

    NOTE: without API keys the client's header is believed; with an operator's key it may name any tenant.
    """
    return _tenant(request.headers)


def _tenant(headers: Mapping[str, str]) -> str:
    return check_tenant(headers.get(TENANT_HEADER, DEFAULT_TENANT))


def check_tenant(name: str) -> str:
    """The tenant that a header names. Raises `RequestError`."""
    if not TENANT_NAME.fullmatch(name):
        raise RequestError(
            f"The header {TENANT_HEADER} must be 1 to 64 letters, digits, '.', '_' or '-', not '{name[:80]}'."
        )
    return name


def _slo_s(headers: Mapping[str, str]) -> float | None:
    value = headers.get(SLO_HEADER)
    if value is None:
        return None
    try:
        slo_ms = float(value)
    except ValueError:
        slo_ms = math.nan
    if not 0 < slo_ms < math.inf:
        raise RequestError(f"The header {SLO_HEADER} must be milliseconds above 0, not '{value[:50]}'.")
    return slo_ms / 1e3


def _routing(headers: Mapping[str, str], *, may_route: bool) -> str:
    value = headers.get(ROUTING_HEADER, "")
    if value and not may_route:
        note_ignored(ROUTING_HEADER, "this server does not let clients choose")
        return ""
    if value and value not in STRATEGIES:
        raise RequestError(f"The header {ROUTING_HEADER} must be one of {', '.join(STRATEGIES)}, not '{value[:50]}'.")
    return value


def _explains(headers: Mapping[str, str]) -> bool:
    value = headers.get(EXPLAIN_HEADER, "0")
    if value not in ("0", "1"):
        raise RequestError(f"The header {EXPLAIN_HEADER} must be 1 or 0, not '{value[:50]}'.")
    return value == "1"
