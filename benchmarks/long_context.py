"""Long contexts: what a worker's loop and a router do around the model.

A real worker is driven turn by turn, with one sequence of 131k tokens, with 64 of 32k, and with one of a million. Its
model's forward is replaced; batches are packed and loaded, tokens sampled and published, as always. Each shape arrives,
is computed, decodes while another prompt waits for room, ends, comes again out of the cache, and is evicted by another.

What the worker publishes meanwhile then goes through the router's socket into its prefix index, on an event loop.

`benchmarks.tiers --long` has what a pair of processes takes for such a prompt, computed and out of each tier.

    python -m benchmarks.long_context
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq

from benchmarks.common import arguments, console, print_rows, verdict, write_result
from benchmarks.tiers import LLAMA, LLAMA_KV_BYTES
from tandem.engine.model_runner import PackedBatch
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.config import EngineConfig, TransferConfig, WorkerConfig
from tandem.protocol.messages import (
    POOL_PLACE,
    BlockEvents,
    Cancel,
    Generate,
    Hello,
    Message,
    Role,
    WorkerEpoch,
    decode_worker_message,
    encode_message,
    holder_name,
    prompt_fields,
)
from tandem.protocol.sampling import SamplingParams
from tandem.runtime.curve import connect_to_worker, make_keys
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.message_socket import MessageSocket
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.worker.loop import Worker
from tests.support.tiny_llama import save_tiny_text_model

_BLOCK_SIZE = 16
_ANSWER_TOKENS = 200
_DEADLINE_S = 600.0


class Shape(NamedTuple):
    """Sequences that are served at once, and the aim for a turn while they decode."""

    name: str
    num_seqs: int
    num_tokens: int
    aim_ms: float


_SHAPES = [Shape("131k", 1, 131_072, 2.0), Shape("64 x 32k", 64, 32_768, 2.0), Shape("1M", 1, 1_000_000, 10.0)]
_LONGEST_AIM_MS = 10.0  # of a turn, and of a stall
_STALL = "stall of the router's loop"


Times = dict[str, list[float]]  # seconds by name


@contextlib.contextmanager
def _timed(durations: list[float]) -> Iterator[None]:
    """Seconds of this thread's CPU: nothing here waits, and other work on the machine does not count."""
    began = time.thread_time()
    yield
    durations.append(time.thread_time() - began)


def _watch(calls: Times, name: str, owner: Any, method: str) -> None:
    """Time each call of this method from now on."""
    original = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with _timed(calls[name]):
            return original(*args, **kwargs)

    setattr(owner, method, timed)


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--turns", 60, "decode turns of each shape")
    settings = parser.settings()
    shapes = [Shape("8k", 2, 8_192, 2.0)] if settings.quick else _SHAPES
    turns, longest_ms = list[dict[str, Any]](), defaultdict[str, dict[str, float]](dict)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_text_model(Path(folder, "model"), max_model_len=1_100_000, **LLAMA)
        for shape in shapes:
            with _driving(model, shape) as driver:
                _serve(driver, shape, settings)
            turns += _turn_rows(shape, driver.turns)
            driver.calls[_STALL] = asyncio.run(_replay(driver.received, driver.worker.address.process))
            for name, durations in driver.calls.items():
                longest_ms[name][shape.name] = 1e3 * max(durations)
            console.print(f"[dim]measured {shape.name}[/]")
    calls = [{"": name, **by_shape} for name, by_shape in longest_ms.items()]
    print_rows("Turns of the worker's loop, without the model", turns, "CPU time of the thread")
    print_rows("The longest of each call, ms", calls)
    longest_turn_ms = max(row["max ms"] for row in turns)
    for what, value_ms in (("turn of a worker", longest_turn_ms), (_STALL, max(longest_ms[_STALL].values()))):
        aim = verdict(f"{_LONGEST_AIM_MS:.0f} ms", value_ms <= _LONGEST_AIM_MS)
        console.print(f"longest {what} {value_ms:.1f} ms: {aim}")
    write_result("long_context", settings, {"turns": turns, "calls": calls})


def _turn_rows(shape: Shape, turns: Times) -> Iterator[dict[str, Any]]:
    for phase, durations in turns.items():
        p50_ms = 1e3 * statistics.median(durations)
        aim = verdict(f"{shape.aim_ms:.0f} ms", p50_ms <= shape.aim_ms) if phase.startswith("decode") else "-"
        times = {"turns": len(durations), "p50 ms": p50_ms, "max ms": 1e3 * max(durations)}
        yield {"": f"{shape.name}: {phase}", **times, "aim": aim}


# The worker.


class Driver:
    """A worker that this thread drives turn by turn, and the socket of its router."""

    def __init__(self, worker: Worker, context: zmq.Context[Any], keys: Any) -> None:
        self.worker = worker
        self.received: list[bytes] = []
        self.turns: Times = defaultdict(list)
        self.calls: Times = defaultdict(list)
        self._poll_ms, worker._poll_ms = worker._poll_ms, lambda: 0  # type: ignore[method-assign]
        self._socket, self._heartbeats = connect_to_worker(context, keys, worker.address, max_queued=0)

    def send(self, message: Message) -> None:
        """Send what a router sends."""
        self._socket.send(encode_message(message))

    def turn(self, phase: str) -> None:
        """One turn of the worker's loop, once it would not wait; what it sent is received meanwhile."""
        self.worker.parts.sockets._poller.poll(self._poll_ms())
        with _timed(self.turns[phase]):
            self.worker.run_once()
        while self._socket.poll(0):
            self.received.append(self._socket.recv())

    def turns_until(self, phase: str, condition: Callable[[], bool]) -> None:
        """Turns until the condition holds."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{phase} took longer than {_DEADLINE_S:.0f} s")
            self.turn(phase)

    def close(self) -> None:
        """Close the router's sockets."""
        self._socket.close(linger=0)
        self._heartbeats.close(linger=0)


@contextlib.contextmanager
def _driving(model: Path, shape: Shape) -> Iterator[Driver]:
    """A worker whose pool holds this shape with its answers, and little more."""
    keys = make_keys()
    num_blocks = shape.num_seqs * -(-(shape.num_tokens + 2 * _ANSWER_TOKENS) // _BLOCK_SIZE)
    engine = EngineConfig(
        model=str(model),
        device="cpu",
        block_size=_BLOCK_SIZE,
        pool_bytes=num_blocks * _BLOCK_SIZE * LLAMA_KV_BYTES,
        max_num_batched_tokens=2048,
        speculate="off",
    )
    config = WorkerConfig(
        worker_id="w",
        role=Role.COLOCATED,
        engine=engine,
        transfer=TransferConfig(transport="in_process"),
        router_key=keys.public,
    )
    worker = Worker(config, hub=InProcessHub())
    freeze_startup_heap()
    context: zmq.Context[Any] = zmq.Context()
    driver = Driver(worker, context, keys)
    try:
        _prepare(worker, driver.calls)
        driver.send(Hello(router_id="r"))
        driver.turns_until("hello", lambda: bool(driver.received))
        yield driver
    finally:
        driver.close()
        context.term()
        worker.close()


def _prepare(worker: Worker, calls: Times) -> None:
    """Take the model out, and watch the parts of a turn."""
    parts, engine = worker.parts, worker.parts.engine
    runner, scheduler = engine.runner, engine.scheduler

    def forward(batch: PackedBatch, between_layers: Callable[[], None]) -> torch.Tensor | None:
        runner.load(batch)
        return torch.zeros(len(batch.logit_rows), LLAMA["vocab_size"]) if len(batch.logit_rows) else None

    runner.forward = forward  # type: ignore[method-assign,assignment]
    _watch(calls, "receive (decode)", parts.sockets, "receive")
    _watch(calls, "sequence of a request", engine.factory, "sequence_of")
    _watch(calls, "add, with digests", scheduler, "add")
    _watch(calls, "schedule", scheduler, "schedule")
    _watch(calls, "admit: blocks, cached prefix", scheduler.admission, "take_blocks")
    _watch(calls, "pack", runner, "pack")
    _watch(calls, "advance", scheduler.blocks, "advance")
    _watch(calls, "publish", scheduler.blocks, "publish")
    _watch(calls, "release", scheduler.blocks, "release")
    _watch(calls, "take events", parts.cache, "take_events")
    _watch(calls, "pins follow events", parts.pins, "changed")
    _watch(calls, "send events", parts.replies, "send_events")


def _serve(driver: Driver, shape: Shape, settings: argparse.Namespace) -> None:
    """All phases of one shape."""
    seeds = range(settings.seed, settings.seed + shape.num_seqs)
    _arrive(driver, "arrive and compute", shape, seeds)
    _send(driver, "waiting", shape, settings.seed + 1000)
    for _ in range(settings.turns):
        driver.turn("decode, one waits")
    _end(driver, "end")
    _arrive(driver, "again, cached", shape, seeds)
    _end(driver, "end")
    _arrive(driver, "others, which evict", shape, [seed + 2000 for seed in seeds])
    _end(driver, "end")
    driver.worker.check_integrity(idle=True)


def _send(driver: Driver, name: str, shape: Shape, seed: int) -> None:
    prompt = random.Random(seed).choices(range(3, LLAMA["vocab_size"]), k=shape.num_tokens)
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    driver.send(Generate(request_id=name, sampling=sampling, **prompt_fields(prompt)))


def _arrive(driver: Driver, phase: str, shape: Shape, seeds: Any) -> None:
    engine = driver.worker.parts.engine
    for seed in seeds:
        _send(driver, str(seed), shape, seed)
    driver.turns_until(phase, lambda: len(engine.sequences) == shape.num_seqs)
    driver.turns_until(phase, lambda: all(one.has_first_token for one in engine.sequences.values()))


def _end(driver: Driver, phase: str) -> None:
    engine = driver.worker.parts.engine
    for name in reversed(list(engine.sequences)):  # what waits is not admitted first
        driver.send(Cancel(request_id=name))
    driver.turns_until(phase, lambda: not engine.sequences)


# The router.


async def _replay(messages: list[bytes], process: WorkerEpoch) -> list[float]:
    """Let block events of a worker come in over a router's socket; how long its loop was held up by them."""
    index = PrefixIndex()
    index.add_worker(holder_name(process.worker_id, POOL_PLACE), process.epoch)
    events = [data for data in messages if isinstance(decode_worker_message(data), BlockEvents)]
    num_applied = 0

    def apply(frames: list[bytes]) -> None:
        nonlocal num_applied
        message = decode_worker_message(frames[-1])
        assert isinstance(message, BlockEvents)
        assert not index.apply(message), f"events before number {message.sequence} were lost"
        num_applied += 1

    context: zmq.Context[Any] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.set(zmq.SNDHWM, 0)
    receiver.set(zmq.RCVHWM, 0)
    sender.bind("inproc://events")
    receiver.connect("inproc://events")
    for data in events:
        sender.send(data)
    socket, stalls = MessageSocket(receiver, apply), list[float]()
    while num_applied < len(events):
        with _timed(stalls):
            await asyncio.sleep(0)
    socket.close()
    context.destroy(linger=0)
    return stalls


if __name__ == "__main__":
    main()
