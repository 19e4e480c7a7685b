"""Steps of our own engine, beside what the memory and the matrix units of the device can do. There is no server.

    python -m benchmarks.steps
    python -m benchmarks.steps --device cuda --llama 32 --context 1024 --streams 1 8 64 --prompts 4096

Decode steps of several streams, prompts, and both in one step are measured in turns under some conditions. On a CPU:
alone, and beside a foreign process that computes for 5 ms of each 10, as a thread that loses its core must not hold up
the others for as long; `--beside compilers` has two compilers instead. On a GPU: with CUDA graphs and without. A decode
step is compared with the time that reading its weights and KV once takes, a prompt with the rate of one large product
of matrices, both together with the longer of the two times. With `--llama` the weights are random, in the shape of
Llama 8B or of a model of 1.5B. Results are not checked here: the engine does that at its start, and so do
tests.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks.common import arguments, console, print_rows, write_result
from benchmarks.other_work import BESIDE
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.loader import resolve_device
from tandem.loadtest.stats import Distribution
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tandem.runtime import large_pages

_SLACK_TOKENS = 128  # of a sequence, for steps that are not counted
_LLAMA_8B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 128_256}
_LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
_LLAMA_1_5B: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151_936}
_LLAMA_1_5B |= {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
_SHAPES = {"8b": _LLAMA_8B, "1.5b": _LLAMA_1_5B}  # with 32 layers, and with 28
_SMALL_SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 500}
_SMALL_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Limits(NamedTuple):
    """What a device does at best."""

    bytes_per_s: float  # read
    flops: float  # of a product of matrices


class Sizes(NamedTuple):
    """The size of a model."""

    weight_bytes: int  # read for each step: all but the table of embeddings, unless it is the output layer too
    num_multiplied: int  # weights that are multiplied by each token of a prompt
    kv_bytes: int  # of a token


def main() -> None:
    parser = arguments(__doc__)
    parser.option("--device", "cpu")
    parser.option("--llama", 0, "layers of a random model, instead of --model")
    parser.option("--shape", "8b", "whose layers these are", choices=_SHAPES)
    parser.option("--weights", "as-loaded", "as of `tandem serve`", choices=["as-loaded", "int8", "fp8"])
    parser.option("--exact", "off", "as of `tandem serve`", choices=["off", "on"])
    parser.option("--threads", 0, "threads of a step on a CPU; 0 = all cores")
    parser.option("--context", 64, "tokens before each stream's answer", quick=40)
    parser.option("--streams", [1, 8, 32], quick=[1, 3])
    parser.option("--prompts", [512, 2048, 6000], quick=[64])
    parser.option("--mixed", 256, "tokens of a prompt in each step of the most streams, once more", quick=20)
    parser.option("--steps", 100, "decode steps of a round", quick=4)
    parser.option("--rounds", 3, quick=1)
    parser.option("--beside", ["busy core"], "other work meanwhile", choices=BESIDE)
    settings = parser.settings()
    measured = measure(settings)
    caption = "of the device: decode steps of its bandwidth, prompts of the rate of a large product of matrices"
    print_rows(
        f"Steps on {measured.device}, {torch.get_num_threads()} threads, {measured.kernels}", measured.steps, caption
    )
    console.print(f"reading the weights of a step once takes {measured.read_s * 1e3:.1f} ms")
    write_result("steps", settings, {"steps": measured.steps, "read_s": measured.read_s, "limits": measured.limits})


class Measured(NamedTuple):
    """What `measure` found."""

    device: torch.device
    kernels: str
    steps: list[dict[str, Any]]
    read_s: float  # of the weights of a step
    limits: Limits


def measure(settings: argparse.Namespace) -> Measured:
    """Steps and prompts of these settings, which are those of `main`."""
    device = resolve_device(settings.device)
    with tempfile.TemporaryDirectory() as random_model, torch.inference_mode():
        folder = random_model if settings.llama else str(resolve_model(settings.model))
        if settings.llama:
            write_llama(Path(folder), settings, device)
        sizes, limits = sizes_of(Path(folder), settings.weights), measure_limits(device, is_quick=settings.quick)
        with contextlib.closing(make_engine(folder, sizes, settings, device)) as engine:
            bench = Bench(engine, settings, sizes, limits)
            steps = [one for num in settings.streams for one in bench.measure_decoding(num)]
            steps += [one for num in settings.prompts for one in bench.measure_prompt(num)]
            steps += bench.measure_mixed(max(settings.streams), settings.mixed)
            return Measured(device, engine.model.kernels, steps, sizes.weight_bytes / limits.bytes_per_s, limits)


def write_llama(folder: Path, settings: argparse.Namespace, device: torch.device) -> None:
    """Random weights in the form of a checkpoint, drawn on the device."""
    shape = _SMALL_SHAPE if settings.quick else _SHAPES[settings.shape]
    length = max(settings.context + _num_steps(settings), *settings.prompts) + _SLACK_TOKENS
    config = LlamaConfig(num_hidden_layers=settings.llama, max_position_embeddings=length, dtype="bfloat16", **shape)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")


def sizes_of(folder: Path, weights: str) -> Sizes:
    """Sizes of a checkpoint in bfloat16, with its weights as they are kept."""
    config = AutoConfig.from_pretrained(folder)
    num_weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2
    num_embedded = config.vocab_size * config.hidden_size
    num_multiplied = num_weights - num_embedded * (1 if config.tie_word_embeddings else 2)
    kv_width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    num_bytes = 2 if weights == "as-loaded" else 1  # of a weight; those of the output layer stay
    return Sizes(num_bytes * num_multiplied + 2 * num_embedded, num_multiplied, 4 * config.num_hidden_layers * kv_width)


def make_engine(folder: str, sizes: Sizes, settings: argparse.Namespace, device: torch.device) -> Engine:
    num_streams = max(settings.streams)
    num_rows = num_streams + settings.mixed
    num_tokens = num_streams * (settings.context + _num_steps(settings) + _SLACK_TOKENS) + max(
        *settings.prompts, 4 * num_rows
    )
    config = EngineConfig(
        model=folder,
        weights=settings.weights,
        exact=settings.exact,
        device=device.type,  # type: ignore[arg-type]
        pool_bytes=max(1 << 30, int(1.1 * num_tokens * sizes.kv_bytes)),
        num_threads=settings.threads,
        max_num_seqs=num_streams + 2,  # with prompts beside them
        max_num_batched_tokens=0 if device.type == "cpu" else max(512, num_rows, *settings.prompts),
        speculate="off",  # a step is to give one token
    )
    return Engine(config)


def _num_steps(settings: argparse.Namespace) -> int:
    return int((2 * settings.rounds + 1) * settings.steps)


def measure_limits(device: torch.device, *, is_quick: bool) -> Limits:
    """The best of some sums over memory, and of some products."""
    num_bytes = 1 << 24 if is_quick else 1 << 28 if device.type == "cpu" else 1 << 30
    size = 256 if is_quick else 2048 if device.type == "cpu" else 8192
    memory = torch.frombuffer(large_pages.allocate(num_bytes), dtype=torch.int64).fill_(1).to(device)
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    sum_s = min(seconds_of(memory.sum, device) for _ in range(10))
    product_s = min(seconds_of(lambda: matrix @ matrix, device) for _ in range(5))
    return Limits(num_bytes / sum_s, 2 * size**3 / product_s)


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Time of a call and of the work that it launches."""
    synchronize(device)
    begun_s = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begun_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def without_graphs(engine: Engine) -> Iterator[None]:
    """Launch each kernel of a step by itself."""
    graphs, engine.runner.graphs = engine.runner.graphs, ()
    yield
    engine.runner.graphs = graphs


class Bench:
    """Measures one engine."""

    def __init__(self, engine: Engine, settings: argparse.Namespace, sizes: Sizes, limits: Limits) -> None:
        self._engine, self._settings, self._sizes, self._limits = engine, settings, sizes, limits
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._conditions: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = (
            {"quiet": contextlib.nullcontext, **{name: BESIDE[name] for name in settings.beside}}
            if engine.model.device.type == "cpu"
            else {"graphs": contextlib.nullcontext, "no graphs": lambda: without_graphs(engine)}
        )

    def measure_decoding(self, num_streams: int) -> Iterator[dict[str, Any]]:
        """Steps of this many streams."""
        durations, read_s = self._measure_streams(num_streams, lambda: None)
        for condition, times in durations.items():
            yield _steps(f"{num_streams} streams", condition, num_streams, times, read_s)

    def measure_mixed(self, num_streams: int, num_tokens: int) -> Iterator[dict[str, Any]]:
        """Steps of this many streams, each beside a prompt of `num_tokens`."""
        names = itertools.count()

        def add_prompt() -> None:
            if not self._engine.scheduler.waiting:
                self._add(f"mixed {next(names)}", num_tokens, SamplingParams(max_tokens=1, temperature=0))

        durations, read_s = self._measure_streams(num_streams, add_prompt)
        num_rows = num_streams + num_tokens
        best_s = max(read_s, 2 * self._sizes.num_multiplied * num_rows / self._limits.flops)
        for condition, times in durations.items():
            yield _steps(f"{num_streams} streams and a prompt of {num_tokens}", condition, num_rows, times, best_s)

    def _measure_streams(
        self, num_streams: int, before_step: Callable[[], None]
    ) -> tuple[dict[str, list[float]], float]:
        """Seconds of steps under each condition, and those in which the device reads weights and KV once."""
        engine, num_steps = self._engine, self._settings.steps
        sampling = SamplingParams(max_tokens=_num_steps(self._settings) + 64, temperature=0, ignore_eos=True)
        for i in range(num_streams):
            self._add(f"{num_streams} {i}", self._settings.context, sampling)
        sequences = list(engine.sequences.values())
        while any(sequence.num_output_tokens < 2 for sequence in sequences):
            engine.step()
        num_before = sum(len(sequence.token_ids) for sequence in sequences)
        durations = self._in_turn(lambda: self._step_times(num_steps, before_step))
        num_kv_tokens = (num_before + sum(len(sequence.token_ids) for sequence in sequences)) / 2
        for request_id in list(engine.sequences):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return durations, (self._sizes.weight_bytes + num_kv_tokens * self._sizes.kv_bytes) / self._limits.bytes_per_s

    def measure_prompt(self, num_tokens: int) -> Iterator[dict[str, Any]]:
        """The time until a prompt's first token is there."""

        def compute() -> None:
            self._add("prompt", num_tokens, SamplingParams(max_tokens=1, temperature=0))
            while self._engine.has_work:
                self._engine.step()

        best_s = 2 * self._sizes.num_multiplied * num_tokens / self._limits.flops
        for condition, times in self._in_turn(lambda: [seconds_of(compute, self._engine.model.device)]).items():
            yield _steps(f"prompt of {num_tokens}", condition, num_tokens, times, best_s)

    def _in_turn(self, measure: Callable[[], list[float]]) -> dict[str, list[float]]:
        durations: dict[str, list[float]] = {condition: [] for condition in self._conditions}
        for _ in range(self._settings.rounds):
            for condition, times in durations.items():
                with self._conditions[condition]():
                    times += measure()
        return durations

    def _step_times(self, num_steps: int, before_step: Callable[[], None]) -> list[float]:
        """Seconds from one step's results to the next one's: a device may be a step behind."""
        times: list[float] = []
        synchronize(self._engine.model.device)
        last_s = time.perf_counter()
        while len(times) < num_steps:
            before_step()
            if self._engine.step():
                now_s = time.perf_counter()
                times.append(now_s - last_s)
                last_s = now_s
        return times

    def _add(self, name: str, num_tokens: int, sampling: SamplingParams) -> None:
        ids = torch.randint(3, self._engine.model.vocab_size, (num_tokens,), generator=self._generator).tolist()
        self._engine.add(self._engine.factory.make_sequence(name, ids, sampling))


def _steps(what: str, condition: str, num_tokens: int, times: list[float], best_s: float) -> dict[str, Any]:
    took = Distribution.of(times)
    speeds = {"tokens/s": num_tokens / took.mean, "p50 ms": took.p50 * 1e3, "p99 ms": took.p99 * 1e3}
    return {"": what, "condition": condition, **speeds, "of the device": best_s / took.p50}


if __name__ == "__main__":
    if "OMP_WAIT_POLICY" not in os.environ:  # as workers are started; libraries read it when they are loaded
        command = [sys.executable, "-m", "benchmarks.steps", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"OMP_WAIT_POLICY": "passive"})
    main()
