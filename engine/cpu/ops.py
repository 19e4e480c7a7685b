"""The kernels of `elementwise.cpp` as functions of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.engine.cpu.library import check, load_kernels
from tandem.engine.replacement import Kernels

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def _options(x: Tensor) -> tuple[int, int]:
    """Whether a kernel computes with bfloat16, and its number of threads."""
    assert x.dtype in (torch.bfloat16, torch.float32), f"no kernel for {x.dtype}"
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()


def make_rms_norm() -> Callable[[Tensor, Tensor, float], Tensor]:
    """Function (x [..., D], weight [D], epsilon) -> normed x, contiguous."""
    kernel = load_kernels().tandem_rms_norm
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _FLOAT, _INT, _INT)

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert weight.dtype == x.dtype, f"the norm's weight is {weight.dtype}, its input {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        check(kernel(*pointers, x.numel() // dim, dim, epsilon, *_options(x)), "a norm")
        return out

    return rms_norm


def make_rotate() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Function (x [1, H, T, D] with unit stride in D, cos [1, T, D], sin) -> rotated x as a view [1, H, T, D]."""
    kernel = load_kernels().tandem_rotate
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, _POINTER, *(_INT64,) * 5, _INT, _INT)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, heads, tokens, dim = x.shape
        out = torch.empty(1, tokens, heads, dim, dtype=x.dtype)
        pointers = (x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr())
        check(kernel(*pointers, tokens, heads, dim, x.stride(2), x.stride(1), *_options(x)), "a rotation")
        return out.transpose(1, 2)

    return rotate


def make_silu_multiply() -> Callable[[Tensor, Tensor], Tensor]:
    """Function (gate, up), both [..., T, D] with unit stride in D -> silu(gate) * up, contiguous."""
    kernel = load_kernels().tandem_silu_multiply
    kernel.argtypes = (_POINTER, _POINTER, _POINTER, *(_INT64,) * 4, _INT, _INT)

    def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        dim = gate.shape[-1]
        pointers = (gate.data_ptr(), up.data_ptr(), out.data_ptr())
        strides = (gate.stride(-2), up.stride(-2))
        check(kernel(*pointers, gate.numel() // dim, dim, *strides, *_options(gate)), "a gate")
        return out

    return silu_multiply


def make_kernels() -> Kernels:
    """The kernels of this file."""
    rotate = make_rotate()
    return Kernels(
        rms_norm=make_rms_norm(),
        silu_multiply=make_silu_multiply(),
        rotate=lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin)),
    )
