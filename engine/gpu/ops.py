"""Launches the kernels of `kernels.py` as functions of tensors."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.knobs import runtime

from tandem.engine.attention.triton import power_of_two
from tandem.engine.gpu import kernels
from tandem.engine.replacement import Kernels

_BLOCK = 1024  # columns of one program, of a gated MLP
_ROTATED = 1024  # elements of one program's heads, half of each


class ProductTile(NamedTuple):
    """Shape of the work of one program of a product."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


WIDE_TILE = ProductTile(128, 128, 64, 8, 3)
_FEW_ROWS = 64  # of one tile: up to this many, reading the weight is what takes time


def narrow_tile(out_features: int, dtype: torch.dtype) -> ProductTile:
    """The tile for few rows: the same for all numbers of rows and GPUs. Few columns, so that all processors read."""
    if dtype is torch.float32:
        return ProductTile(32, 32, 32, 4, 2)
    return ProductTile(_FEW_ROWS, 32 if out_features <= 8192 else 64, 64, 4, 4)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in], contiguous: [..., out]. A row's bits do not depend on the other rows."""
    assert weight.is_contiguous(), "the kernel reads whole rows of weights"
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    is_wide = rows.shape[0] > _FEW_ROWS and wide_tile_agrees(*weight.shape, x.dtype, x.device)
    tile = WIDE_TILE if is_wide else narrow_tile(weight.shape[0], x.dtype)
    return _multiply(rows, weight, bias, tile).view(*x.shape[:-1], weight.shape[0])


@functools.cache
def wide_tile_agrees(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether larger tiles, which prompts take less time with, give the same bits here: seen from a random product.

    They do where the device multiplies both by the same instructions. Answers do not depend on it, only time does.
    """
    if dtype is torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = 2 * WIDE_TILE.rows, min(num_out, 2 * WIDE_TILE.columns)
    x, weight = (torch.randn(size, num_in, generator=generator).to(device, dtype) for size in sizes)
    narrow = _multiply(x, weight, None, narrow_tile(num_out, dtype))
    return torch.equal(_multiply(x, weight, None, WIDE_TILE), narrow)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, tile: ProductTile) -> Tensor:
    num_out, num_in = weight.shape
    out = torch.empty(rows.shape[0], num_out, dtype=rows.dtype, device=rows.device)
    grid = (-(-rows.shape[0] // tile.rows), -(-num_out // tile.columns))
    shape = {"IN": num_in, "HAS_BIAS": bias is not None}
    shape |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    cast = bool(runtime.interpret) and rows.dtype is torch.bfloat16
    options = {"CAST": cast, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    given = weight if bias is None else bias
    kernels.multiply[grid](rows, weight, given, out, rows.shape[0], num_out, rows.stride(0), **shape, **options)
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., D], weight [D] -> normed x, contiguous. [1, T, D] and [1, T, H, D] may be strided; others are copied."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, out, out, weight, epsilon)
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x and added [..., D], weight [D] -> their sum and that normed, contiguous; x as of `rms_norm`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, added.contiguous(), total, out, weight, epsilon)
    return total, out


def _norm(x: Tensor, added: Tensor | None, total: Tensor, out: Tensor, weight: Tensor, epsilon: float) -> None:
    if x.stride(-1) != 1 or x.shape[0] != 1 or x.dim() not in (3, 4):
        x = x.contiguous().view(1, -1, x.shape[-1])
    tokens, dim = x.shape[1], x.shape[-1]
    heads, head_stride = (x.shape[2], x.stride(2)) if x.dim() == 4 else (1, 0)
    block = power_of_two(dim)
    given, options = (x if added is None else added), {"ADDS": added is not None, "num_warps": _num_warps(block)}
    shape = {"HEADS": heads, "DIM": dim, "BLOCK": block}
    strides = x.stride(1), head_stride
    kernels.rms_norm[(tokens, heads)](x, given, total, weight, out, *strides, epsilon, **shape, **options)


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
