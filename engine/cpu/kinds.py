"""The kinds of CPU kernels: which this machine has, and which one it computes with."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

from tandem.engine.cpu.library import load_kernels
from tandem.protocol.errors import ConfigError

_BITS = 6  # raised whenever a kernel's results change, so that old KV on disks is not taken for theirs
VARIABLE = "TANDEM_CPU_KERNELS"
_KINDS = ("vectors", "avx512_bf16", "amx_bf16")  # in the order of `enum Kind`; a CPU has those up to its own


@cache
def _kernels() -> ctypes.CDLL:
    kernels = load_kernels()
    kernels.tandem_vector_target.restype = ctypes.c_char_p
    return kernels


@cache
def kernel_kinds() -> tuple[str, ...]:
    """The kinds that this CPU runs. Between two kinds the last bits differ."""
    return _KINDS[: _kernels().tandem_best_kind() + 1]


def kernel_kind() -> str:
    """The kind that bfloat16 is computed with here: the fastest, unless TANDEM_CPU_KERNELS names another one.

    Raises ConfigError for one that this CPU does not have.
    """
    kinds = kernel_kinds()
    wanted = os.environ.get(VARIABLE) or _KINDS[_kernels().tandem_fastest_kind()]
    if wanted not in kinds:
        raise ConfigError(f"{VARIABLE}={wanted!r}: this CPU has {', '.join(kinds)}")
    return wanted


def kernels_of(dtype: torch.dtype) -> str:
    """Name of the kernels that compute a model of this type here, as workers compare them."""
    kind = kernel_kind() if dtype is torch.bfloat16 else _KINDS[0]
    target: bytes = _kernels().tandem_vector_target()
    return f"cpu {kind} {target.decode()} bits {_BITS}"


def kind_for(dtype: torch.dtype) -> int:
    """The `enum Kind` of a kernel for this element type."""
    return _KINDS.index(kernel_kind()) if dtype is torch.bfloat16 else 0
