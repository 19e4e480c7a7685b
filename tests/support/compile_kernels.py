"""Compiles the Triton kernels for GPUs without having one, as launches would.

`python -m tests.support.compile_kernels` prints a JSON object a line for each compiled kernel: its name, capability,
shared memory and code in bytes, and counts of instructions. This is a program of its own because Triton decides once
per process whether kernels are interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tandem.engine.attention import triton_kernels
from tandem.engine.attention.triton import TritonAttention, split_tokens
from tandem.engine.gpu import kernels, ops
from tandem.engine.quantization import QUANTIZED_DTYPES, quantize
from tests.support.attention_case import Case

_CAPABILITIES = (80, 90)  # the index is the device's number
_COUNTED = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "copies ahead": "cp.async.c"}


class NoGpu:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, device: int) -> None:
        self._device = device

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _CAPABILITIES[self._device], 32)


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """In the place of a launch."""
    return partial(kernel.run, grid=grid, warmup=True)


def run_steps(
    device: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **options: Any
) -> None:
    """Launch the kernels for steps of several sizes: a prompt, chunks beside decoding, decoding."""
    driver.set_active(NoGpu(device))  # type: ignore[arg-type]
    backend = TritonAttention(split_tokens(8192))
    case = Case([700, 40, 1, 64, 600], num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    pool = case.new_pool(0.0)
    for chunks in (
        [(1, 0, 40)],
        [(0, 0, 512), (1, 39, 40), (2, 0, 1)],
        [(0, 699, 700)],
        [(0, 699, 700), (1, 39, 40), (2, 0, 1), (3, 63, 64), (4, 599, 600)],
    ):
        case.run(backend, pool, chunks, **options)


def run_parts(device: int, dtype: torch.dtype) -> None:
    """Launch the kernels between products for steps of several sizes, of a Llama with norms of its heads."""
    driver.set_active(NoGpu(device))  # type: ignore[arg-type]
    for num_tokens in (1, 16, 700):
        x = torch.zeros(1, num_tokens, 4096, dtype=dtype)
        ops.rms_norm(x, x[0, 0], 1e-6)
        heads = torch.zeros(1, num_tokens, 48, 128, dtype=dtype)
        ops.rms_norm(heads[:, :, :32], heads[0, 0, 0], 1e-6)
        query, key = heads[:, :, :32].transpose(1, 2), heads[:, :, 32:40].transpose(1, 2)
        ops.rotate(query, key, heads[:, :, 0].contiguous(), heads[:, :, 0].contiguous())
        both = torch.zeros(1, num_tokens, 2 * 14336, dtype=dtype)
        ops.silu_multiply(both[..., :14336], both[..., 14336:])


def run_products(device: int, dtype: torch.dtype) -> None:
    """Launch our products with both tiles, for several numbers of rows and columns, of each kind of weights."""
    driver.set_active(NoGpu(device))  # type: ignore[arg-type]
    for num_rows in (1, 16, 700):
        for num_out in (4096, 16_384):
            x, weight = torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(num_out, 4096, dtype=dtype)
            for stored in ((weight, None), *(quantize(weight, one) for one in QUANTIZED_DTYPES.values())):
                for tile in (ops.narrow_tile(num_out, dtype), ops.WIDE_TILE):
                    ops._multiply(x, *stored, None, tile)


if __name__ == "__main__":
    JITFunction.__getitem__ = compile_only
    run_steps(0, 128, torch.bfloat16)
    run_steps(0, 64, torch.float32)
    run_steps(1, 80, torch.float16, window=128, sinks=torch.zeros(8))
    run_steps(1, 256, torch.bfloat16, window=4096, softcap=50.0)
    for device in (0, 1):
        run_steps(device, 128, torch.bfloat16, torch.float8_e4m3fn)
    run_parts(0, torch.float32)
    run_parts(1, torch.bfloat16)
    run_products(0, torch.bfloat16)
    run_products(1, torch.bfloat16)
    of_attention = [getattr(triton_kernels, name) for name in ("write_kv", "attend", "attend_decoding", "merge_splits")]
    of_parts = [kernels.rms_norm, kernels.silu_multiply, kernels.rotate, kernels.multiply]
    for kernel in of_attention + of_parts:
        name = kernel.fn.__name__
        for device, capability in enumerate(_CAPABILITIES):
            for compiled in kernel.device_caches[device][0].values():
                code = compiled.asm["ptx"]
                counts = {what: code.count(instruction) for what, instruction in _COUNTED.items()}
                sizes = {"shared": compiled.metadata.shared, "cubin": len(compiled.asm["cubin"])}
                print(json.dumps({"kernel": name, "capability": capability, **sizes, **counts}))
