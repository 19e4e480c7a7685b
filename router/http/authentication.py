"""Authentication by API key: a request's tenant, and what the request may see."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tandem.protocol.errors import RequestError
from tandem.router.http.api_keys import ANY_TENANT, key_digest
from tandem.router.http.request_options import TENANT_HEADER

__all__ = ["InvalidApiKey", "OperatorKeyRequired", "authenticate", "check_operator", "visible_tenant"]

# For load balancers and Prometheus. The admin routes check a token of their own, in the same header.
_OPEN_PATHS = {"/health", "/ready", "/metrics"}
_ADMIN_PATH = "/v1/engines"
_VISIBLE_TENANT = "tandem.visible_tenant"  # key in the ASGI scope: a tenant; "" = no tenant; None = all tenants
_TENANT_HEADER = TENANT_HEADER.encode()


class InvalidApiKey(RequestError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class OperatorKeyRequired(RequestError):
    """The request concerns all tenants, but its key belongs to one tenant."""

    status = 403
    code = "operator_key_required"


def authenticate(scope: Scope, tenants: Mapping[bytes, str]) -> None:
    """Set the request's tenant from its key, and note what it may see. Raises `InvalidApiKey`, `RequestError`.

    `tenants` are by key digest. If there are none, no key is needed and everyone sees everything.
    """
    scope[_VISIBLE_TENANT] = None
    if not tenants:
        return
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if not scheme:  # clients of `/v1/messages` send their key so
        scheme, key = "bearer", headers.get("x-api-key", "")
    tenant = tenants.get(key_digest(key.strip())) if scheme.lower() == "bearer" else None
    if tenant is None:
        if not _is_open(scope["path"]):
            raise InvalidApiKey("The API key is missing or wrong: send Authorization: Bearer KEY.")
        scope[_VISIBLE_TENANT] = ""
    elif tenant == ANY_TENANT:
        # An operator that names a tenant, as a gateway does, sees what that tenant would.
        named = headers.getlist(TENANT_HEADER)
        if len(named) > 1:  # a gateway may have added its header to a client's, and the client would choose the tenant
            raise RequestError(f"The header {TENANT_HEADER} was sent {len(named)} times; send it once.")
        scope[_VISIBLE_TENANT] = named[0] if named else None
    else:
        scope[_VISIBLE_TENANT] = tenant
        others = [header for header in scope["headers"] if header[0] != _TENANT_HEADER]
        scope["headers"] = [*others, (_TENANT_HEADER, tenant.encode())]


def visible_tenant(request: Request) -> str | None:
    """The tenant whose requests and pins this request may see; None = those of all tenants."""
    tenant: str | None = request.scope[_VISIBLE_TENANT]
    return tenant


def check_operator(request: Request) -> None:
    """Raise `OperatorKeyRequired` if the request may see only one tenant."""
    if visible_tenant(request) is not None:
        raise OperatorKeyRequired(
            f"{request.url.path} concerns all tenants: send an operator's key (one with {ANY_TENANT} in the file of "
            f"keys), without the header {TENANT_HEADER}."
        )


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path == _ADMIN_PATH or path.startswith(_ADMIN_PATH + "/")
