"""Wrong settings of the tiers are told before anything is started, and looking at them makes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.config import TierConfig
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.tier_check import check_tiers


def key_file(folder: Path, *, num_bytes: int = 32, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(bytes(num_bytes))
    path.chmod(mode)
    return str(path)


def test_good_settings_pass_and_nothing_is_made(tmp_path: Path) -> None:
    check_tiers(TierConfig(), is_local=True)
    key = key_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for url in (f"file://{tmp_path}/a/b", "s3://bucket/prefix", "gs://bucket"):
        config = TierConfig(disk_cache_path=f"{tmp_path}/new/disk", object_cache_url=url, kv_key_file=key)
        check_tiers(config, is_local=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_key_file": "none"}, "kv_key_file={}/none does not exist; make it with: "),
        ({"kv_key_file": ""}, "kv_key_file={}.* Is a directory; give a file"),
        ({"disk_cache_path": "file"}, "disk_cache_path: {}/file cannot be a folder: {}/file is not one"),
        ({"disk_cache_path": "file/below"}, "disk_cache_path: {}/file/below cannot be a folder: {}/file is not one"),
        ({"disk_cache_path": "dangling/a"}, "disk_cache_path: {}/dangling/a cannot be a folder"),
        ({"object_cache_url": "file"}, "object_cache_url: {}/file cannot be a folder"),
    ],
)
def test_bad_files_are_told_where_workers_run_here(tmp_path: Path, settings: dict[str, str], expected: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    scheme = "file://" if "object_cache_url" in settings else ""
    config = TierConfig(**{name: f"{scheme}{tmp_path}/{value}" for name, value in settings.items()})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=expected.replace("{}", str(tmp_path))):
        check_tiers(config, is_local=True)
    check_tiers(config, is_local=False)  # there may be such a file elsewhere


def test_a_folder_that_is_closed_to_this_user_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # as root everything is open
    with pytest.raises(ConfigError, match=f"{tmp_path}/a/b cannot be written to: {tmp_path} is closed"):
        check_tiers(TierConfig(disk_cache_path=f"{tmp_path}/a/b"), is_local=True)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"object_cache_url": "ftp://host/prefix"},
            "object_cache_url: 'ftp' is unknown; choose one of .*, s3, s3a, or install",
        ),
        ({"object_cache_url": "http://["}, "cannot be opened: "),
        ({"tier": ("ftp://host?gb=1",)}, r"tier='ftp://host\?gb=1': 'ftp' is unknown; choose one of"),
    ],
)
def test_what_is_wrong_anywhere_is_always_told(settings: dict[str, Any], expected: str, is_local: bool) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_tiers(TierConfig(**settings), is_local=is_local)
