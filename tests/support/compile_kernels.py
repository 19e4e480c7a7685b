"""Compiles the Triton attention kernels for GPUs without having one, as launches would.

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


def run_steps(device: int, head_dim: int, dtype: torch.dtype, **options: Any) -> None:
    """Launch the kernels for steps of several sizes: a prompt, chunks beside decoding, decoding."""
    driver.set_active(NoGpu(device))  # type: ignore[arg-type]
    backend = TritonAttention(split_tokens(8192))
    case = Case([700, 40, 1, 64, 600], num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    pool = case.new_pool(0.0)
    for chunks in (
        [(1, 0, 40)],
        [(0, 0, 512), (1, 39, 40), (2, 0, 1)],
        [(0, 699, 700)],
        [(0, 699, 700), (1, 39, 40), (2, 0, 1), (3, 63, 64), (4, 599, 600)],
    ):
        case.run(backend, pool, chunks, **options)


if __name__ == "__main__":
    JITFunction.__getitem__ = compile_only
    run_steps(0, 128, torch.bfloat16)
    run_steps(0, 64, torch.float32)
    run_steps(1, 80, torch.float16, window=128, sinks=torch.zeros(8))
    run_steps(1, 256, torch.bfloat16, window=4096, softcap=50.0)
    for name in ("write_kv", "attend", "attend_decoding", "merge_splits"):
        for device, capability in enumerate(_CAPABILITIES):
            for compiled in getattr(triton_kernels, name).device_caches[device][0].values():
                code = compiled.asm["ptx"]
                counts = {what: code.count(instruction) for what, instruction in _COUNTED.items()}
                sizes = {"shared": compiled.metadata.shared, "cubin": len(compiled.asm["cubin"])}
                print(json.dumps({"kernel": name, "capability": capability, **sizes, **counts}))
