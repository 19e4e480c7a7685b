"""Authentication by API key: a request's tenant, and what the request may see."""

from __future__ import annotations

import logging
import math
import time

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tandem.frontend.http.connections import ADMIT
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.request_options import TENANT_HEADER, check_tenant, note_key, note_key_use
from tandem.frontend.keys.api_key import OPERATOR, ApiKey, InvalidApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import KeyUse
from tandem.protocol.errors import RequestError

logger = logging.getLogger(__name__)

# For load balancers and Prometheus; "/" leads to the dashboard.
OPEN_PATHS = {"/health", "/ready", "/metrics", "/"}
# With everything below them. The admin routes check a token of their own, in the same header. Pages hold no data.
_OPEN_TREES = ("/v1/engines/", "/dashboard/", "/docs/")
_VISIBLE_TENANT = "tandem.visible_tenant"  # key in the ASGI scope: a tenant; "" = no tenant; None = all tenants
_TENANT_HEADER = TENANT_HEADER.encode()
_LOG_INTERVAL_S = 60.0  # between two lines about the same key and reason


class OperatorKeyRequired(RequestError):
    """The request concerns all tenants, but its key belongs to one tenant."""

    status = 403
    code = "operator_key_required"


class Authenticator:
    """Finds out whose request it is, and whether its key's limits allow it.

    Refused requests are counted, and logged by the id of their key.
    """

    def __init__(self, api_keys: ApiKeys, metrics: FrontendMetrics) -> None:
        self._api_keys = api_keys
        self._metrics = metrics
        self._logged_s: dict[tuple[str, str], float] = {}  # when a refusal was logged, by the key's id and the reason

    def authenticate(self, scope: Scope) -> ApiKey | None:
        """Set the request's tenant from its key, and note what it may see. Raises `InvalidApiKey`, `RequestError`.

        Returns the key if there is one. In a server that needs no keys everyone sees everything.
        """
        scope[_VISIBLE_TENANT] = None
        if not self._api_keys.is_required:
            if not _is_open(scope["path"]):
                _admit(scope, has_key=False)
            return None
        headers = Headers(scope=scope)
        key = self._key_of(headers, is_open=_is_open(scope["path"]))
        if key is None:
            scope[_VISIBLE_TENANT] = ""
            return None
        note_key(scope, key)
        _admit(scope, has_key=True)
        if key.tenant == OPERATOR:
            # If an operator's key names a tenant, as a gateway does, it sees what that tenant would see.
            named = headers.getlist(TENANT_HEADER)
            if len(named) > 1:  # a gateway may have added its header to a client's, who would choose the tenant
                raise RequestError(f"The header {TENANT_HEADER} was sent {len(named)} times; send it once.")
            scope[_VISIBLE_TENANT] = check_tenant(named[0]) if named else None
        else:
            scope[_VISIBLE_TENANT] = key.tenant
            others = [header for header in scope["headers"] if header[0] != _TENANT_HEADER]
            scope["headers"] = [*others, (_TENANT_HEADER, key.tenant.encode())]
        return key

    async def begin_use(self, scope: Scope, key: ApiKey) -> KeyUse | None:
        """Count the request against the limits of its key; None if nothing limits it. Raises `RateLimitExceeded`.

        Only requests that cost work (POST) are limited; reading models, pools and metrics is not.
        """
        if scope["method"] != "POST":
            return None
        use = await self._api_keys.begin(key)
        if use is not None:
            note_key_use(scope, use)
        return use

    def note_refusal(self, key_id: str, reason: str) -> None:
        """Count a refused request, and log it if the last line about this key is old enough."""
        self._metrics.refused_keys.labels(key_id, reason).inc()
        now = time.monotonic()
        # Unknown keys are only counted, not logged: anybody can send any number of them.
        if key_id and now >= self._logged_s.get((key_id, reason), -math.inf) + _LOG_INTERVAL_S:
            self._logged_s[key_id, reason] = now
            logger.warning("requests with the API key %s are refused: %s", key_id, reason)

    def _key_of(self, headers: Headers, *, is_open: bool) -> ApiKey | None:
        """The valid key of a request; None if it has none and the path is open. Raises `InvalidApiKey`."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not scheme:  # clients of `/v1/messages` send their key like this
            scheme, secret = "bearer", headers.get("x-api-key", "")
        key = self._api_keys.find(secret.strip()) if scheme.lower() == "bearer" else None
        if key is not None and (state := key.state(time.time())) != "active":
            if not is_open:
                raise self._refused(key.id, state, f"The API key {key.id} is {state}.")
            return None
        if key is None and not is_open:
            raise self._refused("", "unknown", "The API key is missing or wrong: send Authorization: Bearer KEY.")
        return key

    def _refused(self, key_id: str, reason: str, message: str) -> InvalidApiKey:
        self.note_refusal(key_id, reason)
        return InvalidApiKey(message)


def visible_tenant(request: Request) -> str | None:
    """The tenant whose requests and pins this request may see; None = those of all tenants."""
    tenant: str | None = request.scope[_VISIBLE_TENANT]
    return tenant


def check_operator(request: Request) -> None:
    """Raise `OperatorKeyRequired` if the request may see only one tenant."""
    if visible_tenant(request) is not None:
        raise OperatorKeyRequired(
            f"{request.url.path} concerns all tenants: send an operator's key (tandem keys create --operator), without "
            f"the header {TENANT_HEADER}."
        )


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or f"{path}/".startswith(_OPEN_TREES)


def _admit(scope: Scope, *, has_key: bool) -> None:
    if (extension := (scope.get("extensions") or {}).get(ADMIT)) is not None:
        extension["admit"](has_key=has_key)
