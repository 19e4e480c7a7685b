"""The audit log: what operators do, one line each, and never a secret; a disk that fails stops nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.keys import audit_log
from tandem.frontend.keys import key_file as key_file_module
from tandem.frontend.keys.audit_log import MAX_LINE_BYTES, AuditLog, append_line, audit_line, check_audit_log
from tandem.frontend.keys.key_file import KeyFile
from tandem.frontend.keys.store import create_key, revoke_key, write_keys
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.text.tokenizer import Tokenizer
from tests.support.audit_writer import append_many
from tests.support.engines_harness import routing, spec_of
from tests.support.fake_backend import FakeBackend
from tests.support.fake_openai import fake_openai
from tests.support.keys import api_keys_of, make_key_file, stored_key
from tests.support.waiting import eventually

SPAWN = multiprocessing.get_context("spawn")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def brief(path: Path) -> list[tuple[str, str, str, str]]:
    return [(one["action"], one["key_id"], one["target"], one["result"]) for one in lines_of(path)]


def test_lines_are_appended_in_order_to_a_file_that_only_the_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    for first in (0, 3):  # two runs of a server
        log = AuditLog(str(path))
        for number in range(first, first + 3):
            log.note("role.change", key_id="k-1", target=f"worker {number}", client="10.0.0.1")
        log.close()
    assert [one["target"] for one in lines_of(path)] == [f"worker {number}" for number in range(6)]
    assert set(lines_of(path)[0]) == {"time", "action", "key_id", "target", "result", "client"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_path_nothing_is_started() -> None:
    threads = set(threading.enumerate())
    log = AuditLog("")
    log.note("role.change")
    assert set(threading.enumerate()) <= threads
    log.close()


def test_a_line_is_bounded_and_one_line_whatever_is_in_it() -> None:
    hostile = "a\n\x00\ud800\x1b" * 10_000
    line = audit_line("x", target=hostile, result=hostile, client=hostile, details={"created": ["k"] * 10_000})
    assert len(line) <= MAX_LINE_BYTES
    assert (line.count(b"\n"), len(json.loads(line)["target"])) == (1, 200)


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    writers = [SPAWN.Process(target=append_many, args=(str(path), name, 300)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    lines = lines_of(path)
    for name in ("a", "b", "c"):
        assert [one["target"][150:] for one in lines if one["action"] == name] == [str(n) for n in range(300)]


def test_a_disk_that_fails_is_reported_once_counted_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost = tmp_path / "audit", []
    log = AuditLog(str(path), lambda: lost.append(1))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:10]))  # the disk is full
    for _ in range(5):
        log.note("role.change", target="lost")
    log.close()
    monkeypatch.setattr(os, "write", real_write)
    log.note("role.change", target="kept")
    log.close()
    assert (len(lost), [record.levelno for record in caplog.records]) == (5, [logging.ERROR, logging.WARNING])
    assert f"THE AUDIT LOG {path} CANNOT BE WRITTEN" in caplog.text
    assert json.loads(path.read_text().splitlines()[-1])["target"] == "kept"  # not glued to the torn line before


def test_a_disk_that_hangs_delays_nobody_and_holds_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, lost = threading.Event(), []
    monkeypatch.setattr(audit_log, "MAX_WAITING", 5)
    monkeypatch.setattr(audit_log, "append_line", lambda path, line: go_on.wait(60) and append_line(path, line))
    log = AuditLog(str(tmp_path / "audit"), lambda: lost.append(1))
    for number in range(50):
        log.note("role.change", target=str(number))
    assert 44 <= len(lost) <= 45  # one may be in the thread's hands
    go_on.set()
    log.close()
    assert len(lines_of(tmp_path / "audit")) == 50 - len(lost)


def test_a_file_that_cannot_be_written_is_reported_before_anything_starts(tmp_path: Path) -> None:
    check_audit_log("")
    check_audit_log(str(tmp_path / "new"))
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("none/audit", "No such file"), ("", "Is a directory"), ("pipe", "No such device")):
        with pytest.raises(ConfigError, match=f"audit_log=.* cannot be written: {reason}.*; give a file"):
            check_audit_log(str(tmp_path / name))


async def test_what_operators_do_is_noted_and_what_tenants_do_is_not(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, secret_prompt = tmp_path / "audit", "the prompt that nobody may see"
    backend = FakeBackend(tokenizer)
    keys = api_keys_of({"sk-ops": "*", "sk-a": "a"})
    app = create_app(backend, tokenizer, RouterConfig(audit_log=str(path)), CollectorRegistry(), api_keys=keys)
    transport = httpx.ASGITransport(app, client=("10.1.2.3", 4))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def send(secret: str, path: str, body: dict[str, Any]) -> int:
            headers = {"authorization": f"Bearer {secret}", "x-tandem-tenant": "b"} if path else {}
            if path == "/v1/pools/roles":
                del headers["x-tandem-tenant"]
            return (await client.post(path, json=body, headers=headers)).status_code

        assert await send("sk-ops", "/v1/pools/roles", {"worker": "p", "role": "decode"}) == 200
        assert await send("sk-ops", "/v1/pools/roles", {"worker": "none", "role": "decode"}) == 404
        assert await send("sk-a", "/v1/pools/roles", {"worker": "p", "role": "decode"}) == 403
        for secret in ("sk-ops", "sk-a"):
            assert await send(secret, "/v1/cache/pin", {"prompt": secret_prompt}) == 200
        assert await send("sk-ops", "/v1/cache/prefetch", {"id": "pin-1"}) == 200
        assert await send("sk-ops", "/v1/cache/unpin", {"id": "pin-1"}) == 200
        assert await send("sk-ops", "/v1/cache/unpin", {"id": "pin-1"}) == 404
        assert await send("sk-a", "/v1/cache/unpin", {"id": "pin-2"}) == 200
    await asyncio.to_thread(app.audit_log.close)
    assert brief(path) == [
        ("role.change", "sk-ops", "p -> decode", "ok"),
        ("role.change", "sk-ops", "none -> decode", "worker_not_found"),
        ("pin.create", "sk-ops", "pin-1 of tenant b", "ok"),
        ("pin.prefetch", "sk-ops", "pin-1", "ok"),
        ("pin.remove", "sk-ops", "pin-1", "ok"),
        ("pin.remove", "sk-ops", "pin-1", "pin_not_found"),
    ]
    assert {one["client"] for one in lines_of(path)} == {"10.1.2.3"}
    assert secret_prompt not in path.read_text()


async def test_engines_that_are_added_and_drained_are_noted_without_the_token(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    config = RouterConfig(audit_log=str(path), request_timeout_s=20.0)
    with fake_openai() as fake:
        async with routing(spec_of(fake, "a"), config=config, admin_token="the-token") as router:

            async def send(method: str, path: str, token: str, body: Any = None) -> int:
                headers = {"authorization": f"Bearer {token}"}
                return (await router.client.request(method, path, json=body, headers=headers)).status_code

            body = {"name": "b", "url": fake.url, "kind": "vllm"}
            assert await send("POST", "/v1/engines", "wrong", body) == 401
            assert await send("POST", "/v1/engines", "the-token", body) == 201
            assert await send("POST", "/v1/engines", "the-token", body) == 400
            assert await send("DELETE", "/v1/engines/b", "the-token") == 202
            assert await send("DELETE", "/v1/engines/none", "the-token") == 404
            await eventually(lambda: len(lines_of(path)) == 4)
    assert brief(path) == [
        ("engine.add", "admin-token", "b", "ok"),
        ("engine.add", "admin-token", "b", "invalid_engine"),
        ("engine.drain", "admin-token", "b", "ok"),
        ("engine.drain", "admin-token", "none", "engine_not_found"),
    ]
    assert "the-token" not in path.read_text()


async def test_changes_of_the_key_file_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file_module, "POLL_INTERVAL_S", 0.01)
    path, audit = tmp_path / "keys", tmp_path / "audit"
    make_key_file(path, {"sk-a": "a", "sk-b": "b"})
    async with KeyFile(str(path), str(audit)).followed():
        key, secret = create_key(str(path), tenant="c")
        await eventually(lambda: len(lines_of(audit)) == 1)
        revoke_key(str(path), "sk-a")
        await eventually(lambda: len(lines_of(audit)) == 2)
        path.write_text("damaged")
        await eventually(lambda: len(lines_of(audit)) == 3)
        write_keys(str(path), [stored_key("sk-b", "other"), *(stored_key(f"sk-{n}", "a") for n in range(100))])
        await eventually(lambda: len(lines_of(audit)) == 4)
    lines = lines_of(audit)
    assert {(one["action"], one["target"]) for one in lines} == {("keys.reload", str(path))}
    assert [lines[0]["created"], lines[1]["revoked"], lines[2]["result"]] == [[key.id], ["sk-a"], "damaged"]
    assert (lines[3]["changed"], set(lines[3]["removed"])) == (["sk-b"], {"sk-a", key.id})
    assert lines[3]["created"] == [f"sk-{n}" for n in range(20)]
    assert secret not in audit.read_text()
