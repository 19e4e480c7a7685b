"""API keys of a real server with two router processes: created, used, limited and revoked while it runs."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.key_scenario import Keys, exercise_keys
from tests.support.server import started

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
