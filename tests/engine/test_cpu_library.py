"""The CPU kernels are compiled into the cache folder; what is in the way is named."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.engine.cpu.kinds import VARIABLE
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


@pytest.mark.cluster
@pytest.mark.timeout(700)  # compiles the kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the targets are of x86-64")
@pytest.mark.parametrize("target", ["x86-64 -O1", "x86-64-v3"])  # vectors of four floats, and of eight
def test_the_kernels_are_right_at_every_width_and_no_vector_is_wider_than_a_register(target: str) -> None:
    # -Wpsabi tells vectors that fit no register: they would be kept in memory, which takes twenty times as long. With
    # AVX2 the compiler rounds where it would not with AVX-512, as it optimizes.
    flags = f"-march={target} -Werror=psabi"
    tests = ["tests/engine/test_attention.py", "tests/engine/test_matmul.py"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
        "-k",
        "(agree or attention or depend or int8) and not shape4 and not shape5",  # the two that take half the time
    ]
    env = os.environ | {"CXXFLAGS": flags, "PYTEST_ADDOPTS": "", VARIABLE: "vectors"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, f"{flags}\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
    assert " passed" in result.stdout
