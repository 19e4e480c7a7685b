"""Cost of KV codecs: bytes, seconds, and how much worse the model predicts text whose prefix was encoded.

Windows of a text that comes with Python (the language reference in `pydoc_data`): the engine computes the KV of a
prefix, a codec encodes and decodes the blocks in place, and the model is scored on the tokens that follow, teacher
forced. All codecs see the same windows and the same KV. Encoding and decoding are timed on one core.

    python -m benchmarks.codec
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.common import arguments, console, print_table, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.kv_transfer.codec import CODEC_NAMES, Codec, create_codec
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.sampling import SamplingParams
from tandem.text.tokenizer import Tokenizer

_REPEATS = 15


@dataclass(slots=True)
class Scores:
    """Sums over the windows, for one codec."""

    losses: list[Tensor] = field(default_factory=list)  # of each scored token, nats
    greedy: list[Tensor] = field(default_factory=list)  # most likely token at the same positions
    squared_errors: Tensor = field(default_factory=lambda: torch.zeros(2))  # of K and V
    squares: Tensor = field(default_factory=lambda: torch.zeros(2))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="of each window, through the codec")
    parser.add_argument("--scored-tokens", type=int, default=256, help="of each window, behind the prefix")
    settings = parser.parse_args()
    if settings.quick:
        settings.windows, settings.prefix_tokens, settings.scored_tokens = 2, 256, 64
    results = measure(settings)
    codecs = results["codecs"]
    print_table(
        f"KV codecs: {results['model']} in {results['kv_dtype']}, {results['num_scored_tokens']:,} tokens scored, each "
        f"behind {settings.prefix_tokens:,} tokens or more",
        ["codec", "B/token", "ratio", "encode", "decode", "K error", "V error", "perplexity", "change", "±", "changed"],
        [
            [
                name,
                f"{result['bytes_per_token']:,.0f}",
                f"{codecs['raw']['bytes_per_token'] / result['bytes_per_token']:.2f}",
                f"{result['encode_bytes_per_s'] / 1e9:.2f}",
                f"{result['decode_bytes_per_s'] / 1e9:.2f}",
                f"{result['key_error']:.2%}",
                f"{result['value_error']:.2%}",
                f"{result['perplexity']:.3f}",
                f"{result['perplexity_change']:+.2%}",
                f"{result['perplexity_change_error']:.2%}",
                f"{result['greedy_changed']:.2%}",
            ]
            for name, result in codecs.items()
        ],
        caption="encode, decode: GB/s of raw KV on one core; errors: RMS over RMS; ±: standard error of the change; "
        "changed: share of greedy next tokens",
    )
    write_result("codec", settings, results)
    return 0


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Speed on the first window's blocks, quality over all windows."""
    folder = resolve_model(settings.model, report=console.print)
    engine = Engine(EngineConfig(model=str(folder), device="cpu"))
    size = engine.config.block_size
    if settings.prefix_tokens % size:
        raise ConfigError(f"prefix_tokens={settings.prefix_tokens} is not a multiple of block_size={size}")
    codecs = {name: create_codec(name) for name in CODEC_NAMES}
    windows = cut_windows(Tokenizer(folder).encode(reference_text()), settings)
    speeds = time_codecs(codecs, engine, windows[0], settings.prefix_tokens)
    scores = {name: Scores() for name in codecs}
    for window in windows:
        score_window(engine, codecs, scores, window, settings.prefix_tokens)
    block_shape, dtype = engine.kv.block_shape, engine.kv.dtype
    return {
        "model": folder.name,
        "kv_dtype": str(dtype).removeprefix("torch."),
        "block_size": size,
        "python": platform.python_version(),
        "num_scored_tokens": len(windows) * settings.scored_tokens,
        "codecs": {
            name: {
                "bytes_per_token": codec.encoded_bytes(block_shape, dtype) / size,
                **speeds[name],
                **quality(scores[name], scores["raw"]),
            }
            for name, codec in codecs.items()
        },
    }


def reference_text() -> str:
    """The language reference as `help()` shows it: 450 kB in Python 3.11."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut_windows(token_ids: list[int], settings: argparse.Namespace) -> list[list[int]]:
    """Evenly spaced windows: a prefix, one token that is always computed, and the tokens to score."""
    length = settings.prefix_tokens + 1 + settings.scored_tokens
    stride = (len(token_ids) - length) // max(1, settings.windows - 1)
    if stride < settings.scored_tokens:
        raise ConfigError(f"windows={settings.windows} of {length} tokens do not fit a text of {len(token_ids)} tokens")
    return [token_ids[idx * stride : idx * stride + length] for idx in range(settings.windows)]


@contextmanager
def computed_prefix(engine: Engine, window: list[int], num_tokens: int) -> Iterator[Sequence]:
    """A sequence of the window with blocks for all of it and the KV of its first tokens, while the context is open."""
    blocks = engine.pool.try_allocate(-(-len(window) // engine.config.block_size))
    if blocks is None:
        raise ConfigError(f"a window of {len(window)} tokens does not fit the KV pool")
    sequence = engine.make_sequence("window", window, SamplingParams(max_tokens=1))
    sequence.blocks = blocks
    try:
        step = engine.config.max_num_batched_tokens
        for start in range(0, num_tokens, step):
            engine.runner.run([ScheduledChunk(sequence, start, min(step, num_tokens - start), samples=False)])
        yield sequence
    finally:
        engine.pool.release(blocks)


def score_window(
    engine: Engine, codecs: dict[str, Codec], scores: dict[str, Scores], window: list[int], prefix_tokens: int
) -> None:
    """Score each codec on one window."""
    targets = torch.tensor(window[prefix_tokens + 1 :])
    with computed_prefix(engine, window, prefix_tokens) as sequence:
        prefix = torch.tensor(sequence.blocks[: prefix_tokens // engine.config.block_size])
        kv = engine.kv.read(prefix)
        # One chunk per token, so that each yields logits; in one step each token sees those before it.
        chunks = [ScheduledChunk(sequence, place, 1, samples=True) for place in range(prefix_tokens, len(window) - 1)]
        for name, codec in codecs.items():
            decoded = through(codec, kv)
            engine.kv.write(prefix, decoded)
            logits = engine.runner.run(chunks)
            assert logits is not None
            scores[name].losses.append(cross_entropy(logits.float(), targets, reduction="none"))
            scores[name].greedy.append(logits.argmax(dim=-1))
            # [num_blocks, heads, layers, 2, ...]: sum over all but K and V
            scores[name].squared_errors += (decoded.float() - kv.float()).square().sum(dim=(0, 1, 2, 4, 5))
            scores[name].squares += kv.float().square().sum(dim=(0, 1, 2, 4, 5))


def through(codec: Codec, blocks: Tensor) -> Tensor:
    """Blocks [n, *block_shape] encoded and decoded."""
    data = encoded_buffer(codec, blocks)
    codec.encode(blocks, data)
    decoded = torch.empty_like(blocks)
    codec.decode(data, decoded)
    return decoded


def encoded_buffer(codec: Codec, blocks: Tensor) -> Tensor:
    """A buffer for the encoded blocks."""
    return torch.empty(len(blocks), codec.encoded_bytes(blocks.shape[1:], blocks.dtype), dtype=torch.uint8)


def quality(scores: Scores, raw: Scores) -> dict[str, float]:
    """Errors of K and V, and what they do to the model's predictions, paired token by token with `raw`."""
    losses = torch.cat(scores.losses).double()
    changes = losses - torch.cat(raw.losses).double()
    key_error, value_error = (scores.squared_errors / scores.squares).sqrt().tolist()
    return {
        "key_error": key_error,
        "value_error": value_error,
        "perplexity": losses.mean().exp().item(),
        "perplexity_change": changes.mean().expm1().item(),
        "perplexity_change_error": changes.std().item() / math.sqrt(len(changes)),
        "greedy_changed": (torch.cat(scores.greedy) != torch.cat(raw.greedy)).double().mean().item(),
    }


def time_codecs(codecs: dict[str, Codec], engine: Engine, window: list[int], prefix_tokens: int) -> dict[str, Any]:
    """Raw KV bytes per second of each codec on one core, by the blocks of one prefix."""
    with computed_prefix(engine, window, prefix_tokens) as sequence:
        blocks = engine.kv.read(sequence.blocks[: prefix_tokens // engine.config.block_size])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: time_codec(codec, blocks) for name, codec in codecs.items()}
    finally:
        torch.set_num_threads(num_threads)


def time_codec(codec: Codec, blocks: Tensor) -> dict[str, float]:
    data, decoded = encoded_buffer(codec, blocks), torch.empty_like(blocks)
    encode_s = median_s(lambda: codec.encode(blocks, data))
    decode_s = median_s(lambda: codec.decode(data, decoded))
    return {"encode_bytes_per_s": blocks.nbytes / encode_s, "decode_bytes_per_s": blocks.nbytes / decode_s}


def median_s(call: Callable[[], None]) -> float:
    """Median seconds of a call, without the first."""
    call()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
