"""Products with packed weights, by the kernels in `matmul.cpp`: a row's bits depend on nothing but that row."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch
from torch import Tensor

from tandem.engine.cpu.kinds import kind_for
from tandem.engine.cpu.library import check, load_kernels
from tandem.engine.quantization import quantize
from tandem.runtime import large_pages

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def _kernels() -> ctypes.CDLL:
    return _declared(load_kernels())


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    kernels.tandem_matmul_packed_elements.argtypes = (_INT64, _INT64)
    kernels.tandem_matmul_packed_elements.restype = _INT64
    kernels.tandem_matmul_pack.argtypes = (_INT, _POINTER, _POINTER, _INT64, _INT64, _INT, _INT)
    kernels.tandem_matmul.argtypes = (_INT, *(_POINTER,) * 5, *(_INT64,) * 4, _INT, _INT)
    return kernels


class _WeightMemory:
    """Slabs for weights, because most are smaller than a large page. A slab stays as long as any weight of it."""

    _SLAB_BYTES, _ALIGNMENT = 64 << 20, 64

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several engines of a process may load at once
        self._slab = torch.empty(0, dtype=torch.uint8)  # what is left of the newest one

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor [num_elements] that does not share memory with another one."""
        num_bytes = num_elements * dtype.itemsize
        with self._lock:
            if num_bytes > len(self._slab):
                self._slab = torch.frombuffer(large_pages.allocate(max(num_bytes, self._SLAB_BYTES)), dtype=torch.uint8)
            taken = self._slab[:num_bytes]
            self._slab = self._slab[-(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT :]
        return taken.view(dtype)


_memory = _WeightMemory()


class PackedWeight:
    """A weight in the layout of its kernel."""

    def __init__(self, weight: Tensor, *, is_int8: bool = False) -> None:
        """`weight` is [N, K], float32 or bfloat16. With `is_int8` it is rounded: see `quantize`."""
        num_columns, depth = weight.shape
        self.shape = (num_columns, depth)
        self.dtype = weight.dtype
        self.kind = kind_for(weight.dtype)
        self.scales: Tensor | None = None
        if is_int8:
            weight, self.scales = quantize(weight, torch.int8)
        weight = weight.contiguous()
        size = _kernels().tandem_matmul_packed_elements(num_columns, depth)
        self.packed = _memory.take(size, weight.dtype)
        pointers = (weight.data_ptr(), self.packed.data_ptr())
        options = (weight.element_size(), torch.get_num_threads())
        check(_kernels().tandem_matmul_pack(self.kind, *pointers, num_columns, depth, *options), "packing a weight")

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times the weight, plus bias [N] -> [..., N]. Raises MemoryError without room for a copy of x."""
        num_columns, depth = self.shape
        assert x.dtype is self.dtype, f"x is {x.dtype}, the weight {self.dtype}"
        assert x.shape[-1] == depth, f"x has rows of {x.shape[-1]}, the weight of {depth}"
        rows = x.reshape(-1, depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], num_columns, dtype=x.dtype)
        status = _kernels().tandem_matmul(
            self.kind,
            rows.data_ptr(),
            self.packed.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            num_columns,
            depth,
            rows.stride(0),
            _is_bfloat16(x),
            torch.get_num_threads(),
        )
        check(status, "a product")
        return out.view(*x.shape[:-1], num_columns)


def _is_bfloat16(x: Tensor) -> int:
    return int(x.dtype is torch.bfloat16)
