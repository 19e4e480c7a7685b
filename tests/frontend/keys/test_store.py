"""The file of API keys: what is kept, who may read it, writers at the same time, and files that are not key files."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.frontend.keys import store
from tandem.frontend.keys.api_key import key_digest
from tandem.frontend.keys.store import create_key, read_keys, revoke_key, write_keys
from tandem.protocol.errors import ConfigError
from tandem.scheduling.admission.key_limits import KeyLimits
from tests.support.keys import make_key_file, stored_key

FORK = multiprocessing.get_context("spawn")
LIMITS = KeyLimits(requests_per_minute=60, tokens_per_minute=9000, concurrent_requests=2, pins=0)


def test_a_created_key_is_stored_only_as_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    expires = datetime(2031, 1, 31, tzinfo=UTC)
    key, secret = create_key(str(path), tenant="search", name="Jürgen's", priority=-3, limits=LIMITS, expires=expires)
    other, other_secret = create_key(str(path), tenant="*")
    assert read_keys(str(path)).keys == [key, other]
    assert (key.sha256, key.tenant, key.priority, key.limits) == (key_digest(secret), "search", -3, LIMITS)
    assert (key.expires, key.revoked, other.tenant) == (expires, None, "*")
    text = path.read_text()
    for one in (secret, other_secret):
        assert len(bytes.fromhex(one.removeprefix("sk-"))) == 32
        assert one not in text
        assert one.removeprefix("sk-") not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_revoked_key_stays_and_keeps_its_first_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "keys")
    key, _ = create_key(path, tenant="a")
    other, _ = create_key(path, tenant="b")
    revoked = revoke_key(path, key.id)
    monkeypatch.setattr(store, "_now", lambda: datetime(2040, 1, 1, tzinfo=UTC))
    assert (revoke_key(path, key.id), read_keys(path).keys) == (revoked, [revoked, other])
    assert revoked.state(0.0) == "revoked"
    with pytest.raises(ConfigError, match=f"has no key with the id 'k-1'; see: tandem keys list --file {path}"):
        revoke_key(path, "k-1")


def test_a_key_ends_at_its_time(tmp_path: Path) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    key = stored_key("sk", "a", expires=at)
    assert [key.state(at.timestamp() + after_s) for after_s in (-1e-3, 0.0, 1.0)] == ["active", "expired", "expired"]


def test_a_change_keeps_the_groups_right_to_read_and_the_link(tmp_path: Path) -> None:
    path = tmp_path / "real" / "keys"
    path.parent.mkdir()
    make_key_file(path, {"sk-a": "a"})
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    create_key(str(link), tenant="b")
    assert link.is_symlink()
    assert len(read_keys(str(link)).keys) == len(read_keys(str(path)).keys) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert {one.name for one in path.parent.iterdir()} == {"keys", "keys.lock"}


def test_a_killed_writer_leaves_no_obstacle_and_no_way_elsewhere(tmp_path: Path) -> None:
    path, victim = make_key_file(tmp_path / "keys", {"sk-a": "a"}), tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "keys.new").symlink_to(victim)
    create_key(str(path), tenant="b")
    assert (len(read_keys(str(path)).keys), victim.read_text()) == (2, "untouched")
    (tmp_path / "keys.lock").unlink()
    (tmp_path / "keys.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"keys\.lock cannot be created"):
        create_key(str(path), tenant="c")


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_key_file(tmp_path / "keys", {"sk-a": "a"})
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device; nothing was changed"):
        create_key(str(path), tenant="b")
    assert (path.read_bytes(), {one.name for one in tmp_path.iterdir()}) == (before, {"keys", "keys.lock"})


def _create_many(path: str, tenant: str, count: int) -> None:
    for _ in range(count):
        create_key(path, tenant=tenant)


def test_two_writers_lose_nothing_and_a_reader_always_finds_a_whole_file(tmp_path: Path) -> None:
    path, count = str(make_key_file(tmp_path / "keys", {"sk-a": "a"})), 40
    writers = [FORK.Process(target=_create_many, args=(path, tenant, count)) for tenant in ("one", "two")]
    for writer in writers:
        writer.start()
    seen = [1]
    while any(writer.is_alive() for writer in writers):
        seen.append(len(read_keys(path).keys))
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    keys = read_keys(path).keys
    assert seen == sorted(seen)
    assert [sum(key.tenant == tenant for key in keys) for tenant in ("a", "one", "two")] == [1, count, count]


def test_a_writer_that_holds_the_lock_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LOCK_TIMEOUT_S", 0.05)
    path = str(make_key_file(tmp_path / "keys", {"sk-a": "a"}))
    with store._locked(path), pytest.raises(ConfigError, match=r"keys\.lock has been held by another `tandem keys`"):
        create_key(path, tenant="b")
    create_key(path, tenant="b")


def entry(**fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(stored_key("sk-secret", "a", id="k-1"))
    return made | fields


def file_of(*keys: Any, **fields: Any) -> str:
    return json.dumps({"version": 1, "keys": list(keys)} | fields)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is not an API key file: Input data was truncated; make it with: tandem keys create --file"),
        ("sk-secret search\n", "is not an API key file: JSON is malformed"),
        ('{"version": 1, "keys": [', "is not an API key file"),
        ("[" * 100_000, "is not an API key file"),
        ("\x00" * 1000, "is not an API key file"),
        ("[]", r"Expected `object`, got `array`"),
        ("{}", "missing required field `keys`"),
        (file_of(version=2), r"Invalid enum value 2.*\$.version"),
        (file_of(extra=1), "unknown field `extra`"),
        (file_of(7), r"Expected `object`, got `int` - at `\$.keys\[0\]`"),
        (file_of(entry(sha256="sk-secret")), r"matching regex .* at `\$.keys\[0\].sha256`"),
        (file_of(entry(sha256=None)), r"sha256"),
        (file_of(entry(tenant="no/name")), r"\$.keys\[0\].tenant"),
        (file_of(entry(tenant="**")), r"\$.keys\[0\].tenant"),
        (file_of(entry(tenant="a\n")), r"\$.keys\[0\].tenant"),
        (file_of(entry(id="")), r"\$.keys\[0\].id"),
        (file_of(entry(id="a b")), r"\$.keys\[0\].id"),
        (file_of(entry(name="x" * 101)), r"\$.keys\[0\].name"),
        (file_of(entry(name="a\x1b[2J")), "the name of the key k-1 has control characters"),
        (file_of(entry(priority=2**31)), r"\$.keys\[0\].priority"),
        (file_of(entry(expires="2030-01-01T00:00:00")), r"\$.keys\[0\].expires"),  # in which zone?
        (file_of(entry(expires=True)), r"\$.keys\[0\].expires"),
        (file_of(entry(limits={"requests_per_minute": 0})), r"limits.requests_per_minute"),
        (file_of(entry(limits={"tokens_per_minute": 1.5})), r"limits.tokens_per_minute"),
        (file_of(entry(limits={"pins": -1})), r"limits.pins"),
        (file_of(entry(limits={"request_per_minute": 5})), "unknown field `request_per_minute`"),
        (file_of(entry(), entry(sha256="0" * 64)), "has the key k-1 twice"),
        (file_of(entry(), entry(id="k-2")), "has the key k-2 twice"),
    ],
)
def test_a_file_that_is_not_a_key_file_is_reported_without_its_content(
    tmp_path: Path, content: str, expected: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=expected) as raised:
        read_keys(str(path))
    assert str(path) in raised.value.message
    assert "secret" not in raised.value.message
    with pytest.raises(ConfigError):  # a damaged file is not replaced by a good one
        create_key(str(path), tenant="a")
    assert path.read_text() == content


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o601, 0o666])
def test_a_file_that_others_may_read_or_the_group_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = make_key_file(tmp_path / "keys", {"sk-a": "a"})
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, by which others can .*; run: chmod 600 {path}"):
        read_keys(str(path))
    for allowed in (0o600, 0o400, 0o440, 0o640):
        path.chmod(allowed)
        assert len(read_keys(str(path)).keys) == 1


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_keys(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*make it with: tandem keys create --file"):
        read_keys(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_keys(str(tmp_path))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be read: Too many levels of symbolic links"):
        read_keys(str(tmp_path / "loop"))
    path = make_key_file(tmp_path / "keys", {"sk-a": "a"})
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match="has more than 100 bytes; give a smaller file"):
        read_keys(str(path))


def test_ten_thousand_keys_fit(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [stored_key(f"sk-{number}", "a", name="x" * 100, limits=LIMITS) for number in range(10_000)]
    write_keys(str(path), keys)
    key, _ = create_key(str(path), tenant="b")
    assert read_keys(str(path)).keys == [*keys, key]
