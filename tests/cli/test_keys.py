from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import keys as keys_command
from tandem.cli.main import run
from tandem.frontend.keys.api_key import key_digest
from tandem.frontend.keys.store import read_keys
from tandem.scheduling.admission.key_limits import NO_LIMITS, KeyLimits


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys.json")


def listed(path: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["keys", "list", "--json", "--file", path]) == 0
    shown: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return shown


def test_create_prints_the_key_and_list_all_but_it(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--name laptop --tenant search --priority 2 --requests-per-minute 60 --tokens-per-minute 9000"
    words += " --concurrent-requests 4 --pins 1 --expires 2100-01-31"
    assert run(["keys", "create", "--file", path, *words.split()]) == 0
    told = capsys.readouterr()
    secret = told.out.removesuffix("\n")
    (key,) = read_keys(path).keys
    assert key.sha256 == key_digest(secret)
    assert f"This is the key {key.id} (laptop) of the tenant search." in told.err
    assert secret not in told.err
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=9000, concurrent_requests=4, pins=1)
    assert (key.tenant, key.priority, key.limits) == ("search", 2, limits)
    assert key.expires == datetime(2100, 1, 31, tzinfo=UTC)
    assert run(["keys", "create", "--file", path, "--operator"]) == 0
    shown = listed(path, capsys)
    assert [(one["id"], one["tenant"], one["state"]) for one in shown] == [
        (key.id, "search", "active"),
        (read_keys(path).keys[1].id, "*", "active"),
    ]
    assert shown[0]["limits"] == {
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "concurrent_requests": 4,
        "pins": 1,
    }
    assert (shown[1]["limits"], shown[1]["expires"], shown[1]["priority"]) == ({}, None, 0)
    assert run(["keys", "list", "--file", path]) == 0
    table = capsys.readouterr().out
    for text in (key.id, "laptop", "search", "requests per minute 60", "2100-01-31"):
        assert text in table
    for text in (table, json.dumps(shown)):
        assert secret not in text
        assert key.sha256 not in text


def test_revoke_shows_in_the_list(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["keys", "create", "--file", path])
    (key,) = read_keys(path).keys
    assert (key.tenant, key.limits) == ("default", NO_LIMITS)
    assert run(["keys", "revoke", key.id, "--file", path]) == 0
    assert f"The key {key.id} of the tenant default is revoked." in capsys.readouterr().err
    (shown,) = listed(path, capsys)
    assert (shown["state"], shown["revoked"] is None) == ("revoked", False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("create", "Missing option '--file'"),
        ("create --file {path} --tenant a/b", "tenant='a/b' must be 1 to 64 letters"),
        ("create --file {path} --tenant *", "tenant='*' must be 1 to 64 letters"),
        ("create --file {path} --operator --tenant a", "tenant='a' cannot go with --operator"),
        ("create --file {path} --requests-per-minute 0", "requests_per_minute='0'"),
        ("create --file {path} --tokens-per-minute 1.5", "tokens_per_minute='1.5'"),
        ("create --file {path} --concurrent-requests -1", "concurrent_requests='-1'"),
        ("create --file {path} --pins -1", "pins='-1'"),
        ("create --file {path} --priority 9999999999", "priority='9999999999'"),
        ("create --file {path} --expires 2001-01-01", "expires='2001-01-01' is in the past; give a later time"),
        ("create --file {path} --expires 0d", "expires='0d' is in the past"),
        ("create --file {path} --expires soon", "expires='soon' must be a time such as 90d, 12h or 30m, or a date"),
        ("create --file {path} --expires 999999999d", "expires='999999999d' must be a time"),
        ("create --file /no/such/folder/keys", "keys.lock cannot be created: No such file or directory"),
        ("list --file /no/such/file", "cannot be read: No such file"),
        ("revoke k-1 --file /no/such/file", "cannot be created: No such file"),
        ("revoke --file {path}", "Missing argument 'ID'"),
        ("bogus", "See: tandem keys --help"),
    ],
)
def test_bad_input_is_one_line_no_file(
    path: str, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["keys", *words.format(path=path).split()]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not Path(path).exists()


def test_a_name_with_control_characters_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "--file", path, "--name", "a\x1b[2J"]) == 2
    assert "must be at most 100 printable characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", timedelta(seconds=30)),
        ("5m", timedelta(minutes=5)),
        ("12h", timedelta(hours=12)),
        ("90d", timedelta(days=90)),
        ("2026-01-02", timedelta(days=1)),
        ("2026-01-02T03:00:00+01:00", timedelta(days=1, hours=2)),
    ],
)
def test_an_end_is_a_time_from_now_or_a_date(text: str, expected: timedelta) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert keys_command._expiry(text, now) == now + expected


def test_the_audit_log_has_who_did_what(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = tmp_path / "audit"
    flags = ("--file", path, "--audit-log", str(audit))
    assert run(["keys", "create", *flags]) == 0
    secret = capsys.readouterr().out.strip()
    (key,) = read_keys(path).keys
    assert run(["keys", "revoke", key.id, *flags]) == 0
    assert run(["keys", "revoke", "k-1", *flags]) == 2
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(one["action"], one["target"], one["result"]) for one in lines] == [
        ("key.create", key.id, "ok"),
        ("key.revoke", key.id, "ok"),
        ("key.revoke", "k-1", "failed"),
    ]
    assert {one["client"] for one in lines} == {f"uid {os.getuid()}"}
    assert secret not in audit.read_text()
    assert key.sha256 not in audit.read_text()
    capsys.readouterr()
    assert run(["keys", "create", "--file", path, "--audit-log", "/no/such/folder/audit"]) == 2
    assert "audit_log='/no/such/folder/audit' cannot be written" in capsys.readouterr().err
    assert len(read_keys(path).keys) == 1
