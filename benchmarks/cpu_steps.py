"""Steps of our own engine on a CPU, alone and beside a process that takes part of one core.

    python -m benchmarks.cpu_steps

Decode steps of 1, 8 and 32 streams, and prompts, are measured in turns with the machine left alone and with a foreign
process that computes for 5 ms of each 10: a thread that loses its core must not hold up the others for as long. A step
is compared with the time that reading all weights once takes. There is no server around the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import arguments, console, print_table, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams

_BUSY_S = 0.005
_POOL_BYTES = 1 << 30


class Steps(NamedTuple):
    """Steps of one kind, of all rounds together."""

    what: str
    is_disturbed: bool
    tokens_per_s: float
    p50_ms: float
    p99_ms: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="threads of a step (default: all cores)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 6000])
    parser.add_argument("--steps", type=int, default=100, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    if settings.quick:
        vars(settings).update(streams=[1, 3], prompts=[64], steps=4, rounds=1)
    config = EngineConfig(
        model=str(resolve_model(settings.model)),
        device="cpu",
        pool_bytes=_POOL_BYTES,
        num_threads=settings.threads,
        max_num_seqs=max(settings.streams),
        speculate="off",  # a step is to give one token
    )
    with contextlib.closing(Engine(config)) as engine, torch.inference_mode():
        read_s = seconds_to_read(sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors")))
        steps = [one for num in settings.streams for one in measure_decoding(engine, settings, num)]
        steps += [one for num in settings.prompts for one in measure_prompt(engine, settings, num)]
    headings = ["", "busy core", "tokens/s", "p50 ms", "p99 ms"]
    print_table(f"Steps of {torch.get_num_threads()} threads, {engine.model.kernels}", headings, steps)
    console.print(f"reading the weights of a step once takes {read_s * 1e3:.1f} ms")
    write_result("cpu_steps", settings, {"steps": steps, "read_s": read_s})
    return 0


def seconds_to_read(num_bytes: int) -> float:
    """The best of some sums over memory of this size, by all threads."""
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    durations = []
    for _ in range(10):
        begun_s = time.perf_counter()
        memory.sum()
        durations.append(time.perf_counter() - begun_s)
    return min(durations)


@contextlib.contextmanager
def busy_core(is_busy: bool) -> Iterator[None]:
    """A process that computes half of the time, if wanted."""
    if not is_busy:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_be_busy, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _be_busy() -> None:
    while True:
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < _BUSY_S:
            pass
        time.sleep(_BUSY_S)


def measure_decoding(engine: Engine, settings: argparse.Namespace, num_streams: int) -> list[Steps]:
    """Rounds alone and beside a busy core, in turns."""
    generator = torch.Generator().manual_seed(settings.seed)
    num_tokens = (2 * settings.rounds + 1) * settings.steps + 64
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for i in range(num_streams):
        engine.add(engine.make_sequence(f"{num_streams} {i}", _prompt(engine, generator, 64), sampling))
    sequences = list(engine.sequences.values())
    while any(sequence.num_output_tokens < 2 for sequence in sequences):
        engine.step()
    durations: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(settings.rounds):
        for is_busy, times in durations.items():
            with busy_core(is_busy):
                time.sleep(0.2)  # it starts
                times += [_timed(engine.step) for _ in range(settings.steps)]
    for sequence in sequences:
        engine.abort(sequence.request_id)
    return [_steps(f"{num_streams} streams", is_busy, num_streams, times) for is_busy, times in durations.items()]


def measure_prompt(engine: Engine, settings: argparse.Namespace, num_tokens: int) -> list[Steps]:
    """The time until a prompt's first token is there."""
    generator = torch.Generator().manual_seed(settings.seed)
    durations: dict[bool, list[float]] = {False: [], True: []}

    def compute() -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0)
        engine.add(engine.make_sequence("prompt", _prompt(engine, generator, num_tokens), sampling))
        while engine.has_work:
            engine.step()

    for _ in range(settings.rounds):
        for is_busy, times in durations.items():
            with busy_core(is_busy):
                time.sleep(0.2)
                times.append(_timed(compute))
    return [_steps(f"prompt of {num_tokens}", is_busy, num_tokens, times) for is_busy, times in durations.items()]


def _prompt(engine: Engine, generator: torch.Generator, num_tokens: int) -> list[int]:
    ids: list[int] = torch.randint(3, engine.model.vocab_size, (num_tokens,), generator=generator).tolist()
    return ids


def _timed(function: Any) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def _steps(what: str, is_disturbed: bool, num_tokens: int, times: list[float]) -> Steps:
    times = sorted(times)
    p99_s = times[min(int(0.99 * len(times)), len(times) - 1)]
    return Steps(what, is_disturbed, num_tokens / statistics.mean(times), times[len(times) // 2] * 1e3, p99_s * 1e3)


if __name__ == "__main__":
    if "OMP_WAIT_POLICY" not in os.environ:  # as workers are started; libraries read it when they are loaded
        command = [sys.executable, "-m", "benchmarks.cpu_steps", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"OMP_WAIT_POLICY": "passive"})
    sys.exit(main())
