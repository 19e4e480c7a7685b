"""The CPU kernels are compiled into the cache folder; what is in the way is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine.cpu.library import KernelBuildError, load_kernels


@pytest.mark.parametrize("cache", ["/dev/null", "/proc/no-such-place"])
def test_a_closed_folder_is_named_with_its_variable(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", cache)
    with pytest.raises(KernelBuildError, match=rf"cannot be written to {cache}/kernels \(.+\); set TANDEM_CACHE"):
        load_kernels.__wrapped__()


def test_a_compiler_that_is_not_there_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match=r"compiler 'no-such-compiler' not found; install g\+\+ or set CXX"):
        load_kernels.__wrapped__()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelBuildError, match=r"^false .* failed"):
        load_kernels.__wrapped__()
    assert list((tmp_path / "kernels").iterdir()) == []
