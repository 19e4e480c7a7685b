"""Intel's OpenMP library, with which small steps are faster than with the one that torch brings.

It is preloaded where an environment has it (`pip install intel-openmp`, x86 only): it must be there before any library
that uses OpenMP.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["preload_of"]


def preload_of(python: str) -> dict[str, str]:
    """The environment variable that makes processes of this Python preload it; {} if its environment lacks it."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}
