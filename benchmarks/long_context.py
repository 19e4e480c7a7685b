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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq

from benchmarks.common import arguments, console, print_table, verdict, write_result
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
_LONGEST_CALL_AIM_MS = 10.0


@dataclass
class Watch:
    """Durations in seconds: of turns by phase, and of calls by name."""

    turns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    walls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of turns, by the clock
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Time each call of this method from now on."""
        original, durations = getattr(owner, method), self.calls[name]

        def timed(*args: Any, **kwargs: Any) -> Any:
            with _timed(durations):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


@contextlib.contextmanager
def _timed(durations: list[float]) -> Iterator[None]:
    """Seconds of this thread's CPU: nothing here waits, and other work on the machine does not count."""
    began = time.thread_time()
    yield
    durations.append(time.thread_time() - began)


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--turns", 60, "decode turns of each shape")
    settings = parser.settings()
    shapes = [Shape("8k", 2, 8_192, 2.0)] if settings.quick else _SHAPES
    turns = {}
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_text_model(Path(folder, "model"), max_model_len=1_100_000, **LLAMA)
        for shape in shapes:
            turns[shape.name] = _measure(model, shape, settings)
            console.print(f"[dim]measured {shape.name}[/]")
    _show(shapes, turns)
    write_result("long_context", settings, turns)


def _measure(model: Path, shape: Shape, settings: argparse.Namespace) -> dict[str, Any]:
    watch, messages = Watch(), list[bytes]()
    with _driving(model, shape, watch) as driver:
        _serve(driver, shape, settings)
        messages += driver.received
    router = asyncio.run(_replay(messages, driver.worker_id, driver.epoch))
    return {"turns": watch.turns, "walls": watch.walls, "calls": watch.calls, "router": router}


# The worker.


class Driver:
    """A worker that this thread drives turn by turn, and the socket of its router."""

    def __init__(self, worker: Worker, context: zmq.Context[Any], watch: Watch, keys: Any) -> None:
        self.worker = worker
        self.worker_id, self.epoch = worker.address.process
        self.received: list[bytes] = []
        self._watch = watch
        self._poll_ms, worker._poll_ms = worker._poll_ms, lambda: 0  # type: ignore[method-assign]
        self._socket, self._heartbeats = connect_to_worker(context, keys, worker.address, max_queued=0)

    def send(self, message: Message) -> None:
        """Send what a router sends."""
        self._socket.send(encode_message(message))

    def turn(self, phase: str) -> None:
        """One turn of the worker's loop, once it would not wait; what it sent is received meanwhile."""
        self.worker.parts.sockets._poller.poll(self._poll_ms())
        began = time.perf_counter()
        with _timed(self._watch.turns[phase]):
            self.worker.run_once()
        self._watch.walls[phase].append(time.perf_counter() - began)
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
def _driving(model: Path, shape: Shape, watch: Watch) -> Iterator[Driver]:
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
    driver = Driver(worker, context, watch, keys)
    try:
        _prepare(worker, watch)
        driver.send(Hello(router_id="r"))
        driver.turns_until("hello", lambda: bool(driver.received))
        yield driver
    finally:
        driver.close()
        context.term()
        worker.close()


def _prepare(worker: Worker, watch: Watch) -> None:
    """Take the model out, and watch the parts of a turn."""
    parts, engine = worker.parts, worker.parts.engine
    runner, scheduler = engine.runner, engine.scheduler

    def forward(batch: PackedBatch, between_layers: Callable[[], None]) -> torch.Tensor | None:
        runner.load(batch)
        return torch.zeros(len(batch.logit_rows), LLAMA["vocab_size"]) if len(batch.logit_rows) else None

    runner.forward = forward  # type: ignore[method-assign,assignment]
    watch.watch("receive (decode)", parts.sockets, "receive")
    watch.watch("sequence of a request", engine.factory, "sequence_of")
    watch.watch("add, with digests", scheduler, "add")
    watch.watch("schedule", scheduler, "schedule")
    watch.watch("admit: blocks, cached prefix", scheduler.admission, "take_blocks")
    watch.watch("pack", runner, "pack")
    watch.watch("advance", scheduler.blocks, "advance")
    watch.watch("publish", scheduler.blocks, "publish")
    watch.watch("release", scheduler.blocks, "release")
    watch.watch("take events", parts.cache, "take_events")
    watch.watch("pins follow events", parts.pins, "changed")
    watch.watch("send events", parts.replies, "send_events")


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


async def _replay(messages: list[bytes], worker_id: str, epoch: int) -> dict[str, float]:
    """Let block events of a worker come in over a router's socket; how long its loop was held up by them."""
    index = PrefixIndex()
    index.add_worker(holder_name(worker_id, POOL_PLACE), epoch)
    events = [data for data in messages if isinstance(decode_worker_message(data), BlockEvents)]
    num_applied, calls = 0, list[float]()

    def apply(frames: list[bytes]) -> None:
        nonlocal num_applied
        with _timed(calls):
            message = decode_worker_message(frames[-1])
            assert isinstance(message, BlockEvents)
            is_missed = index.apply(message)
        assert not is_missed, f"events before number {message.sequence} were lost"
        num_applied += 1

    context: zmq.Context[Any] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.set(zmq.SNDHWM, 0)
    receiver.set(zmq.RCVHWM, 0)
    sender.bind("inproc://events")
    receiver.connect("inproc://events")
    for data in events:
        sender.send(data)
    socket = MessageSocket(receiver, apply)
    stalls, before = [0.0], time.thread_time()
    while num_applied < len(events):
        await asyncio.sleep(0)
        now = time.thread_time()
        stalls.append(now - before)
        before = now
    socket.close()
    context.destroy(linger=0)
    return {
        "messages": len(events),
        "longest_message_ms": 1e3 * max(calls),
        "all_ms": 1e3 * sum(calls),
        "longest_stall_ms": 1e3 * max(stalls),
        "blocks": index.num_blocks(worker_id),
    }


def _show(shapes: list[Shape], results: dict[str, Any]) -> None:
    rows = []
    for shape in shapes:
        for phase, turns in results[shape.name]["turns"].items():
            p50_ms = 1e3 * statistics.median(turns)
            aim = verdict(f"{shape.aim_ms:.0f} ms", p50_ms <= shape.aim_ms) if phase.startswith("decode") else "-"
            by_clock_ms = 1e3 * max(results[shape.name]["walls"][phase])
            rows.append([f"{shape.name}: {phase}", len(turns), p50_ms, 1e3 * max(turns), by_clock_ms, aim])
    headings = ["", "turns", "p50 ms", "max ms", "max by the clock", "aim"]
    caption = "CPU time of the thread; by the clock other work on the machine counts too"
    print_table("Turns of the worker's loop, without the model", headings, rows, caption)
    names = list(dict.fromkeys(name for shape in shapes for name in results[shape.name]["calls"]))
    calls = [[name, *(1e3 * max(results[shape.name]["calls"][name]) for shape in shapes)] for name in names]
    print_table("The longest of each call, ms", ["", *(shape.name for shape in shapes)], calls)
    print_table(
        "Block events on the router's loop",
        ["", *(shape.name for shape in shapes)],
        [
            [name.replace("_", " "), *(results[shape.name]["router"][name] for shape in shapes)]
            for name in results[shapes[0].name]["router"]
        ],
    )
    longest = max(max(turns) for result in results.values() for turns in result["turns"].values())
    stall = max(result["router"]["longest_stall_ms"] for result in results.values())
    for what, value_ms in (("turn of a worker", 1e3 * longest), ("stall of the router's loop", stall)):
        aim = verdict(f"{_LONGEST_CALL_AIM_MS:.0f} ms", value_ms <= _LONGEST_CALL_AIM_MS)
        console.print(f"longest {what} {value_ms:.1f} ms: {aim}")


if __name__ == "__main__":
    main()
