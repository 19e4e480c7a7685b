"""Cost of a router in front of workers: the same requests to workers that compute nothing, directly and through it.

    python -m benchmarks.edge [--smg PATH] [--sglang-python PATH] [--vllm-router PATH]

The paths are programs in environments of their own: `smg`, a Python with sglang-router, `vllm-router`. Client, workers
and router share the cores of one machine, so besides rates the CPU seconds of the router's processes are measured:
requests and chunks per CPU second are what one core of its own would do. Every answer is checked.

Stands behind README's "the router adds 2 ms" and its comparison with routers in Rust.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import psutil

from benchmarks.common import (
    HERE,
    arguments,
    console,
    engines_toml,
    free_port,
    in_ms,
    launched,
    measure_each,
    mock_engines,
    print_results,
    ratio,
    routing,
    write_result,
)
from benchmarks.mock_engine import MODEL, expected_text
from tandem.loadtest.stats import Distribution

CONCURRENCY = 64
_WARM_UP_S = 1.5
_NUM_PROMPTS = 256
_MAX_REMEMBERED = 10_000  # different answers
_PATH = "/v1/chat/completions"
_DIRECT = "direct"  # with no router
# Fields that differ between equal answers.
_VARIABLE = re.compile(rb'"(id|system_fingerprint)":\s*"[^"]*"|"created":\s*\d+')


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request."""

    name: str
    num_tokens: int  # mean
    is_stream: bool = True
    step_ms: int = 0  # 0 = as fast as the connections take it
    is_mixed: bool = False  # lengths from 0.5 to 1.5 times the mean, so that streams do not begin and end together

    def length(self, i: int) -> int:
        """Tokens of the i-th answer."""
        return self.num_tokens // 2 + i * 7 % (self.num_tokens + 1) if self.is_mixed else self.num_tokens


SHAPES = (
    Shape("paced", 64, step_ms=20, is_mixed=True),
    Shape("flood", 256),
    Shape("short", 8),
    Shape("plain", 8, is_stream=False),
)


@dataclass(slots=True)
class Measured:
    """What clients saw of one shape at one target, and what it cost."""

    seconds: float = 0.0
    cpu_s: float = 0.0  # of the router's processes
    num_chunks: int = 0
    num_answers: int = 0
    num_wrong: int = 0
    first_wrong: str = ""
    first_s: list[float] = field(default_factory=list)  # from a request to the first bytes of its answer's body
    gap_s: list[float] = field(default_factory=list)  # longest time between two reads, of each stream

    def row(self) -> dict[str, float]:
        """The figures of the table."""
        first, gap = Distribution.of(self.first_s), Distribution.of(self.gap_s)
        return {
            **in_ms("first byte", first, "p50", "p99"),
            **in_ms("gap", gap, "p50"),
            "req/s": ratio(self.num_answers, self.seconds),
            "chunks/s": ratio(self.num_chunks, self.seconds),
            "req/CPU-s": ratio(self.num_answers, self.cpu_s),
            "chunks/CPU-s": ratio(self.num_chunks, self.cpu_s),
            "cores": ratio(self.cpu_s, self.seconds),
            "wrong": self.num_wrong,
        }


class _Checker:
    """Whether an answer is the expected one. Answers equal to a checked one are not parsed again."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._right: set[tuple[int, bytes]] = set()

    def is_right(self, num_tokens: int, status: int, body: bytes) -> bool:
        shown = num_tokens, _VARIABLE.sub(b"", body)
        if status == 200 and shown in self._right:
            return True
        try:
            is_right = status == 200 and self._text_of(body) == expected_text(num_tokens)
        except (ValueError, KeyError, IndexError, TypeError):
            return False
        if is_right and len(self._right) < _MAX_REMEMBERED:
            self._right.add(shown)
        return is_right

    def _text_of(self, body: bytes) -> str:
        if not self._shape.is_stream:
            return str(msgspec.json.decode(body)["choices"][0]["message"]["content"])
        events = [event for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event.startswith(b"data:")]
        if events.pop() != b"data: [DONE]":
            raise ValueError("no end")
        choices = [choice for event in events for choice in msgspec.json.decode(event[5:])["choices"]]
        if choices[-1]["finish_reason"] != "length":
            raise ValueError("no reason")
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class _Client(asyncio.Protocol):
    """One connection that sends its next request when an answer is complete."""

    def __init__(self, requests: Iterator[tuple[bytes, int]], checker: _Checker) -> None:
        self.measured: Measured | None = None  # set while it counts
        self.is_ending = False
        self.done = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._checker = checker
        self._body = bytearray()
        self._sent_s = self._first_s = self._last_s = self._longest_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"connection lost: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = self._now
        if not self._body:
            self._first_s = now - self._sent_s
        elif now - self._last_s > self._longest_s:
            self._longest_s = now - self._last_s
        self._last_s = now
        self._body += body
        if self.measured is not None:
            self.measured.num_chunks += body.count(b"\n\n")

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), bytes(self._body)
        is_right = self._checker.is_right(self._num_tokens, status, body)
        if (measured := self.measured) is not None:
            measured.num_answers += is_right
            if is_right:
                measured.first_s.append(self._first_s)
                measured.gap_s.append(self._longest_s)
        if not is_right:
            wrong = self.measured or Measured()
            wrong.num_wrong += 1
            wrong.first_wrong = wrong.first_wrong or f"{status} {body[-300:]!r}"
        if self.is_ending:
            if not self.done.done():
                self.done.set_result(None)
            self._transport.close()
        else:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._longest_s = 0.0
        self._sent_s = time.perf_counter()
        request, self._num_tokens = next(self._requests)
        self._transport.write(request)


def _requests(url: str, shape: Shape) -> Iterator[tuple[bytes, int]]:
    """An endless sequence of chats that share a system prompt and ask different questions."""
    host = url.partition("://")[2]
    system = "You are a careful assistant who answers in few words and never makes anything up. " * 6
    rendered = []
    for i in range(_NUM_PROMPTS):
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {i}: " + f"what is {i} plus {i + 1}? " * 12},
        ]
        body = {"model": MODEL, "messages": messages, "max_tokens": shape.length(i), "seed": shape.step_ms}
        body |= {"temperature": 0, "stream": shape.is_stream}
        payload = json.dumps(body).encode()
        head = f"POST {_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer sk-edge\r\nContent-Length: {len(payload)}\r\n\r\n"
        rendered.append((head.encode() + payload, shape.length(i)))
    while True:
        yield from rendered


async def measure(url: str, cpu_s: Callable[[], float], shape: Shape, seconds: float, concurrency: int) -> Measured:
    """A closed loop over HTTP; `cpu_s` is what the router has used so far. Raises `OSError` if a connection breaks."""
    loop = asyncio.get_running_loop()
    requests, checker = _requests(url, shape), _Checker(shape)
    host, port = url.partition("://")[2].split(":")
    clients = []
    for _ in range(concurrency):
        _, client = await loop.create_connection(lambda: _Client(requests, checker), host, int(port))
        clients.append(client)
    await asyncio.sleep(min(_WARM_UP_S, seconds))
    measured = Measured()
    started_s, cpu_before_s = time.perf_counter(), cpu_s()
    for client in clients:
        client.measured = measured
    await asyncio.sleep(seconds)
    measured.seconds = time.perf_counter() - started_s
    measured.cpu_s = cpu_s() - cpu_before_s
    for client in clients:
        client.measured, client.is_ending = None, True
    async with asyncio.timeout(30.0):
        await asyncio.gather(*(client.done for client in clients))
    return measured


def cpu_of(pid: int) -> Callable[[], float]:
    """CPU seconds so far of a process with all its descendants."""
    process = psutil.Process(pid)
    return lambda: sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


@dataclass(frozen=True, slots=True)
class Target:
    """A router or worker under test."""

    name: str
    measure: Callable[[Shape, float, int], Coroutine[Any, Any, Measured]]  # shape, seconds, concurrency


@contextlib.contextmanager
def route(workers: list[str], num_processes: int, checkout: Path = HERE) -> Iterator[Target]:
    """A `tandem route` in front of engines."""
    flags = f"--router-processes={num_processes}"
    with routing(engines_toml(workers), flags, checkout=checkout) as (url, pid):
        name = "tandem route" if num_processes == 1 else f"tandem route, {num_processes} processes"
        yield Target(name, partial(measure, url, cpu_of(pid)))


@contextlib.contextmanager
def _rust_router(program: list[str], name: str, workers: list[str]) -> Iterator[Target]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [*program, "--host=127.0.0.1", f"--port={port}", "--worker-urls", *workers, "--policy=cache_aware"]
    command += [f"--prometheus-port={free_port()}"]
    with launched(command, ready=f"{url}/readiness") as running:
        yield Target(name, partial(measure, url, cpu_of(running.process.pid)))


def _targets(settings: argparse.Namespace, workers: list[str]) -> Iterator[contextlib.AbstractContextManager[Target]]:
    yield contextlib.nullcontext(Target(_DIRECT, partial(measure, workers[0], lambda: 0.0)))
    for num_processes in settings.processes:
        yield route(workers, num_processes)
    if settings.smg:
        yield _rust_router([settings.smg, "launch"], "smg", workers)
    if settings.sglang_python:
        yield _rust_router([settings.sglang_python, "-m", "sglang_router.launch_router"], "sglang-router", workers)
    if settings.vllm_router:
        yield _rust_router([settings.vllm_router], "vllm-router", workers)


async def _measure_target(target: Target, *, seconds: float, concurrency: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shape in SHAPES:
        measured = await target.measure(shape, seconds, concurrency)
        found[shape.name] = measured.row()
        if measured.num_wrong:
            console.print(f"[red]{target.name}, {shape.name}: {measured.num_wrong} wrong:[/] {measured.first_wrong}")
    return found


def _show(results: dict[str, dict[str, Any]]) -> None:
    """A table for each shape. A router's times to the first byte are shown as what it adds to those without one."""
    for shape in SHAPES:
        rows = {name: dict(found[shape.name]) for name, found in results.items()}
        direct = dict(rows.get(_DIRECT, {}))
        for name, row in rows.items():
            if name != _DIRECT:
                row |= {key: row[key] - direct.get(key, math.nan) for key in row if key.startswith("first byte")}
        print_results(
            f"{shape.name}: {shape.num_tokens} tokens" + (f", {shape.step_ms} ms a step" if shape.step_ms else ""),
            rows,
            f"ms to the first byte, added to those of '{_DIRECT}'; gap: ms of the longest pause of a stream",
        )


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--smg", "", "path of the program smg")
    parser.option("--sglang-python", "", "path of a Python that has sglang-router")
    parser.option("--vllm-router", "", "path of the program vllm-router")
    parser.option("--processes", [1, 2], "of Tandem's router")
    parser.option("--concurrency", CONCURRENCY, "clients")
    parser.option("--seconds", 4.0, "of each shape, after as many that do not count, at most 1.5", quick=0.3)
    settings = parser.settings()
    measure = partial(_measure_target, seconds=settings.seconds, concurrency=settings.concurrency)
    with mock_engines() as workers:
        results = measure_each(_targets(settings, workers), measure)
    _show(results)
    write_result("edge", settings, results)


if __name__ == "__main__":
    main()
