"""`tandem route` in one process, and with two or three edge processes and a hub: costs, and how even bursts are.

    python -m benchmarks.router_processes [--seconds 8] [--streams 32] [--engines 4] [--processes 1,2,3]

Engines are mocks in one process that answer at once, so what is measured is the router. Its processes share the cores
of the machine with mocks and clients: CPU time per request, of all its processes, says what the hub costs; requests/s
only where there are cores to spare. A burst is `3 * 16` requests on connections of their own, answered when all have
arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import arguments, console, free_port, launched, ms, print_table, write_result

__all__ = ["main"]

_BURST = 48
_NUM_BURSTS = 8
_TOKENS = 16  # per stream
_WARM_UP_S = 1.5
_EVENT = {"id": "m", "object": "text_completion", "model": "m", "choices": [{"index": 0, "text": "w"}]}
_LAST = {"id": "m", "choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": _TOKENS}}
_STREAM = b"data: " + json.dumps(_EVENT).encode() + b"\n\n"
_ANSWER = _STREAM * _TOKENS + b"data: " + json.dumps(_LAST).encode() + b"\n\ndata: [DONE]\n\n"
_CATALOG = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode()


class _Mock(asyncio.Protocol):
    """One connection to a mock engine. A POST whose prompt begins with `hold` is answered when `release` says so."""

    def __init__(self, held: list[_Mock]) -> None:
        self._held = held
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        self._data = b""
        if head.startswith(b"GET /v1/models"):
            self._write(_CATALOG, b"application/json")
        elif head.startswith(b"GET /health"):
            self._write(b"", b"text/plain")
        elif head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif b'"hold' in body:
            self._held.append(self)
        else:
            self.answer()

    def answer(self) -> None:
        self._write(_ANSWER, b"text/event-stream")

    def _write(self, body: bytes, kind: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _run_mocks(count: int, pipe: Connection) -> None:
    """Serve until the pipe is closed. Tells its ports; then, when asked, how many requests each engine holds."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        held: list[list[_Mock]] = [[] for _ in range(count)]
        servers = [await loop.create_server(lambda one=one: _Mock(one), "127.0.0.1", 0) for one in held]  # type: ignore[misc]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        while (word := await asyncio.to_thread(_received, pipe)) is not None:
            pipe.send([len(one) for one in held])
            if word == "release":
                for one in held:
                    for mock in one:
                        mock.answer()
                    one.clear()

    asyncio.run(serve())


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


@contextlib.contextmanager
def _mocks(count: int) -> Iterator[tuple[list[int], Connection]]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_mocks, args=(count, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours
    finally:
        ours.close()
        process.join(10)
        process.kill()


@dataclass
class _Load:
    """Results of closed-loop clients."""

    latencies_s: list[float] = field(default_factory=list)
    num_failed: int = 0


async def _client(port: int, load: _Load, start_s: float, end_s: float, number: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "m", "prompt": f"{number} tell me", "max_tokens": _TOKENS, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    request = head % len(body) + body
    while (began_s := time.perf_counter()) < end_s:
        writer.write(request)
        answer = b""
        while not answer.endswith((b"0\r\n\r\n", b"data: [DONE]\n\n")):
            data = await reader.read(65536)
            if not data:
                raise RuntimeError(f"the connection broke after {answer[-200:]!r}")
            answer += data
        if began_s >= start_s:
            load.latencies_s.append(time.perf_counter() - began_s)
            load.num_failed += not answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def _closed_loop(port: int, settings: argparse.Namespace, router_pid: int | None) -> dict[str, Any]:
    load = _Load()
    start_s = time.perf_counter() + _WARM_UP_S
    end_s = start_s + settings.seconds
    clients = [asyncio.create_task(_client(port, load, start_s, end_s, n)) for n in range(settings.streams)]
    await asyncio.sleep(_WARM_UP_S)
    before_s = _cpu_s(router_pid)
    await asyncio.gather(*clients)
    cpu_s = _cpu_s(router_pid) - before_s
    count = len(load.latencies_s)
    return {
        "requests_per_s": count / settings.seconds,
        "p50_s": statistics.median(load.latencies_s),
        "p99_s": statistics.quantiles(load.latencies_s, n=100)[98],
        "cpu_s_per_request": cpu_s / count,
        "num_failed": load.num_failed,
    }


def _cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children())]
    return sum(one.user + one.system for one in times)


async def _bursts(port: int, mocks: Connection) -> list[int]:
    """The largest number of requests that one engine got, for each burst."""
    most = []
    for burst in range(_NUM_BURSTS):
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60.0)) for _ in range(_BURST)
            ]
            bodies = [{"prompt": f"hold {burst} {n}", "max_tokens": _TOKENS, "stream": True} for n in range(_BURST)]
            tasks = [
                asyncio.create_task(client.post(f"http://127.0.0.1:{port}/v1/completions", json=body))
                for client, body in zip(clients, bodies, strict=True)
            ]
            deadline_s = time.monotonic() + 30.0
            while sum(counts := _asked(mocks, "count")) < _BURST:
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"only {counts} of {_BURST} requests arrived")
                await asyncio.sleep(0.01)
            most.append(max(counts))
            _asked(mocks, "release")
            statuses = Counter(answer.status_code for answer in await asyncio.gather(*tasks))
            if statuses != {200: _BURST}:
                raise RuntimeError(f"a burst was answered with {statuses}")
    return most


def _asked(mocks: Connection, word: str) -> list[int]:
    mocks.send(word)
    counts: list[int] = mocks.recv()
    return counts


@contextlib.contextmanager
def _router(ports: list[int], count: int) -> Iterator[tuple[int, int]]:
    """Port and pid of a router with this many processes, once it has reached all engines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engines.toml")
        path.write_text(
            "".join(f'[[engines]]\nname = "e{port}"\nurl = "http://127.0.0.1:{port}"\nmodel = "m"\n' for port in ports)
        )
        port = free_port()
        command = [sys.executable, "-m", "tandem", "route", f"--engines={path}", f"--port={port}"]
        command += [f"--router-processes={count}"] if count > 1 else []
        url = f"http://127.0.0.1:{port}"
        with launched(command, ready=f"{url}/ready") as running:
            for _ in range(4 * count):
                engines = httpx.get(f"{url}/v1/pools", trust_env=False).json()["engines"]
                if any(engine["state"] != "ready" for engine in engines):
                    raise RuntimeError(f"not all engines are ready: {engines}")
            yield port, running.process.pid


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=32, help="closed-loop clients")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--processes", default="1,2,3")
    settings = parser.parse_args(argv)
    if settings.quick:
        settings.seconds, settings.processes = 1.0, "2"
    results: dict[str, Any] = {}
    with _mocks(settings.engines) as (ports, mocks):
        results["the engines themselves"] = asyncio.run(_closed_loop(ports[0], settings, None))
        for count in map(int, settings.processes.split(",")):
            with _router(ports, count) as (port, pid):
                found = asyncio.run(_closed_loop(port, settings, pid))
                found["most_of_burst"] = asyncio.run(_bursts(port, mocks))
                results[f"{count} process(es)"] = found
                console.print(f"{count}: {found}")
    rows = [
        (
            name,
            f"{one['requests_per_s']:.0f}",
            ms(one["p50_s"]),
            ms(one["p99_s"]),
            ms(one["cpu_s_per_request"]),
            f"{statistics.mean(one['most_of_burst']):.1f} ({max(one['most_of_burst'])})"
            if "most_of_burst" in one
            else "",
            one["num_failed"],
        )
        for name, one in results.items()
    ]
    even = _BURST / settings.engines
    print_table(
        f"{settings.streams} closed-loop streams of {_TOKENS} tokens, {settings.engines} mock engines",
        ("router", "requests/s", "p50 ms", "p99 ms", "CPU ms a request", f"most of a burst (even: {even:g})", "failed"),
        rows,
    )
    write_result("router_processes", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
