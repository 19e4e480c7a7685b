"""API keys of clients: whose a request is, and what it may see."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tandem.protocol.errors import RequestError
from tandem.router.http.api_keys import ANY_TENANT, key_digest
from tandem.router.http.request_options import TENANT_HEADER

__all__ = ["InvalidApiKey", "OperatorKeyRequired", "authenticate", "check_operator", "visible_tenant"]

# For load balancers and Prometheus. The admin routes ask for a token of their own, in the same header.
_OPEN_PATHS = {"/health", "/ready", "/metrics"}
_ADMIN_PATH = "/v1/engines"
_SEES = "tandem.sees"  # in the ASGI scope: a tenant, "" = none, None = all
_TENANT_HEADER = TENANT_HEADER.encode()


class InvalidApiKey(RequestError):
    """The request has no key, or one that is not in the file."""

    status = 401
    code = "invalid_api_key"


class OperatorKeyRequired(RequestError):
    """The request's key is a tenant's, and what it asks for concerns all tenants."""

    status = 403
    code = "operator_key_required"


def authenticate(scope: Scope, tenants: Mapping[bytes, str]) -> None:
    """Note what a request may see, and make it its key's tenant's. Raises `InvalidApiKey`, `RequestError`.

    `tenants` are by digest of their keys. Where there are none, no key is asked for and everyone sees everything.
    """
    scope[_SEES] = None
    if not tenants:
        return
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    tenant = tenants.get(key_digest(key.strip())) if scheme.lower() == "bearer" else None
    if tenant is None:
        if not _is_open(scope["path"]):
            raise InvalidApiKey("The API key is missing or wrong: send Authorization: Bearer KEY.")
        scope[_SEES] = ""
    elif tenant == ANY_TENANT:
        # An operator that speaks for a tenant, as a gateway does, sees what that tenant would.
        named = headers.getlist(TENANT_HEADER)
        if len(named) > 1:  # a gateway that adds the header to a client's own: the client would choose the tenant
            raise RequestError(f"The header {TENANT_HEADER} is there {len(named)} times; send it once.")
        scope[_SEES] = named[0] if named else None
    else:
        scope[_SEES] = tenant
        others = [header for header in scope["headers"] if header[0] != _TENANT_HEADER]
        scope["headers"] = [*others, (_TENANT_HEADER, tenant.encode())]


def visible_tenant(request: Request) -> str | None:
    """The tenant whose requests and pins this one may see; None = all tenants'."""
    tenant: str | None = request.scope[_SEES]
    return tenant


def check_operator(request: Request) -> None:
    """Raise `OperatorKeyRequired` for a request that may see one tenant only."""
    if visible_tenant(request) is not None:
        raise OperatorKeyRequired(
            f"{request.url.path} concerns all tenants: send the key of an operator, one with {ANY_TENANT} in the file "
            f"of keys, without the header {TENANT_HEADER}."
        )


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path == _ADMIN_PATH or path.startswith(_ADMIN_PATH + "/")
