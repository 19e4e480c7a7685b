"""Builds the C++ kernels once per source and CPU, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tandem.protocol.config import cache_folder

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_BUILD_TIMEOUT_S = 120.0


class KernelBuildError(RuntimeError):
    """The kernels could not be made on this machine; the message says why, with the compiler's output."""


def _cpu_flags() -> str:
    """The CPU features on which -march=native depends, so that different machines can share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _flags() -> list[str]:
    """Those of the compiler. CXXFLAGS has more, such as another -march."""
    return [*_FLAGS, *os.environ.get("CXXFLAGS", "").split()]


def _target(compiler: str, sources: list[Path]) -> Path:
    parts = [" ".join(_flags()).encode(), _cpu_flags().encode(), compiler.encode(), *(p.read_bytes() for p in sources)]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    return folder / f"tandem-cpu-{key}.so"


def _build() -> Path:
    """Path of the library, which is compiled first if these sources were never built for this CPU."""
    compiler = os.environ.get("CXX", "g++")
    sources = sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")])
    target = _target(compiler, sources)
    if target.exists():
        return target
    if shutil.which(compiler) is None:
        raise KernelBuildError(f"compiler {compiler!r} not found; install g++ or set CXX")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            _compile(compiler, sources, built)
            built.replace(target)  # atomic: several workers may build at once
    except OSError as exc:
        raise KernelBuildError(
            f"the CPU kernels cannot be written to {target.parent} ({exc.strerror}); set TANDEM_CACHE to a folder that "
            "this user can write to"
        ) from exc
    logger.info("built the CPU kernels: %s", target)
    return target


def _compile(compiler: str, sources: list[Path], built: Path) -> None:
    command = [compiler, *_flags(), "-o", str(built), *(str(p) for p in sources if p.suffix == ".cpp")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed: {result.stderr.strip()[:2000]}")


@cache
def load_kernels() -> ctypes.CDLL:
    """The kernel library, built if necessary.

    Raises KernelBuildError without a working g++ (CXX names another compiler). Calls release the GIL.
    """
    return ctypes.CDLL(str(_build()))


def check(status: int, what: str) -> None:
    """Raise what the status of a call says: MemoryError, or RuntimeError for a kind that was not compiled."""
    if status == 1:
        raise MemoryError(f"{what} could not allocate its scratch memory")
    if status:
        raise RuntimeError(f"{what} is of a kind that the kernels were not compiled for")
