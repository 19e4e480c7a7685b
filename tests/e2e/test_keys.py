"""API keys of a real server with two router processes: created, used, limited and revoked while it runs."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from tests.support.key_scenario import Keys, exercise_keys
from tests.support.server import started, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def test_keys_are_made_limited_and_revoked_under_load(text_model: Path, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json", tmp_path / "audit.jsonl")
    operator, operator_id = keys.create("--operator")
    keys.audit_log.unlink()
    flags = ("--api-key-file", str(keys.path), "--audit-log", str(keys.audit_log), "--pool-bytes", "20000000")
    with started(text_model, tmp_path, "--router-processes", "2", *flags) as server:
        url = server.wait_ready().url
        took_s = exercise_keys(url, keys, operator)
        print(f"a revoked key was last accepted after {took_s:.2f} s")

        an_openai_client_waits_as_told(url, keys)
        headers = {"authorization": f"Bearer {operator}"}
        change = {"worker": "prefill-0", "role": "decode"}
        changed = httpx.post(f"{url}/v1/pools/roles", json=change, headers=headers, timeout=60)
        pin = httpx.post(f"{url}/v1/cache/pin", json={"prompt": "secret words " * 20}, headers=headers, timeout=60)
        assert pin.status_code == 200, pin.text
        assert server.stop() == 0
    audited = keys.audited()
    result = "ok" if changed.status_code == 200 else changed.json()["error"]["code"]
    assert audited["role.change", result] == audited["pin.create", "ok"] == 1
    text = keys.audit_log.read_text()
    assert f'"key_id":"{operator_id}"' in text
    assert operator not in text
    assert "secret words" not in text
    assert operator not in server.output


def an_openai_client_waits_as_told(url: str, keys: Keys) -> None:
    """A key of 60 requests a minute: once they are used, the client's own retry comes a second later, and is served."""
    secret, key_id = keys.create("--requests-per-minute", "60")

    def client(max_retries: int) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=max_retries, timeout=60)

    def complete(max_retries: int) -> openai.types.Completion:
        with client(max_retries) as one:
            return one.completions.create(model=one.models.list().data[0].id, prompt="a b c", max_tokens=1)

    def use_up() -> None:
        for _ in range(1000):
            complete(0)

    until(lambda: httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {secret}"}).is_success, 20.0)
    with pytest.raises(openai.RateLimitError) as refused:
        use_up()
    assert refused.value.code == "rate_limit_exceeded"
    assert f"The API key {key_id} has used up its limit requests_per_minute=60" in str(refused.value)
    assert complete(5).choices[0].text
