"""Lossless packing of bfloat16 by the kernels in `exact_codec.cpp`."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from tandem.engine.cpu.library import check, load_kernels

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def _kernels() -> ctypes.CDLL:
    kernels = load_kernels()
    kernels.tandem_exact_pack.argtypes = (_POINTER, _POINTER, *(_INT64,) * 4, _POINTER, _INT64, _INT)
    kernels.tandem_exact_unpack.argtypes = kernels.tandem_exact_pack.argtypes
    return kernels


def pack(pool: Tensor, block_ids: Tensor | None, data: Tensor, unit_elements: int, num_exceptions: int) -> None:
    """Pack blocks of pool [num_blocks, ...], bfloat16 and contiguous, into the rows of data, uint8.

    Block block_ids[i], int64, or i, goes to row i, each of whose units takes its bytes as `ExactCodec` says.
    """
    check(_kernels().tandem_exact_pack(*_arguments(pool, block_ids, data, unit_elements, num_exceptions)), "a packing")


def unpack(pool: Tensor, block_ids: Tensor | None, data: Tensor, unit_elements: int, num_exceptions: int) -> None:
    """The reverse of `pack`: any bytes are accepted."""
    status = _kernels().tandem_exact_unpack(*_arguments(pool, block_ids, data, unit_elements, num_exceptions))
    check(status, "an unpacking")


def _arguments(
    pool: Tensor, block_ids: Tensor | None, data: Tensor, unit_elements: int, num_exceptions: int
) -> tuple[int | None, ...]:
    assert pool.device.type == data.device.type == "cpu", f"these kernels are a CPU's: {pool.device}, {data.device}"
    assert pool.is_contiguous(), "blocks of the pool must lie one after the other"
    assert data.stride(1) == 1 or data.shape[1] == 1, "rows must be contiguous"
    ids, num_units = None, pool[:1].numel() // unit_elements
    if block_ids is not None:
        assert block_ids.dtype is torch.int64, f"block ids are {block_ids.dtype}"
        assert block_ids.shape == (len(data),), f"{tuple(block_ids.shape)} block ids for {len(data)} rows"
        assert block_ids.is_contiguous(), "block ids must lie one after the other"
        assert all(0 <= block < len(pool) for block in block_ids.tolist()), f"one of {block_ids.tolist()} is no block"
        ids = block_ids.data_ptr()
    sizes = (len(data), num_units, unit_elements, num_exceptions)
    return (pool.data_ptr(), ids, *sizes, data.data_ptr(), data.stride(0), torch.get_num_threads())
