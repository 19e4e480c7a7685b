"""Tenants of a real server with several router processes: nothing of one is found by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.keys import make_key_file
from tests.support.server import started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PROMPT = "The ferry leaves from the north pier at noon. " * 8
TENANTS = "[tenants.c]\nshared_cache = true\n[tenants.d]\nshared_cache = true\n"


def test_tenants_find_nothing_of_each_other(text_model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    keys = make_key_file(tmp_path / "keys", {"sk-a": "a", "sk-b": "b", "sk-c": "c", "sk-d": "d", "sk-ops": "*"})
    tenants.write_text(TENANTS)
    flags = ("--api-key-file", str(keys), "--tenants", str(tenants), "--pool-bytes", "20000000")
    with started(text_model, tmp_path, "--router-processes", "2", *flags) as server:
        url = server.wait_ready().url

        def ask(method: str, path: str, key: str, body: Any = None) -> httpx.Response:
            # A connection of its own, so that either process may get it.
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(method, url + path, json=body, headers=headers, timeout=60)

        def cached(key: str, **fields: Any) -> int:
            body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True} | fields
            answer = ask("POST", "/v1/completions", key, body)
            assert answer.status_code == 200, answer.text
            return int((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

        assert cached("sk-a") == 0
        assert min(cached("sk-a") for _ in range(4)) >= 256
        assert [cached("sk-b"), cached("sk-b", cache_salt="a"), cached("sk-c")] == [0, 0, 0]
        assert cached("sk-d") >= 256
        pin = ask("POST", "/v1/cache/pin", "sk-a", {"prompt": PROMPT}).json()["id"]
        assert {ask("POST", "/v1/cache/unpin", "sk-b", {"id": pin}).status_code for _ in range(4)} == {404}
        shown = [ask("GET", "/v1/cache/pins", key).json()["data"] for key in ("sk-a", "sk-b", "sk-ops")]
        assert [[one["id"] for one in pins] for pins in shown] == [[pin], [], [pin]]
        decisions = ask("GET", "/v1/route/decisions", "sk-b").json()["data"]
        assert {decision["tenant"] for decision in decisions} == {"b"}
        assert 'tenant="' not in ask("GET", "/metrics", "sk-a").text
        assert 'tenant="c"' in ask("GET", "/metrics", "sk-ops").text
        assert server.stop() == 0
