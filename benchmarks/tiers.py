"""TTFT of a long prompt out of each tier, over computing it again.

Several prompts in a circle, more than the pool holds: in the first round each is computed, and asked for once more at
once (out of the pool); in the second each has been evicted meanwhile and comes from the one tier that this server has.

For "peer" the server is a pair whose prefill worker is killed after the first round: its successor reads what the
decode worker still has of each prompt, over the KV transport.

Stands behind README's "out of host memory takes 1/48 of computing it again".

    python -m benchmarks.tiers

The codecs of the tiers are measured on the same model's KV of this project's documentation, by one thread.

With `--long` one prompt of that many tokens, which many short ones evict, and a pair with a Llama of one layer in each
case: attention grows with the square, so a million tokens take a core half an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import (
    COLOCATED,
    HERE,
    ONE_PAIR_ALWAYS,
    Server,
    Setup,
    arguments,
    measure_each,
    print_results,
    print_rows,
    serving,
    until_idle,
    verdict,
    write_result,
)
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import KvPool
from tandem.kv_transfer.codec import CODEC_NAMES
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tandem.worker.kv.cpu_codec import codec_for
from tests.support.tiny_llama import save_tiny_text_model

LLAMA = {"vocab_size": 4096, "hidden_size": 32, "num_heads": 1}  # two layers in float32, or one
LLAMA_KV_BYTES = 2 * 2 * 32 * 4  # of a token: layers, keys and values, head_dim, float32
_BYTES = range(3, 250)  # ids that the tokenizer of the Llama knows
_TOKEN_BYTES = 23_040  # KV of the default model
_TIMEOUT_S = 36_000.0  # of a long prompt
_RESTART_TIMEOUT_S = 120.0
_WARM_UP_TOKENS = 8000  # at most
_Timed = tuple[float, int]  # TTFT in seconds, tokens that were not computed
_AIMS = {"host": 1 / 15, "disk": 1 / 10}
_CODEC_TOKENS, _CODEC_BATCH = 8000, 12  # blocks


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--prompt-tokens", 4000, quick=500)
    parser.option("--prompts", 5, quick=3)
    parser.option("--long", 0, "tokens of a long prompt")
    parser.option("--parts", ["host", "disk", "object", "peer", "codecs"], "where the prompt comes from")
    settings = parser.settings()
    if "codecs" in settings.parts and not settings.long:
        rows = codec_rows(settings)
        print_rows(
            f"Codecs on {_CODEC_TOKENS} tokens of KV, one thread", rows, "GB/s of raw KV, the best of all batches"
        )
        write_result("codecs", settings, {"codecs": rows})
    with tempfile.TemporaryDirectory() as name:
        folder, base, token_bytes = Path(name), COLOCATED, _TOKEN_BYTES
        if settings.long:
            settings.prompt_tokens, settings.prompts = settings.long, 1
            base, token_bytes = ONE_PAIR_ALWAYS, LLAMA_KV_BYTES // 2
            model = save_tiny_text_model(folder / "model", max_model_len=settings.long + 1000, num_layers=1, **LLAMA)
            settings.model = str(model)
        pool_bytes = 3 * settings.prompt_tokens * token_bytes // 2
        setups = [one for one in _setups(base, folder, pool_bytes, settings.prompts) if one.name in settings.parts]
        servers = [serving(setup, settings.model, f"--request-timeout-s={_TIMEOUT_S}") for setup in setups]
        results = measure_each(servers, partial(measure, settings=settings))
    workers = "a pair" if settings.long else "colocated, for the peer a pair"
    print_results(f"A prompt of {settings.prompt_tokens} tokens out of each tier; {workers}", results)
    write_result("tiers", settings, results)
    return int(len(results) < len(setups))


def _setups(base: Setup, folder: Path, pool_bytes: int, num_prompts: int) -> list[Setup]:
    common = (*base.flags, f"--pool-bytes={pool_bytes}")
    return [
        Setup("host", (*common, "--host-cache-gb=2")),
        Setup("disk", (*common, f"--disk-cache-path={folder / 'disk'}")),
        Setup("object", (*common, f"--object-cache-url={(folder / 'object').as_uri()}", "--object-cache-codec=raw")),
        Setup("peer", (*ONE_PAIR_ALWAYS.flags, f"--pool-bytes={pool_bytes * (num_prompts + 2)}")),
    ]


def codec_rows(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each codec: how much smaller it makes KV, how fast it is, and how many blocks do not fit."""
    folder = str(resolve_model(settings.model))
    text = "\n".join(path.read_text() for path in sorted((HERE / "docs").glob("*.md")))
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:_CODEC_TOKENS]
    engine = Engine(EngineConfig(model=folder, device="cpu", pool_bytes=2 * _CODEC_TOKENS * _TOKEN_BYTES))
    engine.add(engine.factory.make_sequence("text", tokens, SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work:
        engine.step()
    blocks = torch.tensor([engine.pool.block_of(digest) for digest in engine.pool.cached_digests()])
    torch.set_num_threads(1)
    rows = [_codec_row(name, engine.kv, blocks) for name in CODEC_NAMES]
    engine.close()
    return rows


def _codec_row(name: str, kv: KvPool, blocks: Tensor) -> dict[str, Any]:
    codec = codec_for(name, kv.device)
    data = torch.empty(_CODEC_BATCH, codec.encoded_bytes(kv.block_shape, kv.dtype), dtype=torch.uint8)
    encode_s, decode_s, num_unfit = math.inf, math.inf, 0
    for first in range(0, len(blocks) - _CODEC_BATCH, _CODEC_BATCH):
        batch = blocks[first : first + _CODEC_BATCH].clone()
        encode_s = min(encode_s, _seconds(partial(codec.gather, kv.shards, batch, data)))
        decode_s = min(decode_s, _seconds(partial(codec.scatter, data, kv.shards, batch)))
        num_unfit += sum(not codec.holds(row, kv.block_shape) for row in data.numpy())
    gigabytes = _CODEC_BATCH * kv.block_bytes / 1e9
    row = {"codec": name, "times smaller": kv.block_bytes / data.shape[1], "do not fit": num_unfit}
    return row | {"encode": gigabytes / encode_s, "decode": gigabytes / decode_s}


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


async def measure(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """TTFT: computed, out of the pool, and out of the tier or the pool of the other worker."""
    server = dataclasses.replace(server, timeout_s=_TIMEOUT_S)
    num_prompts, seed = settings.prompts + 1, 1_000_003 * settings.seed + 1
    rng = random.Random(seed)
    if settings.long:
        prompts = [rng.choices(_BYTES, k=settings.prompt_tokens) for _ in range(num_prompts)]
    else:
        prompts = await server.prompts(num_prompts, settings.prompt_tokens, seed)
    await _ttft(server, prompts.pop()[:_WARM_UP_TOKENS])  # not counted: kernels and memory of this size
    computed, pool = [], []
    for prompt in prompts:
        computed.append(await _ttft(server, prompt))
        pool.append(await _ttft(server, prompt))
    if server.name == "peer":
        await _replace_prefill_worker(server)
    else:  # loads teach the tier's speed, and later loads may be split differently: a third round
        prompts = [*prompts, *prompts]
    tier = []
    for prompt in prompts:
        if settings.long and server.name != "peer":
            await _evict(server, rng, settings.long)
        tier.append(await _ttft(server, prompt))
    computed_s, pool_s, tier_s = (statistics.median(ttft_s for ttft_s, _ in timed) for timed in (computed, pool, tier))
    share, aim = tier_s / computed_s, None if settings.long else _AIMS.get(server.name)
    return {
        "computed ms": 1e3 * computed_s,
        "pool (L1) ms": 1e3 * pool_s,
        "tier: TTFT p50 ms": 1e3 * tier_s,
        "max": 1e3 * max(ttft_s for ttft_s, _ in tier),
        "% loaded": 100 * sum(hit for _, hit in tier) / (len(tier) * settings.prompt_tokens),
        "over computing": share,
        "aim": "-" if aim is None else verdict(f"{aim:.4f}", share <= aim),
    }


async def _replace_prefill_worker(server: Server) -> None:
    [former] = await server.workers("prefill")
    psutil.Process(former["pid"]).kill()
    await server.until_replaced([former], _RESTART_TIMEOUT_S)


async def _evict(server: Server, rng: random.Random, num_tokens: int) -> None:
    """Fill the pool, which holds one and a half prompts of `num_tokens`, twice with short prompts."""
    for _ in range(3 * num_tokens // _WARM_UP_TOKENS + 1):
        await server.greedy(rng.choices(_BYTES, k=_WARM_UP_TOKENS), 1)


async def _ttft(server: Server, prompt: list[int]) -> _Timed:
    timing = await server.greedy(prompt, 2)
    await until_idle(server, _RESTART_TIMEOUT_S)  # tiers have taken what was computed
    return timing.ttft_s, timing.num_cached_tokens


if __name__ == "__main__":
    sys.exit(main())
