from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.protocol.errors import ConfigError
from tandem.runtime.temporary_folder import MIN_FREE_BYTES, make_temporary_folder


def test_it_is_in_tmpdir_and_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = Path(make_temporary_folder())
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "cannot be written: No such file or directory"),
        ("file", "cannot be written: Not a directory"),
        pytest.param(
            "read-only",
            "cannot be written: Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere"),
        ),
        ("full", "has 15 MiB free and needs 16 MiB; delete files there"),
    ],
)
def test_a_tmpdir_of_no_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(0o500)
    (tmp_path / "full").mkdir()
    if name == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIN_FREE_BYTES - 1))
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    with pytest.raises(ConfigError, match=f"{tmp_path / name}, {reason}.* set TMPDIR"):
        make_temporary_folder()
    assert list((tmp_path / "full").iterdir()) == []


def test_a_machine_without_a_usable_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", find_none)
    with pytest.raises(ConfigError, match=r"/tmp, cannot be written: No usable temporary directory .*; set TMPDIR"):
        make_temporary_folder()
