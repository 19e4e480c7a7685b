"""What an open dashboard costs: throughput with one over none in turn, and the CPU time of a snapshot.

The viewer reads the stream as the page does, once a second. Two servers are measured: `tandem serve` with one pair of
workers and 8 streams, and a `tandem route` whose engines compute nothing, which is busy with every chunk. Its figure is
chunks for a second of its own CPU time, which other load of the machine changes less.

    python -m benchmarks.dashboard
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import (
    ONE_PAIR,
    Server,
    arguments,
    console,
    free_port,
    launched,
    print_table,
    serving,
    write_result,
)
from benchmarks.edge import Shape, cpu_of, measure, mock_engines
from benchmarks.throughput import POOL, load
from tandem.frontend.dashboard.snapshot import SnapshotBuilder
from tandem.loadtest.client import run_measured
from tests.support.dashboard_world import DashboardWorld

_ROUNDS = 12
_CONCURRENCY = 8
_REQUESTS = 16  # of a round at `tandem serve`
_ROUTE_S = 3.0  # of a round at `tandem route`
_FLOOD = Shape("flood", 256)
_NUM_WORKERS = (2, 20, 200)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds = 1
    settings.input_tokens, settings.output_tokens = 128, 64
    results: dict[str, Any] = {"snapshots": [_snapshot_cost(count, settings) for count in _NUM_WORKERS]}
    with mock_engines() as engines, _routing(engines) as (url, cpu_s):
        results["route, chunks/CPU s"] = _in_turn(lambda _: _route_rate(url, cpu_s, settings), url, settings)
    with serving(ONE_PAIR, settings.model, POOL) as server:
        _serve_rate(server, settings, seed=1_000)  # warms up
        rate = lambda round_: _serve_rate(server, settings, seed=round_)  # noqa: E731
        results["serve, tokens/s"] = _in_turn(rate, server.url, settings)
    _show(results)
    write_result("dashboard", settings, results)


def _in_turn(rate: Callable[[int], float], url: str, settings: argparse.Namespace) -> dict[str, list[float]]:
    """Rates of each round, with no dashboard and with one. Which comes first changes with each round."""
    found: dict[str, list[float]] = {"none": [], "one": []}
    for round_ in range(settings.rounds):
        for kind in ("none", "one") if round_ % 2 else ("one", "none"):
            with watching(url) if kind == "one" else contextlib.nullcontext():
                found[kind].append(rate(round_))
        console.print(f"[dim]{url}: round {round_ + 1} of {settings.rounds}[/]")
    return found


@contextlib.contextmanager
def _routing(engines: list[str]) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """A `tandem route` in front of engines: its URL, and its CPU seconds so far."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engines.toml")
        path.write_text("".join(f'[[engines]]\nname = "w{i}"\nurl = "{url}"\n' for i, url in enumerate(engines)))
        port = free_port()
        command = [sys.executable, "-m", "tandem", "route", f"--engines={path}", f"--port={port}"]
        with launched(command, ready=f"http://127.0.0.1:{port}/ready") as running:
            yield f"http://127.0.0.1:{port}", cpu_of(running.process.pid)


def _route_rate(url: str, cpu_s: Callable[[], tuple[float, float]], settings: argparse.Namespace) -> float:
    seconds = 0.3 if settings.quick else _ROUTE_S
    measured = run_measured(measure(url, cpu_s, _FLOOD, seconds))
    return measured.num_chunks / measured.cpu_s


def _serve_rate(server: Server, settings: argparse.Namespace, *, seed: int) -> float:
    num_requests = _CONCURRENCY if settings.quick else _REQUESTS
    summary = run_measured(load(server, settings, _CONCURRENCY, num_requests, seed=seed))
    return float(summary["output_tokens_per_s"])


@contextlib.contextmanager
def watching(url: str) -> Iterator[None]:
    """An open dashboard, while the block runs. Raises `OSError` if it got no snapshot."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.request("GET", "/v1/dashboard")
    response = connection.getresponse()
    if response.status != 200:
        raise OSError(f"{url}/v1/dashboard answered {response.status}")
    sock = connection.sock
    first = response.readline()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while response.readline():
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()
    if first != b"event: snapshot\n":
        raise OSError(f"the first line was {first!r}")


def _snapshot_cost(num_workers: int, settings: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds and bytes of a snapshot of a made-up deciding process."""
    world = DashboardWorld(num_workers, tenants=[f"tenant-{number}" for number in range(20)], seed=settings.seed)
    for _ in range(5):
        world.tick(40)
    builder = SnapshotBuilder(world.overview, world.metrics.traffic, "benchmark")

    async def build_all() -> tuple[float, bytes]:
        data = b""
        before = time.process_time()
        for _ in range(5 if settings.quick else 200):
            data = await builder.build()
        return (time.process_time() - before) / (5 if settings.quick else 200), data

    cpu_s, data = asyncio.run(build_all())
    return {"num_workers": num_workers, "cpu_s": cpu_s, "num_bytes": len(data), "num_fields": len(json.loads(data))}


def _show(results: dict[str, Any]) -> None:
    rows = []
    for name in ("serve, tokens/s", "route, chunks/CPU s"):
        none, one = results[name]["none"], results[name]["one"]
        ratios = sorted(with_one / without for without, with_one in zip(none, one, strict=True))
        noise = statistics.stdev(none) / statistics.mean(none) if len(none) > 1 else float("nan")
        medians = [statistics.median(none), statistics.median(one)]
        rows.append([name, *medians, statistics.median(ratios), ratios[0], ratios[-1], f"{100 * noise:.1f} %"])
    headings = ["", "none", "one", "ratio", "least", "most", "noise of none"]
    print_table("an open dashboard", headings, rows, "medians; ratios of the rounds; noise: standard deviation")
    rows = [[one["num_workers"], 1e3 * one["cpu_s"], one["num_bytes"] / 1e3] for one in results["snapshots"]]
    print_table("a snapshot, once a second while somebody looks", ["workers", "CPU ms", "kB"], rows)


if __name__ == "__main__":
    main()
