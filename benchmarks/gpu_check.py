"""Whether Tandem's own engine gives the right tokens on this machine's GPU, and how near it comes to the card's limits.

    make gpu-check                                          # under five minutes on one GPU of 24 GB or more
    python -m benchmarks.gpu_check --device cpu --quick     # the same checks with small sizes, as where there is no GPU

Each check is a process of its own, so a device that one of them loses is there again for the next, and its memory is
free. One that fails, or takes too long, is a row that says so; the exit code is then 1, as for a token that is wrong.
Sizes follow the card's memory: a Llama of 8B from 40 GB on, of 1.5B below. All weights are random.

Stands behind docs/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks import steps, transfer
from benchmarks.common import (
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    beside,
    console,
    end_whole,
    print_rows,
    serving,
    verdict,
    write_result,
)
from tandem.engine.attention.choice import choose_backend, read_device
from tandem.engine.attention.triton import TritonAttention, split_tokens
from tandem.engine.engine import Engine
from tandem.engine.loader import resolve_device
from tandem.engine.model_runner import DeviceBatch, ModelRunner
from tandem.engine.sampling.sampler import Sampler
from tandem.engine.scheduler import Scheduler
from tandem.loadtest.client import run_measured
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tests.support.architectures import SERVED, load_plain, save_model
from tests.support.attention_case import Case
from tests.support.tiny_llama import save_tiny_text_model

_LIMIT_S = 240.0  # of a check
_LARGE_GB = 40.0  # from which a card takes a model of 8B
_FAMILIES = ("llama", "qwen2, sliding", "qwen3_moe", "gemma2", "gpt_oss")
_PACKAGES = ("torch", "triton", "transformers", "nixl", "ray")
_LENGTHS = (1, 5, 16, 33, 64, 100, 130, 300)  # of prompts
_ANSWER_TOKENS = 24
_HOST_CONTEXT = 1000  # tokens of a prompt whose decode steps are timed
_HOST_STEPS = 120
_HOST_PARTS: dict[str, tuple[type, str]] = {
    "step": (Engine, "step"),
    "schedule": (Scheduler, "schedule"),
    "pack": (ModelRunner, "pack"),
    "launch": (ModelRunner, "forward"),
    "plan": (Sampler, "plan"),
    "sample": (Sampler, "launch"),
    "conclude": (Engine, "_conclude"),
}
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}


class Row(NamedTuple):
    """A line of the table."""

    what: str
    value: object
    unit: str = ""
    aim: str = ""
    is_right: bool = True  # False: a wrong token, or a check that failed


Check = Callable[[argparse.Namespace], Iterator[Row]]


def main() -> int:
    parser = arguments(__doc__, model=False)
    parser.option("--device", "auto", choices=["auto", "cuda", "cpu"])
    parser.option("--only", list(_CHECKS), choices=list(_CHECKS))
    settings = parser.settings()
    settings.device = resolve_device(settings.device).type
    rows: list[tuple[str, Row]] = []
    for name in settings.only:
        found = _run_apart(name, settings)
        rows += [(name, row) for row in found]
        console.print(f"[dim]{name}: {len(found)} rows[/]")
    table = [{"check": name, **row._asdict()} for name, row in rows]
    shown = [{name: row[name] for name in ("check", "what", "value", "unit", "aim")} for row in table]
    print_rows(f"Tandem's engine on {settings.device}", shown)
    write_result("gpu_check", settings, table)
    return int(not all(row.is_right for _, row in rows))


def _run_apart(name: str, settings: argparse.Namespace) -> list[Row]:
    """The rows of a check, which runs in a process of its own."""
    began_s = time.perf_counter()
    with beside(_send_rows, name, settings) as connection:
        try:
            late = [Row("ended after", _LIMIT_S, "s", "it took too long", is_right=False)]
            rows = connection.recv() if connection.poll(_LIMIT_S) else late
        except EOFError:
            rows = [Row("failed", "the error is above", is_right=False)]
    return [*rows, Row("took", time.perf_counter() - began_s, "s")]


def _send_rows(connection: Connection, name: str, settings: argparse.Namespace) -> None:
    logging.disable_progress_bar()
    end_whole()  # if it takes too long, what it started is stopped
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the parent, which ends this process
    with torch.inference_mode():
        connection.send(list(_CHECKS[name](settings)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may come while this process ends


def check_environment(settings: argparse.Namespace) -> Iterator[Row]:
    """What is compared when two tables differ."""
    yield Row("machine", f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    yield Row("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    if settings.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        yield Row("card", f"{card.name}, {card.total_memory / 1e9:.0f} GB, {card.major}.{card.minor}")
        yield Row("CUDA of torch", str(torch.version.cuda))
    device = read_device(torch.device(settings.device))
    yield Row("attention", choose_backend("auto", device, 128, torch.bfloat16, ()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def check_families(settings: argparse.Namespace) -> Iterator[Row]:
    """Greedy tokens of small models in float32 beside transformers' own code on the same device."""
    for name in _FAMILIES[:2] if settings.quick else _FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), SERVED[name])
            prompts = _prompts(settings, 150)
            answers = _answers(_engine(folder, settings, "float32"), prompts, "")
            plain = load_plain(Path(folder)).to(settings.device)
        num_equal = sum(map(lambda prompt, answer: _is_plain(plain, prompt, answer), prompts, answers))
        yield _equal(f"{name}: answers that are transformers'", num_equal, len(prompts))


def _is_plain(plain: Any, prompt: list[int], answer: list[int]) -> bool:
    logits = plain(torch.tensor([prompt + answer], device=plain.device), use_cache=False).logits[0]
    return bool(logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer)


def check_tokens(settings: argparse.Namespace) -> Iterator[Row]:
    """Whether a token depends on what is computed beside it. In 16 bits it may, unless `--exact on` forbids it."""
    kinds = [("float32", "off", "auto"), ("bfloat16", "off", "auto"), ("bfloat16", "on", "auto")]
    if settings.device == "cuda":
        kinds.append(("bfloat16", "on", "fp8"))
    for dtype, exact, kv in kinds:
        make = partial(_engine, settings=settings, dtype=dtype, exact=exact, kv_cache_dtype=kv)
        with tempfile.TemporaryDirectory() as folder:
            _save_llama(Path(folder), settings)
            engine, prompts = make(folder), _prompts(settings, 500)
            answers = _answers(engine, prompts, "first")
            found = {"the same again": _answers(engine, prompts, "second")}
            found["prompts cached"] = _answers(engine, prompts, "first")
            found["each alone"] = [_answers(engine, [one], f"alone {i}")[0] for i, one in enumerate(prompts)]
            with steps.without_graphs(engine):
                found["without graphs"] = _answers(engine, prompts, "plain")
            engine = make(folder, max_num_batched_tokens=64)
            found["in chunks of 64"] = _answers(engine, prompts, "chunks")
        for what, others in found.items():
            row = _equal(
                f"{dtype}, exact {exact}, KV {kv}, {what}", sum(map(list.__eq__, answers, others)), len(prompts)
            )
            must_be_equal = dtype == "float32" or exact == "on" or what == "the same again"
            yield row if must_be_equal else row._replace(aim="", is_right=True)


def _equal(what: str, num_equal: int, num: int) -> Row:
    return Row(what, f"{num_equal} of {num}", aim=verdict("all", num_equal == num), is_right=num_equal == num)


def check_steps(settings: argparse.Namespace) -> Iterator[Row]:
    """Decode steps beside reading weights and KV once, prompts beside a large product of matrices."""
    is_small = settings.device == "cpu"
    of_steps = argparse.Namespace(
        **{**vars(settings), "quick": is_small},
        llama=2 if is_small else 32 if _is_large() else 28,
        shape="8b" if _is_large() else "1.5b",
        weights="as-loaded",
        threads=0,
        exact="off",
        context=40 if is_small else 1024,
        streams=[1, 3] if is_small else [1, 8, 64],
        prompts=[16, 64] if is_small else [16, 512, 4096],
        mixed=20 if is_small else 256,
        beside=["busy core"],
        steps=4 if is_small else 30,
        rounds=1 if is_small else 2,
    )
    measured = steps.measure(of_steps)
    yield Row("kernels", measured.kernels)
    yield Row("reading", measured.limits.bytes_per_s / 1e9, "GB/s")
    yield Row("product of matrices", measured.limits.flops / 1e12, "TFLOP/s")
    for one in measured.steps:
        what = f"{one['']}, {one['condition']}"
        yield Row(f"{what}: p50", one["p50 ms"], "ms", _step_aim(one))
        yield Row(f"{what}: of the device", one["of the device"], "", _share_aim(one))
    of_steps.exact = "on"
    for one, plain in zip(steps.measure(of_steps).steps, measured.steps, strict=True):
        price = one["p50 ms"] / plain["p50 ms"]
        aim = verdict("1.35", price <= 1.35) if (one[""], one["condition"]) == ("64 streams", "graphs") else ""
        yield Row(f"{one['']}, {one['condition']}: exact over not", price, "", aim)


def _step_aim(row: dict[str, Any]) -> str:
    return verdict("4 ms", row["p50 ms"] <= 4.0) if row[""] in ("prompt of 16", "prompt of 512") else ""


def _share_aim(row: dict[str, Any]) -> str:
    aims = {"1 streams": 0.85, "8 streams": 0.85, "64 streams": 0.80, "prompt of 4096": 0.75}
    aim = aims.get(row[""]) if row["condition"] == "graphs" else None
    return "" if aim is None else verdict(f"{aim:g}", row["of the device"] >= aim)


def check_host(settings: argparse.Namespace) -> Iterator[Row]:
    """CPU time of the host's part of a decode step.

    On a CPU there is no model: its logits lie ready, and are so few that the device's part of sampling is cheap too.
    """
    with tempfile.TemporaryDirectory() as folder:
        _save_llama(Path(folder), settings)
        engine = _engine(folder, settings, "bfloat16", max_num_seqs=256, num_threads=1)
    if settings.device == "cpu":
        engine.runner.compute = partial(_ready_logits, torch.randn(256, 64))  # type: ignore[method-assign]
    for num_streams in (1, 4) if settings.quick else (1, 64, 256):
        for name, sampling in _SAMPLING.items():
            spent = _host_seconds(engine, num_streams, sampling)
            total_ms = 1e3 * spent.pop("step")
            aim = verdict("1 ms", total_ms <= 1.0) if num_streams == 64 else ""
            parts = ", ".join(f"{part} {1e3 * seconds:.3f}" for part, seconds in spent.items())
            yield Row(f"{num_streams} streams, {name}", total_ms, "ms", aim)
            yield Row(f"{num_streams} streams, {name}: of it", parts, "ms")


def _ready_logits(logits: torch.Tensor, batch: DeviceBatch, _: object) -> torch.Tensor | None:
    return None if batch.logit_rows is None else logits[: len(batch.logit_rows)]


def _host_seconds(engine: Engine, num_streams: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Median CPU seconds of a step in which all streams decode, and of its parts."""
    spent = dict.fromkeys(_HOST_PARTS, 0.0)
    found: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        for part, (owner, name) in _HOST_PARTS.items():
            stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), spent, part)))
        for i in range(num_streams):
            params = SamplingParams(max_tokens=_HOST_STEPS, ignore_eos=True, seed=i, **sampling)
            engine.add(engine.factory.make_sequence(f"{num_streams} {i}", [5] * _HOST_CONTEXT, params))
        while engine.has_work:
            spent.update(dict.fromkeys(spent, 0.0))
            results = engine.step()
            if any(result.stats.num_decode_seqs == num_streams for result in results):
                found.append(dict(spent))
    counted = found[len(found) // 4 :]
    return {part: statistics.median(one[part] for one in counted) for part in spent}


def _timed(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        began_s = time.thread_time()
        result = function(*args, **options)
        spent[part] += time.thread_time() - began_s
        return result

    return call


def check_attention(settings: argparse.Namespace) -> Iterator[Row]:
    """Triton's kernels alone, beside torch's attention for a whole prompt."""
    if settings.device == "cpu":
        yield Row("Triton's kernels", "only on a GPU; tests interpret them")
        return
    shapes = {
        "prompt of 4,096": ([4096], 4096),
        "chunk of 256 behind 8,192": ([8448], 256),
        "64 decode behind 4,096": ([4096] * 64, 1),
        "256 decode behind 1,024": ([1024] * 256, 1),
    }
    backend = TritonAttention(split_tokens(8448))
    for (what, (lengths, num_new)), kv_dtype in itertools.product(
        shapes.items(), (torch.bfloat16, torch.float8_e4m3fn)
    ):
        heads: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
        case = Case(lengths, **heads, kv_dtype=kv_dtype, device=settings.device)
        pool, chunks = case.new_pool(0.0), [(i, length - num_new, length) for i, length in enumerate(lengths)]
        context = case.context(pool, chunks)
        query, key, value = (torch.cat([one[-num_new:] for one in tensors]) for tensors in (case.q, case.k, case.v))
        out = torch.empty_like(query)
        options: dict[str, Any] = {"scale": 0.1, "window": 0, "softcap": 0.0, "sinks": None}
        took_us = 1e6 * _best_s(partial(backend, 1, query, key, value, out, context, **options), settings)
        if kv_dtype is not torch.bfloat16:
            yield Row(f"{what}, KV in fp8", took_us, "us")
            continue
        is_whole = num_new == lengths[0]
        yield Row(what, took_us, "us", verdict("330 us", took_us <= 330) if is_whole else "")
        if is_whole:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            plain = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            yield Row(f"{what}, torch's own", 1e6 * _best_s(plain, settings), "us")


def _best_s(function: Callable[[], object], settings: argparse.Namespace) -> float:
    device = torch.device(settings.device)
    return min(steps.seconds_of(function, device) for _ in range(20))


def check_transfers(settings: argparse.Namespace) -> Iterator[Row]:
    """NIXL between two processes, both pools on the device."""
    sizes = {"megabytes": 128, "rounds": 10, "block_kib": 2048}
    if settings.quick:
        sizes = {"megabytes": 4, "rounds": 3, "block_kib": 64}
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        rows = transfer.measure("nixl", folder, argparse.Namespace(**vars(settings), **sizes))
    for row in rows:
        has_aim = settings.device == "cuda" and "scattered" in row["operation"]
        yield Row(row["operation"], row["GB/s"], "GB/s", verdict("150 GB/s", row["GB/s"] >= 150) if has_aim else "")


def check_serving(settings: argparse.Namespace) -> Iterator[Row]:
    """`tandem serve` with a prefill and a decode worker on the one GPU, from its start to Ctrl-C, beside one engine."""
    prompts, before = _prompts(settings, 250), _used_bytes(settings)
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_text_model(Path(name), hidden_size=256)
        flags = (f"--device={settings.device}", "--dtype=float32", "--pool-bytes=200000000")
        with serving(ONE_PAIR_ALWAYS, str(folder), *flags) as server:
            yield Row("ready after", server.start_s, "s")
            answers = run_measured(_ask(server, prompts))
            yield Row("memory of both workers", (_used_bytes(settings) - before) / 1e9, "GB")
            began_s = time.perf_counter()
        yield Row("stopped after", time.perf_counter() - began_s, "s")
        expected = _answers(_engine(str(folder), settings, "float32"), prompts, "")
    yield _equal("answers over NIXL that are one engine's", sum(map(list.__eq__, answers, expected)), len(prompts))


async def _ask(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, one after another."""
    body = {"model": server.model, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    answers = [await server.client.request_json("POST", "/v1/completions", {**body, "prompt": one}) for one in prompts]
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _used_bytes(settings: argparse.Namespace) -> int:
    if settings.device == "cpu":
        return 0
    num_free, num_bytes = torch.cuda.mem_get_info()
    return num_bytes - num_free


def _prompts(settings: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    source = random.Random(settings.seed)
    return [source.choices(range(3, vocab_size), k=length) for length in _LENGTHS]


def _save_llama(folder: Path, settings: argparse.Namespace) -> None:
    """A Llama of random weights, large enough that its products are those of a real one."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    if settings.device == "cuda":
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    num_layers = 2 if settings.device == "cpu" else 8
    config = LlamaConfig(vocab_size=500, num_hidden_layers=num_layers, max_position_embeddings=2048, **shape)
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        LlamaForCausalLM(config).save_pretrained(folder)


def _engine(folder: str, settings: argparse.Namespace, dtype: Any, **more: Any) -> Engine:
    config: dict[str, Any] = {
        "max_num_seqs": 64,
        "pool_bytes": 1 << 26 if settings.device == "cpu" else 1 << 30,
        "speculate": "off",
    }
    return Engine(EngineConfig(model=folder, device=settings.device, dtype=dtype, **{**config, **more}))


def _answers(engine: Engine, prompts: list[list[int]], salt: str) -> list[list[int]]:
    """Greedy answers, all at once. Prompts of another salt share no cached blocks."""
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0, ignore_eos=True)
    sequences = [
        engine.factory.make_sequence(f"{salt} {i}", one, sampling, cache_salt=salt) for i, one in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    engine.check_integrity(idle=True)
    return [sequence.output_ids for sequence in sequences]


def _is_large() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory / 1e9 >= _LARGE_GB


_CHECKS: dict[str, Check] = {
    "environment": check_environment,
    "families": check_families,
    "tokens": check_tokens,
    "steps": check_steps,
    "host": check_host,
    "attention": check_attention,
    "transfers": check_transfers,
    "serving": check_serving,
}

if __name__ == "__main__":
    sys.exit(main())
