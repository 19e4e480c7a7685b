"""Intel's OpenMP library, which computes small steps faster than the one that torch brings.

It is preloaded where an environment has it (`pip install intel-openmp`, x86 only): it must be there before any library
that uses OpenMP.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["preload_of"]


def preload_of(python: str) -> dict[str, str]:
    """The variable with which the processes of this Python preload it; nothing if its environment does not have it."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}
