"""The kernels of `elementwise.cpp` as functions of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.engine.cpu.library import load_kernels

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def _is_bfloat16(x: Tensor) -> int:
    assert x.dtype in (torch.bfloat16, torch.float32), f"no kernel for {x.dtype}"
    return int(x.dtype == torch.bfloat16)


def make_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    """Function (x [..., D], weight [D], epsilon) -> normed x, contiguous."""
    kernel = load_kernels().tandem_rms_norm
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _FLOAT, _INT)
    kernel.restype = None

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert weight.dtype == x.dtype, f"the norm's weight is {weight.dtype}, its input {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        rows = x.numel() // dim
        kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, dim, epsilon, _is_bfloat16(x))
        return out

    return rms_norm


def make_rotate() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Function (x [1, H, T, D] with unit stride in D, cos [1, T, D], sin) -> rotated x as a view [1, H, T, D]."""
    kernel = load_kernels().tandem_rotate
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, _POINTER, *(_INT64,) * 6, _INT)
    kernel.restype = None

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, heads, tokens, dim = x.shape
        out = torch.empty(1, tokens, heads, dim, dtype=x.dtype)
        pointers = (x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr())
        kernel(*pointers, tokens, heads, dim, x.stride(2), x.stride(1), heads * dim, _is_bfloat16(x))
        return out.transpose(1, 2)

    return rotate


def make_silu_multiply() -> Callable[[Tensor, Tensor], Tensor]:
    """Function (gate, up), both [..., T, D] with unit stride in D -> silu(gate) * up, contiguous."""
    kernel = load_kernels().tandem_silu_multiply
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, *(_INT64,) * 4, _INT)
    kernel.restype = None

    def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        dim = gate.shape[-1]
        pointers = (gate.data_ptr(), up.data_ptr(), out.data_ptr())
        kernel(*pointers, gate.numel() // dim, dim, gate.stride(-2), up.stride(-2), _is_bfloat16(gate))
        return out

    return silu_multiply
