"""Compiles the Triton attention kernels for GPUs without having one: `python compile_kernels.py`.

Prints one JSON object a line: kernel, capability, shared memory in bytes, and counts of instructions. This is a program
of its own because Triton decides once per process whether kernels are interpreted.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.engine.attention import triton_kernels
from tandem.engine.attention.triton import split_tokens, tile_of

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_POINTERS = {  # others are of the model's own type
    "block_tables": "*i32",
    "query_starts": "*i32",
    "kv_lens": "*i32",
    "slot_mapping": "*i64",
    "part_acc": "*fp32",
    "part_stats": "*fp32",
    "lse": "*fp32",
    "scale": "fp32",
}
_COUNTED = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "copies ahead": "cp.async.c"}


def compile_kernel(name: str, capability: int, dtype: torch.dtype, constants: dict[str, Any], **options: int) -> None:
    """Compile one kernel down to the GPU's machine code and print what came of it."""
    kernel = getattr(triton_kernels, name)
    signature: dict[str, str] = {}
    aligned = {}
    for idx, argument in enumerate(kernel.arg_names):
        is_number = argument.endswith("stride") or argument in ("num_seqs", "parallel_tokens", "num_splits")
        kind = "i32" if is_number else _POINTERS.get(argument, _TYPES[dtype])
        if argument in constants:
            kind = "constexpr"
        signature[argument] = kind
        if kind.startswith("*") or (kind == "i32" and argument.endswith("stride") and argument != "table_stride"):
            aligned[(idx,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = compiled.asm["ptx"]
    counts = {what: code.count(instruction) for what, instruction in _COUNTED.items()}
    shared, size = compiled.metadata.shared, len(compiled.asm["cubin"])
    print(json.dumps({"kernel": name, "capability": capability, "shared": shared, "cubin": size, **counts}))


def compile_all(capability: int, head_dim: int, dtype: torch.dtype, window: int, softcap: float, sinks: bool) -> None:
    """Compile the three kernels for a model with 8 KV heads and 4 query heads for each."""
    dim, tile = 1 << (head_dim - 1).bit_length(), tile_of(head_dim, dtype)
    layout = {"num_kv_heads": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
    shared = {"WINDOW": window, "HAS_SINKS": sinks, "HAS_LSE": False, "SPLIT": split_tokens(8192), "lse": None}
    shared |= {} if sinks else {"sinks": None}
    compile_kernel("write_kv", capability, dtype, {**layout, "HEADS": 8, "DIM": dim}, num_warps=4)
    compile_kernel(
        "attend",
        capability,
        dtype,
        {
            **layout,
            **shared,
            "GROUP": 4,
            "SOFTCAP": softcap,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "DIM": dim,
            "CAST": False,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    compile_kernel("merge_splits", capability, dtype, {**shared, "HEAD_DIM": head_dim, "DIM": dim}, num_warps=1)


if __name__ == "__main__":
    compile_all(80, 128, torch.bfloat16, 0, 0.0, False)
    compile_all(80, 64, torch.float32, 0, 0.0, False)
    compile_all(90, 80, torch.float16, 128, 0.0, True)
    compile_all(90, 256, torch.bfloat16, 4096, 50.0, False)
