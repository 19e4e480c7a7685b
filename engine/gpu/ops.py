"""Launches the kernels of `kernels.py` as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.attention.triton import power_of_two
from tandem.engine.gpu import kernels
from tandem.engine.replacement import Kernels

_BLOCK = 1024  # columns of one program, of a gated MLP
_ROTATED = 1024  # elements of one program's heads, half of each


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., D], weight [D] -> normed x, contiguous. [1, T, D] and [1, T, H, D] may be strided; others are copied."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1 or x.shape[0] != 1 or x.dim() not in (3, 4):
        x = x.contiguous().view(1, -1, x.shape[-1])
    tokens, dim = x.shape[1], x.shape[-1]
    heads, head_stride = (x.shape[2], x.stride(2)) if x.dim() == 4 else (1, 0)
    block = power_of_two(dim)
    options = {"HEADS": heads, "DIM": dim, "BLOCK": block, "num_warps": _num_warps(block)}
    kernels.rms_norm[(tokens, heads)](x, weight, out, x.stride(1), head_stride, epsilon, **options)
    return out


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Both [..., T, D] with unit stride in D -> silu(gate) * up, contiguous. Halves of one product are not copied."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    grid = (gate.shape[0], -(-width // _BLOCK))
    kernels.silu_multiply[grid](gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=_BLOCK, num_warps=4)
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `Kernels.rotate`, in one launch. The results are views of one tensor."""
    _, num_heads, tokens, dim = q.shape
    num_all = num_heads + k.shape[1]
    out = torch.empty(1, tokens, num_all, dim, dtype=q.dtype, device=q.device)
    block = power_of_two(dim // 2)
    heads = max(1, min(power_of_two(num_all), _ROTATED // block))
    options = {"HALF": dim // 2, "BLOCK": block, "HEADS": heads, "num_warps": 4}
    strides = (q.stride(2), q.stride(1), k.stride(2), k.stride(1))
    kernels.rotate[(tokens, -(-num_all // heads))](q, k, cos, sin, out, *strides, num_heads, num_all, **options)
    rotated = out.transpose(1, 2)
    return rotated[:, :num_heads], rotated[:, num_heads:]


KERNELS = Kernels(rms_norm=rms_norm, silu_multiply=silu_multiply, rotate=rotate)


def _num_warps(block: int) -> int:
    return max(1, min(block // 256, 8))
