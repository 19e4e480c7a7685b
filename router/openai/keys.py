"""API keys of clients."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from protocol.errors import RequestError
from router.api_keys import key_digest
from router.openai.wishes import TENANT_HEADER

__all__ = ["InvalidApiKey", "check_key"]

# For load balancers and Prometheus. The admin routes ask for a token of their own, in the same header.
_OPEN_PATHS = {"/health", "/ready", "/metrics"}
_ADMIN_PATH = "/v1/engines"


class InvalidApiKey(RequestError):
    """The request has no key, or one that is not in the file."""

    status = 401
    code = "invalid_api_key"


def check_key(scope: Scope, tenants: Mapping[bytes, str]) -> None:
    """Make a request its key's tenant's, if the key has one. `tenants` are by digest. Raises `InvalidApiKey`."""
    if _is_open(scope["path"]):
        return
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    tenant = tenants.get(key_digest(key.strip())) if scheme.lower() == "bearer" else None
    if tenant is None:
        raise InvalidApiKey("The API key is missing or wrong: send Authorization: Bearer KEY.")
    if tenant:
        name = TENANT_HEADER.encode()
        scope["headers"] = [header for header in scope["headers"] if header[0] != name] + [(name, tenant.encode())]


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path == _ADMIN_PATH or path.startswith(_ADMIN_PATH + "/")
