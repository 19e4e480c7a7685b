"""The ASGI layer that asks clients for their API keys."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import RequestError
from router.api_keys import key_digest
from router.openai.errors import serving_error_response
from router.openai.wishes import TENANT_HEADER

__all__ = ["KeyCheck"]

# For load balancers and Prometheus. The admin routes ask for a token of their own, in the same header.
_OPEN_PATHS = {"/health", "/ready", "/metrics"}
_ADMIN_PATH = "/v1/engines"


class InvalidApiKey(RequestError):
    """The request has no key, or one that is not in the file."""

    status = 401
    code = "invalid_api_key"


class KeyCheck:
    """Lets requests with a known key through, as its tenant."""

    def __init__(self, app: ASGIApp, tenants: Mapping[bytes, str]) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        tenant = self._tenants.get(key_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            error = InvalidApiKey("The API key is missing or wrong: send Authorization: Bearer KEY.")
            await serving_error_response(error)(scope, receive, send)
            return
        if tenant:
            name = TENANT_HEADER.encode()
            scope["headers"] = [header for header in scope["headers"] if header[0] != name] + [(name, tenant.encode())]
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path == _ADMIN_PATH or path.startswith(_ADMIN_PATH + "/")
