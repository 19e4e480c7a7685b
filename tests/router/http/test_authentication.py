"""API keys: who is accepted, as which tenant, and which paths need no key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.router.http.api_keys import key_digest, load_api_keys
from tandem.router.http.app import RouterApp
from tandem.router.http.authentication import check_operator, visible_tenant
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.request_options import tenant_of

ORIGIN = {"origin": "http://page"}


def app_with(
    tmp_path: Path, keys: str, registry: CollectorRegistry | None = None, tells: Callable[[Request], Any] = tenant_of
) -> httpx.AsyncClient:
    """An app with these keys, whose route reports what it sees of a request."""
    path = tmp_path / "keys"
    path.write_text(keys)
    return client_of(load_api_keys(str(path)), tells, registry)


def client_of(
    keys: dict[bytes, str], tells: Callable[[Request], Any], registry: CollectorRegistry | None = None
) -> httpx.AsyncClient:
    config = RouterConfig(cors_allow_origins=("*",))
    app = RouterApp(config, EdgeMetrics(registry or CollectorRegistry()), keys)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def tell(request: Request) -> Any:
        await request.body()
        return tells(request)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in headers.items()}


async def test_a_known_key_is_accepted_and_may_belong_to_a_tenant(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with app_with(tmp_path, "# clients\n\nany *  # an operator\nours search\nplain\n", registry) as client:
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
        assert (
            registry.get_sample_value("tandem_router_requests_total", {"endpoint": "/{path:path}", "status": "200"})
            == 7
        )


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Bearer ", "Basic any", "any", "Bearer search"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/pools", "/v1/models", "/health/", "/v1/enginesx", "/"])
async def test_unknown_keys_get_an_openai_shaped_401(tmp_path: Path, given: str | None, path: str) -> None:
    async with app_with(tmp_path, "any\nours search\n") as client:
        headers = ORIGIN | ({"authorization": given} if given is not None else {})
        response = await client.post(path, headers=headers, content=b"x" * 100)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
        assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/engines", "/v1/engines/a"])
async def test_probes_are_open_and_the_admin_routes_have_their_own_token(tmp_path: Path, path: str) -> None:
    async with app_with(tmp_path, "any\n") as client:
        assert (await client.get(path)).status_code == 200


async def test_what_a_request_may_see_is_its_keys_tenant(tmp_path: Path) -> None:
    async with app_with(tmp_path, "ops *\nours search\nplain\n", tells=visible_tenant) as client:
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


async def test_without_keys_everything_is_visible() -> None:
    async with client_of({}, visible_tenant) as client:
        assert (await client.get("/v1/pools", headers={"x-tandem-tenant": "batch"})).json() is None


async def test_routes_about_all_tenants_are_for_operators(tmp_path: Path) -> None:
    async with app_with(tmp_path, "ops *\nours search\n", tells=check_operator) as client:
        for headers in (bearer("ours"), bearer("ops", x_tandem_tenant="search")):
            refused = await client.post("/v1/pools/check", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
        assert (await client.post("/v1/pools/check", headers=bearer("ops"))).status_code == 200


def test_without_a_file_no_key_is_needed() -> None:
    assert load_api_keys("") == {}


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("any\n", encoding="utf-8-sig")
    assert load_api_keys(str(path)) == {key_digest("any"): "default"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no keys"),
        ("# nothing\n", "has no keys"),
        ("secret a b\n", "line 1 must be a key and at most a tenant"),
        ("good\nsecret no/name\n", "line 2 must be"),
        ("secret **\n", "line 1 must be"),
        ("good\nsecreté\n", "the key in line 2 has characters that are not visible ASCII"),
        ("sec\0ret\n", "the key in line 1 has characters that are not visible ASCII"),
        ("se\x7fcret\n", "the key in line 1 has characters that are not visible ASCII"),
        ("Bearer secret\n", "line 1 begins with 'Bearer', which is no key; write the key alone"),
        ("secret\nother\nsecret t\n", "the key in line 3 is listed twice"),
    ],
)
def test_an_error_about_the_file_does_not_show_the_key(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected) as raised:
        load_api_keys(str(path))
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_api_keys(str(tmp_path / "none"))


async def test_an_operators_request_names_one_tenant_at_most(tmp_path: Path) -> None:
    """Otherwise a gateway that adds the header without removing a client's own would let the client choose."""
    named = [("authorization", "Bearer any"), ("x-tandem-tenant", "victim"), ("x-tandem-tenant", "ours")]
    async with app_with(tmp_path, "any *") as client:
        refused = await client.get("/", headers=named)
        served = await client.get("/", headers=named[:2])
    assert (refused.status_code, served.status_code) == (400, 200)
    assert "x-tandem-tenant was sent 2 times" in refused.text


async def test_a_key_may_come_as_clients_of_the_messages_api_send_it(tmp_path: Path) -> None:
    async with app_with(tmp_path, "sk-one a\n") as client:
        assert (await client.get("/v1/x", headers={"x-api-key": "sk-one"})).json() == "a"
        assert (await client.get("/v1/x", headers={"x-api-key": "sk-two"})).status_code == 401
        both = {"x-api-key": "sk-one", "authorization": "Bearer sk-two"}
        assert (await client.get("/v1/x", headers=both)).status_code == 401
