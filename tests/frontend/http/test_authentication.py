"""API keys: who is accepted, as which tenant, and which paths need no key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from tandem.frontend.http import authentication
from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.authentication import Authenticator, check_operator, visible_tenant
from tandem.frontend.http.connections import ADMIT
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.request_options import request_options, tenant_of
from tandem.frontend.keys.api_key import InvalidApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.protocol.config import RouterConfig
from tests.support.apps import app_client
from tests.support.keys import api_keys_of, stored_key

ORIGIN = {"origin": "http://page"}


def app_with(
    keys: dict[str, str], registry: CollectorRegistry | None = None, tells: Callable[[Request], Any] = tenant_of
) -> httpx.AsyncClient:
    """An app with these keys, given as their tenants, whose route reports what it sees of a request."""
    return client_of(api_keys_of(keys), tells, registry)


def client_of(
    keys: ApiKeys, tells: Callable[[Request], Any], registry: CollectorRegistry | None = None
) -> httpx.AsyncClient:
    config = RouterConfig(cors_allow_origins=("*",))
    app = RouterApp(config, FrontendMetrics(registry or CollectorRegistry()), keys)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def tell(request: Request) -> Any:
        await request.body()
        return tells(request)

    return app_client(app)


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in headers.items()}


async def test_a_known_key_is_accepted_and_may_belong_to_a_tenant() -> None:
    registry = CollectorRegistry()
    async with app_with({"any": "*", "ours": "search", "plain": "default"}, registry) as client:
        headers: dict[str, str]
        for headers, tenant in [
            (bearer("any"), "default"),
            (bearer("any", x_tandem_tenant="batch"), "batch"),
            (bearer("ours"), "search"),
            (bearer("ours", x_tandem_tenant="batch", X_Tandem_Tenant="other"), "search"),
            ({"authorization": "bearer  any "}, "default"),
            (bearer("plain"), "default"),
            (bearer("plain", x_tandem_tenant="batch"), "default"),
        ]:
            response = await client.post("/v1/completions", headers=headers)
            assert (response.status_code, response.json()) == (200, tenant)
        labels = {"endpoint": "/{path:path}", "status": "200"}
        assert registry.get_sample_value("tandem_router_requests_total", labels) == 7


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Bearer ", "Basic any", "any", "Bearer search"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/pools", "/v1/models", "/health/", "/v1/enginesx", "/x"])
async def test_unknown_keys_get_an_openai_shaped_401(given: str | None, path: str) -> None:
    async with app_with({"any": "default", "ours": "search"}) as client:
        headers = ORIGIN | ({"authorization": given} if given is not None else {})
        response = await client.post(path, headers=headers, content=b"x" * 100)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
        assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/engines", "/v1/engines/a"])
async def test_probes_are_open_and_the_admin_routes_have_their_own_token(path: str) -> None:
    async with app_with({"any": "default"}) as client:
        assert (await client.get(path)).status_code == 200


async def test_what_a_request_may_see_is_its_keys_tenant() -> None:
    async with app_with({"ops": "*", "ours": "search", "plain": "default"}, tells=visible_tenant) as client:
        for path in ("/v1/pools", "/metrics"):
            for headers, seen in [
                (bearer("ops"), None),
                (bearer("ops", x_tandem_tenant="batch"), "batch"),  # a gateway, on behalf of a client
                (bearer("ours"), "search"),
                (bearer("ours", x_tandem_tenant="batch"), "search"),
                (bearer("plain", x_tandem_tenant="*"), "default"),
            ]:
                assert (await client.get(path, headers=headers)).json() == seen
        for headers in ({}, bearer("wrong"), bearer("")):
            assert (await client.get("/metrics", headers=headers)).json() == ""
    async with client_of(ApiKeys(), visible_tenant) as client:  # without keys everything is visible
        assert (await client.get("/v1/pools", headers={"x-tandem-tenant": "batch"})).json() is None


async def test_routes_about_all_tenants_are_for_operators() -> None:
    async with app_with({"ops": "*", "ours": "search"}, tells=check_operator) as client:
        for headers in (bearer("ours"), bearer("ops", x_tandem_tenant="search")):
            refused = await client.post("/v1/pools/check", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
        assert (await client.post("/v1/pools/check", headers=bearer("ops"))).status_code == 200


async def test_an_operators_request_names_one_tenant_at_most() -> None:
    """Otherwise a gateway that adds the header without removing a client's own would let the client choose."""
    named = [("authorization", "Bearer any"), ("x-tandem-tenant", "victim"), ("x-tandem-tenant", "ours")]
    async with app_with({"any": "*"}) as client:
        refused = await client.get("/x", headers=named)
        served = await client.get("/x", headers=named[:2])
        for name in ("", "^8", "x" * 65):
            malformed = await client.get("/x", headers=[named[0], ("x-tandem-tenant", name)])
            assert malformed.status_code == 400, name
    assert (refused.status_code, served.status_code) == (400, 200)
    assert "x-tandem-tenant was sent 2 times" in refused.text


async def test_a_key_may_come_as_clients_of_the_messages_api_send_it() -> None:
    async with app_with({"sk-one": "a"}) as client:
        assert (await client.get("/v1/x", headers={"x-api-key": "sk-one"})).json() == "a"
        assert (await client.get("/v1/x", headers={"x-api-key": "sk-two"})).status_code == 401
        both = {"x-api-key": "sk-one", "authorization": "Bearer sk-two"}
        assert (await client.get("/v1/x", headers=both)).status_code == 401


async def test_a_server_that_needs_keys_and_knows_none_refuses_everybody() -> None:
    async with client_of(ApiKeys(is_required=True), tenant_of) as client:
        for headers in ({}, bearer(""), bearer("any"), bearer("*")):
            assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_expired_and_revoked_keys_are_refused_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at, registry = datetime(2026, 5, 1, tzinfo=UTC), CollectorRegistry()
    keys = [stored_key("sk-a", "a", id="k-a", expires=at), stored_key("sk-b", "b", id="k-b", revoked=at)]
    now_s = at.timestamp() - 0.001
    monkeypatch.setattr(authentication, "time", SimpleNamespace(time=lambda: now_s, monotonic=lambda: 5.0))
    async with client_of(ApiKeys(keys, is_required=True), visible_tenant, registry) as client:
        assert (await client.get("/v1/models", headers=bearer("sk-a"))).status_code == 200
        now_s += 0.001  # the clock is looked at for each request
        for secret, key_id, state in [("sk-a", "k-a", "expired"), ("sk-b", "k-b", "revoked")] * 2:
            refused = await client.get("/v1/models", headers=bearer(secret))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.json()["error"]["message"] == f"The API key {key_id} is {state}."
        assert (await client.get("/metrics", headers=bearer("sk-b"))).json() == ""  # open, and it shows nothing more
        now_s -= 0.001  # a clock that was wrong and is set right
        assert (await client.get("/v1/models", headers=bearer("sk-a"))).status_code == 200
    for key_id, reason in [("k-a", "expired"), ("k-b", "revoked")]:
        labels = {"key_id": key_id, "reason": reason}
        assert registry.get_sample_value("tandem_router_refused_keys_total", labels) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "requests with the API key k-a are refused: expired",
        "requests with the API key k-b are refused: revoked",
    ]


async def test_a_change_of_the_keys_counts_from_the_next_request_on() -> None:
    keys = api_keys_of({"sk-a": "a"})
    async with client_of(keys, tenant_of) as client:
        assert (await client.get("/x", headers=bearer("sk-a"))).json() == "a"
        keys.replace([stored_key("sk-b", "b")])
        assert (await client.get("/x", headers=bearer("sk-a"))).status_code == 401
        assert (await client.get("/x", headers=bearer("sk-b"))).json() == "b"
        keys.replace([])
        assert (await client.get("/x", headers=bearer("sk-b"))).status_code == 401


async def test_a_keys_priority_counts_where_the_request_names_none() -> None:
    def priorities(request: Request) -> list[int]:
        return [request_options(request, named).service_class.priority for named in (None, 0, -3)]

    keys = ApiKeys([stored_key("sk-a", "a", priority=7), stored_key("sk-b", "b")], is_required=True)
    async with client_of(keys, priorities) as client:
        assert (await client.get("/x", headers=bearer("sk-a"))).json() == [7, 0, -3]
        assert (await client.get("/x", headers=bearer("sk-b"))).json() == [0, 0, -3]
    async with client_of(ApiKeys(), priorities) as client:
        assert (await client.get("/x")).json() == [0, 0, -3]


@pytest.mark.parametrize(
    ("keys", "path", "key", "admitted"),
    [
        ({"ours": "search"}, "/v1/models", "ours", [True]),
        ({"ours": "search"}, "/metrics", "ours", [True]),
        ({"ours": "search"}, "/metrics", "", []),
        ({"ours": "search"}, "/dashboard/x", "wrong", []),
        ({"ours": "search"}, "/v1/models", "wrong", []),
        ({}, "/v1/models", "", [False]),
        ({}, "/metrics", "", []),
        ({}, "/dashboard", "any", []),
    ],
)
def test_the_server_learns_which_clients_have_a_key(
    keys: dict[str, str], path: str, key: str, admitted: list[bool]
) -> None:
    told = list[bool]()
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    extensions = {ADMIT: {"admit": lambda *, has_key: told.append(has_key)}}
    authenticator = Authenticator(api_keys_of(keys), FrontendMetrics(CollectorRegistry()))
    with contextlib.suppress(InvalidApiKey):
        authenticator.authenticate({"type": "http", "path": path, "headers": headers, "extensions": extensions})
    assert told == admitted
