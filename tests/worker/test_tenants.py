"""Tenants over HTTP on real engines: what one has cached, pinned or asked does not exist for another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.http_frontend import metrics_of
from tandem.frontend.http.exposition import registry_text
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.remote_backend import RemoteBackend
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import cache_scope
from tandem.protocol.messages import Role
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tandem.text.tokenizer import Tokenizer
from tests.support.cluster_harness import running_cluster
from tests.support.keys import api_keys_of

pytestmark = pytest.mark.cluster

KEYS = {"sk-a": "a", "sk-a2": "a", "sk-b": "b", "sk-c": "c", "sk-d": "d", "sk-ops": "*"}
TENANTS = Tenants(named={name: TenantPolicy(shared_cache=name in "cd") for name in "abcd"})
HINTS = "x-tandem-cache-hints"
PROMPT = "The ferry leaves from the north pier at noon. " * 8


class Always:
    reason = None


@dataclass
class Server:
    client: httpx.AsyncClient
    tokenizer: Tokenizer

    async def ask(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["authorization"] = f"Bearer {key}"
        return await self.client.request(method, path, json=body, headers=sent)

    async def post(self, path: str, key: str, body: Any, **headers: str) -> Any:
        response = await self.ask("POST", path, key, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def cached(self, key: str, *, headers: dict[str, str] | None = None, **fields: Any) -> int:
        """Prompt tokens of a completion that were cached."""
        body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True} | fields
        answer = await self.post("/v1/completions", key, body, **(headers or {}))
        return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    async def expected(self, key: str, **fields: Any) -> int:
        """Prompt tokens that the router would expect to be cached."""
        (decision,) = (await self.post("/v1/route/explain", key, {"prompt": PROMPT, "max_tokens": 2} | fields))["data"]
        placement = decision["placement"]
        return int(placement["num_prompt_tokens"] - placement["num_new_tokens"])

    async def pins(self, key: str, query: str = "", **headers: str) -> list[str]:
        response = await self.ask("GET", f"/v1/cache/pins{query}", key, **headers)
        assert response.status_code == 200, response.text
        return [pin["id"] for pin in response.json()["data"]]


@asynccontextmanager
async def serving(model: Path, folder: Path | None = None, *, keys: dict[str, str] = KEYS) -> AsyncIterator[Server]:
    """A server of one worker; with a `folder`, HTTP is answered by a frontend process."""
    config, metrics = RouterConfig(), CollectorRegistry()
    api_keys = api_keys_of(keys)
    workers, router = {"c": Role.COLOCATED}, {"routing": "cost"}
    async with running_cluster(model, workers, engine={"num_blocks": 2048}, router=router, tenants=TENANTS) as cluster:
        shown = metrics_of(cluster.flow, cluster.registry, cluster.sizing)
        tokenizer = Tokenizer(model)
        if folder is None:
            app = create_app(cluster.flow, tokenizer, config, shown, api_keys=api_keys, tenants=TENANTS)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                yield Server(client, tokenizer)
            return
        service = BackendService(cluster.flow, Always(), lambda: registry_text(shown, RouterConfig(), []))
        deciding = DecidingProcess(service, f"{folder}/deciding", api_keys)
        await deciding.start()
        deciding.expect("frontend")
        joining = JoinSettings(f"{folder}/deciding", "frontend", lambda: None, 20.0, api_keys.is_required)
        frontend = RemoteBackend(joining)
        try:
            await frontend.start()
            app = create_app(
                frontend,
                tokenizer,
                config,
                metrics,
                readiness=frontend,
                scrape=frontend.scrape,
                api_keys=frontend.api_keys,
                tenants=TENANTS,
            )
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                yield Server(client, tokenizer)
        finally:
            await frontend.close()
            await deciding.close()


@pytest.fixture(params=["one process", "two processes"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "two processes" else None


async def test_a_prompt_that_one_tenant_sent_is_cached_for_no_other(text_model: Path, folder: Path | None) -> None:
    async with serving(text_model, folder) as server:
        assert await server.cached("sk-a") == 0
        own = await server.cached("sk-a")
        assert own >= 256
        assert await server.cached("sk-a2") == own  # another key of the same tenant
        assert (await server.expected("sk-a"), await server.expected("sk-b")) == (own, 0)
        assert await server.cached("sk-b") == 0
        assert (
            await server.cached("sk-b", headers={"x_tandem_tenant": "a"}) == own
        )  # its own: the header is not believed
        assert (await server.cached("sk-c"), await server.cached("sk-d")) == (0, own)  # these two share


async def test_no_salt_leads_to_the_blocks_of_another_tenant(text_model: Path, folder: Path | None) -> None:
    async with serving(text_model, folder) as server:
        assert await server.cached("sk-a", cache_salt="salt") == 0
        assert await server.cached("sk-a") == 0  # a salt divides the tenant's own
        assert min(await server.cached("sk-a", cache_salt="salt"), await server.cached("sk-a")) >= 256
        scopes = {cache_scope(salt, tenant) for salt in ("", "salt") for tenant in ("a", "", None)}
        crafted = {"a\0salt", "tenant\1\0\0\0a", "\4\0\0\0salt\6\0\0\0tenant\1\0\0\0a"}
        foreign = {"", "salt", "a"} | scopes | crafted
        for key in ("sk-b", "sk-c"):
            for salt in foreign:
                assert await server.expected(key, cache_salt=salt) == 0, (key, salt)
                assert await server.cached(key, cache_salt=salt) == 0, (key, salt)


async def test_what_is_remembered_of_a_chats_tokens_is_its_tenants(text_model: Path) -> None:
    system = [{"role": "system", "content": PROMPT * 2}]  # long enough to be remembered
    async with serving(text_model) as server:
        memo = server.tokenizer._segments.cache
        for key, tenant in (("sk-a", "a"), ("sk-b", "b"), ("sk-c", ""), ("sk-d", "")):
            for path in ("/v1/chat/completions", "/v1/route/explain", "/v1/cache/pin", "/tokenize"):
                memo._ids.clear()
                salt = "" if path == "/tokenize" else "s"
                await server.post(path, key, {"messages": system} | ({"cache_salt": salt} if salt else {}))
                assert {scope for scope, _ in memo._ids} == {cache_scope(salt, tenant)}, path


async def test_without_keys_all_share_and_the_tenant_header_divides_nothing(text_model: Path) -> None:
    async with serving(text_model, keys={}) as server:
        assert await server.cached("") == 0
        own = await server.cached("")
        assert own >= 256
        assert await server.cached("", headers={"x_tandem_tenant": "b"}) == own
        assert await server.cached("", cache_salt="s") == 0
        assert await server.cached("", cache_salt="s") == own
        assert len((await server.ask("GET", "/v1/route/decisions", "")).json()["data"]) == 5
        assert "admission" in (await server.ask("GET", "/v1/pools", "")).json()
        assert 'tenant="' in (await server.ask("GET", "/metrics", "")).text


async def test_a_pin_exists_for_its_tenant_only(text_model: Path, folder: Path | None) -> None:
    async with serving(text_model, folder) as server:
        of_a = (await server.post("/v1/cache/pin", "sk-a", {"prompt": PROMPT, "ttl_s": 60}))["id"]
        of_c = (await server.post("/v1/cache/pin", "sk-c", {"prompt": PROMPT, "ttl_s": 60, "cache_salt": "s"}))["id"]
        assert (await server.pins("sk-a"), await server.pins("sk-a2")) == ([of_a], [of_a])
        assert (await server.pins("sk-c"), await server.pins("sk-c", "?cache_salt=")) == ([of_c], [])
        # Tenants that share cached blocks do not share their pins.
        assert (
            await server.pins("sk-b") == await server.pins("sk-d") == await server.pins("sk-d", "?cache_salt=s") == []
        )
        assert await server.pins("sk-ops") == [of_a, of_c]
        assert await server.pins("sk-ops", x_tandem_tenant="c") == [of_c]
        unknown = {"id": "pin-0", "to": "pool"}
        for key, pin_id in (("sk-b", of_a), ("sk-d", of_c), ("sk-a", of_c)):
            for path in ("/v1/cache/unpin", "/v1/cache/prefetch"):
                foreign = await server.ask("POST", path, key, unknown | {"id": pin_id})
                none = await server.ask("POST", path, key, unknown)
                assert foreign.status_code == none.status_code == 404
                assert foreign.text.replace(pin_id, "pin-0") == none.text
        assert await server.pins("sk-ops") == [of_a, of_c]
        await server.post("/v1/cache/prefetch", "sk-a", {"id": of_a})
        await server.post("/v1/cache/unpin", "sk-a2", {"id": of_a})
        await server.post("/v1/cache/unpin", "sk-ops", {"id": of_c})
        assert await server.pins("sk-ops") == []


async def test_hints_act_within_their_tenants_pins(text_model: Path, folder: Path | None) -> None:
    async with serving(text_model, folder) as server:
        body = {"prompt": PROMPT, "max_tokens": 2, "conversation_id": "chat"}
        hints = [
            {"target": "prefix", "action": "retain", "ttl_s": 1e300},
            {"target": "session", "action": "retain", "ttl_s": 60},
            {"target": "prefix", "action": "demote"},
            {"target": "prefix", "action": "prefetch"},
        ]
        shown = [
            (await server.ask("POST", "/v1/completions", key, body | {"cache_hints": hints})).headers[HINTS]
            for key in ("sk-a", "sk-a", "sk-a2")
        ]
        assert shown[0] == shown[1] == shown[2]
        first, second, third, fourth = json.loads(shown[0])
        assert (first, second) == ({"status": "clipped", "ttl_s": 3600.0}, {"status": "accepted"})
        assert third["status"] == fourth["status"] == "refused"
        assert "No worker has a tier" in third["reason"]
        of_a = (await server.ask("GET", "/v1/cache/pins", "sk-a")).json()["data"]
        assert len(of_a) == 4  # two of each key: the second request extended those of the first
        assert all(pin["num_tokens"] >= len(PROMPT) // 16 for pin in of_a)
        assert await server.pins("sk-b") == await server.pins("sk-c") == []
        await server.post("/v1/completions", "sk-b", body | {"cache_hints": hints})
        assert (await server.pins("sk-a"), len(await server.pins("sk-b"))) == ([pin["id"] for pin in of_a], 2)


async def test_a_conversation_of_the_same_name_is_another_tenants_own(text_model: Path) -> None:
    async with serving(text_model) as server:
        await server.cached("sk-c", conversation_id="chat")
        pins = [await server.post("/v1/cache/pin", f"sk-{one}", {"conversation_id": "chat"}) for one in "cdb"]
        assert [pin["num_tokens"] > 0 for pin in pins] == [True, False, False]
        await server.cached("sk-d", conversation_id="chat", prompt=PROMPT[:100])
        shown = [
            (await server.ask("GET", "/v1/cache/pins", key)).json()["data"][0]["num_tokens"] for key in ("sk-c", "sk-d")
        ]
        assert shown[0] == pins[0]["num_tokens"]
        assert 0 < shown[1] < shown[0]


async def test_a_tenant_is_shown_its_own_and_an_operator_everything(text_model: Path, folder: Path | None) -> None:
    async with serving(text_model, folder) as server:
        for key in ("sk-a", "sk-b", "sk-a2"):
            await server.cached(key)

        async def tenants(key: str, **headers: str) -> list[str]:
            answer = (await server.ask("GET", "/v1/route/decisions", key, **headers)).json()
            return [decision["tenant"] for decision in answer["data"]]

        assert await tenants("sk-a") == ["a", "a"]
        assert await tenants("sk-b", x_tandem_tenant="a") == ["b"]
        assert await tenants("sk-c") == []
        assert await tenants("sk-ops") == ["a", "b", "a"]
        assert await tenants("sk-ops", x_tandem_tenant="b") == ["b"]
        pools = (await server.ask("GET", "/v1/pools", "sk-a")).json()
        (worker,) = pools["roles"]["colocated"]
        assert (pools.keys(), worker) == ({"roles"}, {"worker_id": "c", "model": "tiny", "state": "ready"})
        everything = (await server.ask("GET", "/v1/pools", "sk-ops")).json()
        assert {"a", "b"} <= everything["admission"]["tenants"].keys()
        assert set(everything["cache_sizing"]["tenants"]) == {"a", "b"}
        assert everything["roles"]["colocated"][0]["num_cached_blocks"] > 0
        refused = await server.ask("POST", "/v1/pools/check", "sk-a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
        assert (await server.ask("POST", "/v1/pools/check", "sk-ops")).status_code == 200
        for key, is_all in (("", False), ("sk-a", False), ("sk-wrong", False), ("sk-ops", True)):
            text = (await server.ask("GET", "/metrics", key)).text
            assert ('tenant="' in text) is is_all
            assert "tandem_router_pins 0.0" in text


@pytest.mark.parametrize(
    "query", ["?cache_salt=%ff%00", "?cache_salt=%ED%A0%80", "?cache_salt=a&cache_salt=b", "?cache_salt=" + "s" * 9000]
)
async def test_any_salt_may_be_asked_for_in_a_list_of_pins(text_model: Path, query: str) -> None:
    async with serving(text_model) as server:
        assert await server.pins("sk-a", query) == []


async def test_half_a_character_is_not_a_salt(text_model: Path) -> None:
    async with serving(text_model) as server:
        for path, body in (
            ("/v1/completions", b'{"prompt": "a", "cache_salt": "\\ud800"}'),
            ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "cache_salt": "\\ud800"}'),
            ("/v1/cache/pin", b'{"prompt": "a", "cache_salt": "\\ud800"}'),
        ):
            headers = {"authorization": "Bearer sk-a", "content-type": "application/json"}
            response = await server.client.post(path, content=body, headers=headers)
            assert response.status_code == 400, response.text
