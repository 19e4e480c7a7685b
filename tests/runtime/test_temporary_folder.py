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


def test_a_tmpdir_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setenv("TMPDIR", str(missing))
    with pytest.raises(ConfigError, match=f"{missing}, cannot be written: No such file or directory; set TMPDIR to"):
        make_temporary_folder()


def test_a_tmpdir_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TMPDIR", str(file))
    with pytest.raises(ConfigError, match=f"{file}, cannot be written: Not a directory; set TMPDIR to"):
        make_temporary_folder()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_tmpdir_that_is_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}, cannot be written: Permission denied; set TMPDIR to"):
        make_temporary_folder()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIN_FREE_BYTES - 1))
    with pytest.raises(ConfigError, match=f"{tmp_path}, has 15 MiB free and needs 16 MiB; delete files there, or set"):
        make_temporary_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_any_place_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", find_none)
    with pytest.raises(ConfigError, match=r"/tmp, cannot be written: No usable temporary directory .*; set TMPDIR"):
        make_temporary_folder()
