"""The attention backends that run here: largest difference from plain attention, and speed.

Differences are relative to a row's length, over head dimensions, groupings of heads, block sizes, windows, soft caps,
sinks and contexts that are split. Speed is of one layer, beside what its KV and its products take: decoding reads all
keys and values once, a chunk of a prompt multiplies. An interpreted kernel has no speed.

    python -m benchmarks.attention                        # the CPU's kernel, or those of the GPU
    TRITON_INTERPRET=1 python -m benchmarks.attention     # the Triton kernel too, on a CPU
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.common import arguments, console, ms, print_table, write_result
from tandem.engine.attention.choice import choose_backend, make_backend, read_device
from tandem.engine.attention.interface import AttentionBackend, LayerAttention
from tandem.engine.attention_check import LAYER_IDX, AttentionCall, Pages, largest_error, make_step
from tandem.protocol.errors import ConfigError

_PLAIN = LayerAttention(num_heads=8, scale=0.25, window=0, softcap=0.0, has_sinks=False)
_SHAPES = [(64, 1, 3, 16), (80, 2, 2, 1), (128, 1, 2, 64), (256, 1, 2, 16)]  # head_dim, KV heads, heads, block size
_CONTEXT = 8192  # of the model: the Triton kernel chooses its splits by it
_SPEEDS = [  # sequences, tokens of each, their context
    ("decode", 1, 1, 1024),
    ("decode", 1, 1, 8192),
    ("decode", 64, 1, 1024),
    ("prefill", 1, 2048, 2048),
    ("prefill", 1, 2048, 8192),
]
_SERIES_S = 0.2


def main() -> int:
    settings = arguments(__doc__).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = list(backends_of(device))
    differences = {
        f"{backend.name} {dtype}".replace("torch.", ""): largest_differences(backend, device, dtype, settings.quick)
        for backend in backends
        for dtype in dtypes_of(backend)
    }
    kinds = list(next(iter(differences.values())))
    print_table(
        "Largest difference of a row from plain attention, relative to its length",
        ["backend", *kinds],
        [
            [name, *("-" if value is None else f"{value:.1e}" for value in row.values())]
            for name, row in differences.items()
        ],
    )
    speeds = [row for backend in backends for row in measure_speeds(backend, device, settings.quick)]
    print_table(
        f"One layer of 32 heads over 8 KV heads of 128 in bfloat16, on {device_name(device)}",
        ["backend", "step", "sequences", "context", "ms", "KV GB/s", "TFLOP/s"],
        [[*row[:4], ms(row[4]), f"{row[5] / 1e9:.1f}", f"{row[6] / 1e12:.2f}"] for row in speeds],
    )
    write_result("attention", settings, {"differences": differences, "speeds": speeds})
    return int(any(value is not None and math.isnan(value) for row in differences.values() for value in row.values()))


def backends_of(device: torch.device) -> Iterator[AttentionBackend]:
    """All backends that run on this device."""
    for name in ("cpu", "fa3", "triton"):
        try:
            choose_backend(name, read_device(device), 128, torch.bfloat16, [_PLAIN])
        except ConfigError as exc:
            console.print(f"left out: {exc}")
        else:
            yield make_backend(name, 1, _CONTEXT)


def dtypes_of(backend: AttentionBackend) -> list[torch.dtype]:
    """The types that the backend computes."""
    known = {"cpu": [torch.float32, torch.bfloat16], "fa3": [torch.float16, torch.bfloat16]}
    return known.get(backend.name, [torch.float32, torch.float16, torch.bfloat16])


def largest_differences(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, quick: bool
) -> dict[str, float | None]:
    """For each kind of attention the largest difference over the shapes.

    None: the backend has no such kind. NaN: a row was not written.
    """
    kinds = {
        "plain": _PLAIN,
        "window": _PLAIN._replace(window=50),
        "soft cap": _PLAIN._replace(softcap=30.0),
        "sinks": _PLAIN._replace(has_sinks=True),
        "all": _PLAIN._replace(window=50, softcap=30.0, has_sinks=True),
    }
    result: dict[str, float | None] = {}
    for name, kind in kinds.items():
        if backend.name == "fa3" and (kind.softcap or kind.has_sinks):
            result[name] = None
            continue
        errors = []
        for dim, kv_heads, heads, block_size in _SHAPES[: 1 if quick else None]:
            pages = Pages(kv_heads, dim, block_size, dtype, device)
            errors.append(largest_error(backend, pages, kind._replace(num_heads=heads, scale=dim**-0.5)))
        result[name] = math.nan if any(map(math.isnan, errors)) else max(errors)
    return result


def measure_speeds(
    backend: AttentionBackend, device: torch.device, quick: bool
) -> Iterator[tuple[str, str, int, int, float, float, float]]:
    """(backend, step, sequences, context, seconds, KV bytes/s, floating-point operations/s) of one layer."""
    if backend.name == "triton" and device.type == "cpu":
        return
    pages = Pages(8, 128, 16, torch.bfloat16, device)
    layer = _PLAIN._replace(num_heads=32, scale=128**-0.5)
    for name, num_seqs, num_tokens, context in _SPEEDS[: 1 if quick else None]:
        spans = [(context - num_tokens, context)] * num_seqs
        step = make_step(pages, layer, spans, torch.Generator().manual_seed(0))
        seconds = time_step(backend, layer, step, device)
        kv_bytes = num_seqs * context * pages.num_kv_heads * pages.head_dim * 2 * 2
        visible = num_seqs * num_tokens * (context - (num_tokens - 1) / 2)
        flops = 4 * visible * layer.num_heads * pages.head_dim
        yield backend.name, name, num_seqs, context, seconds, kv_bytes / seconds, flops / seconds


@torch.inference_mode()
def time_step(backend: AttentionBackend, layer: LayerAttention, step: AttentionCall, device: torch.device) -> float:
    """Seconds of one call, in the fastest of five series. On a GPU a series is launched before it is waited for."""
    out = torch.empty_like(step.query)

    def seconds_of(num_calls: int) -> float:
        started = time.perf_counter()
        for _ in range(num_calls):
            backend(
                LAYER_IDX, step.query, step.key, step.value, out, step.context,
                scale=layer.scale, window=layer.window, softcap=layer.softcap, sinks=None,
            )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    seconds_of(2)  # compiles
    num_calls = max(1, int(_SERIES_S / seconds_of(1)))
    return min(seconds_of(num_calls) for _ in range(5)) / num_calls


def device_name(device: torch.device) -> str:
    """What a reader knows the device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU core"


if __name__ == "__main__":
    sys.exit(main())
