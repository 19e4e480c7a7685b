"""A server follows its key file: changes count, and a file that cannot be used opens and closes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.keys import key_file as key_file_module
from tandem.frontend.keys import store
from tandem.frontend.keys.key_file import KeyFile
from tandem.frontend.keys.metrics import KeyCollector
from tandem.frontend.keys.store import StoredKeys, create_key, revoke_key, write_keys
from tandem.protocol.errors import ConfigError
from tests.support.keys import make_key_file, stored_key
from tests.support.waiting import eventually


def tenants(file: KeyFile) -> list[str]:
    return [key.tenant for key in file.api_keys.all]


async def test_changes_are_followed_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file_module, "POLL_INTERVAL_S", 0.01)
    path = str(make_key_file(tmp_path / "keys", {"sk-a": "a"}))
    file = KeyFile(path)
    async with file.followed() as keys:
        key, secret = create_key(path, tenant="b")
        await eventually(lambda: keys.find(secret) is not None)
        revoke_key(path, key.id)
        await eventually(lambda: keys.all[-1].state(time.time()) == "revoked")
    assert tenants(file) == ["a", "b"]


async def test_without_a_file_no_key_is_needed_and_an_empty_one_lets_nobody_in(tmp_path: Path) -> None:
    async with KeyFile("").followed() as keys:
        assert (keys.is_required, len(keys)) == (False, 0)
    assert KeyFile(str(make_key_file(tmp_path / "keys", {}))).api_keys.is_required


@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone", "mode", "folder", "huge"])
async def test_a_damaged_file_changes_no_keys(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = make_key_file(tmp_path / "keys", {"sk-a": "a", "sk-b": "b"})
    file, registry = KeyFile(str(path)), CollectorRegistry()
    registry.register(KeyCollector(file.api_keys))
    content = path.read_bytes()
    if damage in ("gone", "folder"):
        path.unlink()
    match damage:
        case "truncated":
            path.write_bytes(content[:-20])
        case "garbage":
            path.write_text("{}")
        case "mode":
            path.chmod(0o666)
        case "folder":
            path.mkdir()
        case "huge":
            os.truncate(path, 1 << 40)  # sparse: it must not be read to its end
    for _ in range(3):
        await file.look()
    assert (tenants(file), registry.get_sample_value("tandem_api_key_file_damaged")) == (["a", "b"], 1)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "REVOCATIONS TOO, HAVE NO EFFECT" in errors[0].getMessage()
    with pytest.raises(ConfigError):
        KeyFile(str(path))  # a server does not start with it

    if damage == "folder":
        path.rmdir()
    path.unlink(missing_ok=True)
    make_key_file(path, {"sk-b": "b"})
    await file.look()
    assert (tenants(file), registry.get_sample_value("tandem_api_key_file_damaged")) == (["b"], 0)
    assert registry.get_sample_value("tandem_api_key_reloads_total") == 1
    assert registry.get_sample_value("tandem_api_keys", {"state": "active"}) == 1


async def test_a_file_that_does_not_change_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_key_file(tmp_path / "keys", {"sk-a": "a"})
    file = KeyFile(str(path))
    await file.look()  # once more after the first reading
    readings: list[str] = []

    def read_keys(path: str) -> StoredKeys:
        readings.append(path)
        return store.read_keys(path)

    monkeypatch.setattr(key_file_module, "read_keys", read_keys)
    for _ in range(3):
        await file.look()
    assert not readings
    make_key_file(path, {"sk-b": "b"})
    await file.look()
    assert readings == [str(path)]


async def test_a_change_within_the_same_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """The second change has the size and the times of the first, as within one tick of a coarse clock."""
    path = make_key_file(tmp_path / "keys", {"sk-a": "a"})
    file = KeyFile(str(path))
    await file.look()
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content.replace(b'"a"', b'"b"'))
    await file.look()
    assert tenants(file) == ["b"]
    signature = file._signature
    path.write_bytes(content.replace(b'"a"', b'"c"'))
    file._signature = key_file_module.signature_of(str(path))  # as if it had not changed
    assert (signature is not None, status.st_size) == (True, path.stat().st_size)
    await file.look()
    assert tenants(file) == ["c"]


async def test_a_whole_replacement_by_a_link_as_kubernetes_does_is_followed(tmp_path: Path) -> None:
    """A Secret's volume shows files of a folder behind a link, which is exchanged when the Secret changes."""
    for name, tenant in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        write_keys(str(tmp_path / name / "keys"), [stored_key("sk-1", tenant)])
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "keys").symlink_to("..data/keys")
    file = KeyFile(str(tmp_path / "keys"))
    await file.look()
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    await file.look()
    assert tenants(file) == ["b"]
