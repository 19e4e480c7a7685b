"""Helpers of all benchmarks: servers started and stopped by their own handle, results as a table and as JSON.

A benchmark measures its set-ups one after another in one run, so all of them see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from tandem.cli import options
from tandem.cluster.model_store import served_name
from tandem.loadtest.client import MeasuringClient, StreamTiming, run_measured
from tandem.loadtest.prompts import random_prompts
from tandem.loadtest.stats import Distribution
from tandem.protocol.config import DEFAULT_MODEL
from tandem.protocol.fault_boundary import undone_on_error
from tandem.runtime.ports import free_ports
from tandem.runtime.signals import restore_child_signals

HERE = Path(__file__).resolve().parent.parent  # this checkout
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 45.0
_CHILDREN_TIMEOUT_S = 5.0  # after their parent has ended
_POLL_S = 0.1
_IDLE_POLL_S = 0.05

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to start `tandem serve`."""

    name: str
    flags: tuple[str, ...]


COLOCATED = Setup("colocated", ("--colocated",))
ONE_PAIR = Setup("1P1D", ("--prefill=1", "--decode=1"))
ONE_PAIR_ALWAYS = Setup("1P1D, always a pair", (*ONE_PAIR.flags, "--routing=cost,pairs"))


def checkouts(settings: argparse.Namespace) -> dict[str, Path]:
    """The folder of this checkout, and before it the one of `--base` if there is one, by name."""
    return ({"base": settings.base} if settings.base else {}) | {"here": HERE}


class Launched(NamedTuple):
    """A running process and how long it took to answer."""

    process: subprocess.Popen[bytes]
    start_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    name: str
    url: str
    model: str
    start_s: float  # from the command to ready
    timeout_s: float = 300.0  # of a request

    @property
    def client(self) -> MeasuringClient:
        """A client for it."""
        return MeasuringClient(self.url, timeout_s=self.timeout_s)

    async def workers(self, *roles: str) -> list[dict[str, Any]]:
        """Its workers, or those of these roles, as `/v1/pools` shows them."""
        pools = (await self.client.request_json("GET", "/v1/pools"))["roles"]
        return [worker for role in roles or pools for worker in pools[role]]

    async def prompts(self, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
        """Prompts of random words, which share nothing."""
        return await random_prompts(
            self.client, model=self.model, num_prompts=num_prompts, num_tokens=num_tokens, seed=seed
        )

    async def greedy(self, prompt: list[int], max_tokens: int, **fields: Any) -> StreamTiming:
        """A greedy stream of exactly `max_tokens` tokens. Raises `RuntimeError` if it fails."""
        timing = await self.client.stream_completion(
            prompt, model=self.model, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **fields
        )
        if timing.error:
            raise RuntimeError(f"{self.name}: {timing.error}")
        return timing

    async def until_replaced(self, victims: Sequence[dict[str, Any]], timeout_s: float) -> None:
        """Wait until successors of these workers, as `/v1/pools` shows them, are ready."""
        async with asyncio.timeout(timeout_s):
            while True:
                epochs = {one["worker_id"]: one["epoch"] for one in await self.workers() if one["state"] == "ready"}
                if all(epochs.get(one["worker_id"], one["epoch"]) != one["epoch"] for one in victims):
                    return
                await asyncio.sleep(0.2)


class Arguments(argparse.ArgumentParser):
    """A parser of flags that may have another value in a quick run."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._quick: dict[str, Any] = {}

    def option(self, name: str, default: Any, help: str = "", *, quick: Any = None, **more: Any) -> None:
        """A flag of the default's type, of several values for a list; `quick` is its value in a quick run."""
        if isinstance(default, list):
            more["nargs"] = "+"
        kind = type(default[0] if isinstance(default, list) else default)
        help = f"{help} (default: %(default)s)" if default else help
        action = self.add_argument(name, default=default, type=kind, help=help, **more)
        if quick is not None:
            self._quick[action.dest] = quick

    def settings(self) -> argparse.Namespace:
        """What the command line says."""
        settings = self.parse_args()
        if settings.quick:
            vars(settings).update(self._quick)
        return settings


def arguments(description: str | None, *, model: bool = True, base: bool = False) -> Arguments:
    """A parser with the flags of every benchmark; `description` is the docstring of its module. Calls `end_whole`.

    `model` is whether the benchmark has a `--model`; with `base` it has `--base`, a checkout to compare with.
    """
    end_whole()
    parser = Arguments(description)
    if model:
        parser.add_argument("--model", default=DEFAULT_MODEL, help="as of `tandem serve` (default: %(default)s)")
    if base:
        parser.add_argument("--base", type=Path, metavar="FOLDER", help="another checkout to compare with")
    parser.add_argument("--quick", action="store_true", help="a short run that only shows whether the benchmark works")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same requests")
    return parser


def end_whole() -> None:
    """From here on SIGTERM ends this process as SIGINT does: what it started is stopped."""
    restore_child_signals()  # servers are stopped with SIGINT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def serving(setup: Setup, model: str, *flags: str, checkout: Path = HERE) -> Iterator[Server]:
    """A `tandem serve` on a free port, ready, for as long as the block runs."""
    port = free_port()
    command = [sys.executable, "-m", "tandem", "serve", f"--model={model}", f"--port={port}"]
    url = f"http://127.0.0.1:{port}"
    with launched([*command, *setup.flags, *flags], ready=f"{url}/ready", checkout=checkout) as running:
        yield Server(setup.name, url, served_name(model), running.start_s)


@contextlib.contextmanager
def routing(engines: str, *flags: str, checkout: Path = HERE, scheme: str = "http") -> Iterator[tuple[str, int]]:
    """A `tandem route` with this file of engines, ready: its URL and the id of its process."""
    port = free_port()
    url = f"{scheme}://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engines.toml")
        path.write_text(engines)
        command = [sys.executable, "-m", "tandem", "route", f"--engines={path}", f"--port={port}", *flags]
        with launched(command, ready=f"{url}/ready", checkout=checkout) as running:
            yield url, running.process.pid


def engines_toml(urls: Iterable[str], kind: str = "vllm") -> str:
    """The file of these engines."""
    return "".join(f'[[engines]]\nname = "w{i}"\nurl = "{url}"\nkind = "{kind}"\n' for i, url in enumerate(urls))


@contextlib.contextmanager
def mock_engines(count: int = 2) -> Iterator[list[str]]:
    """URLs of engines that compute nothing, all in one process."""
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.mock_engine", *map(str, ports)]
    with launched(command, ready=f"{urls[0]}/health"):
        yield urls


@contextlib.contextmanager
def beside(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run `work(pipe, *args)` in a process of its own, which ends with the block; yields the other end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(_STOP_TIMEOUT_S)  # it may stop a server
        process.kill()
        ours.close()


def measure_each(
    servers: Iterable[contextlib.AbstractContextManager[Any]], measure: Callable[[Any], Coroutine[Any, Any, Any]]
) -> dict[str, Any]:
    """Measure one server, or another thing that has a name, after another; the results by name.

    A server that does not start, or fails, is reported and left out, so that the others' results are kept.
    """
    results = {}
    for starting in servers:
        try:
            with starting as server:
                results[server.name] = run_measured(measure(server))
                console.print(f"[dim]measured {server.name}[/]")
        except (RuntimeError, OSError) as exc:
            console.print(f"[red]left out:[/] {exc}")
    return results


async def until_idle(server: Server, timeout_s: float) -> tuple[float, dict[str, str]]:
    """Seconds until no worker holds anything, and what is still held at the timeout."""
    began = time.perf_counter()
    while True:
        check = await server.client.request_json("POST", "/v1/pools/check")
        waited_s = time.perf_counter() - began
        if check["idle"]:
            return waited_s, {}
        if waited_s > timeout_s:
            return waited_s, {worker_id: wrong for worker_id, wrong in check["workers"].items() if wrong}
        await asyncio.sleep(_IDLE_POLL_S)


@contextlib.contextmanager
def launched(
    command: Sequence[str],
    *,
    ready: str,
    env: Mapping[str, str] | None = None,
    checkout: Path = HERE,
) -> Iterator[Launched]:
    """Run a server while the block runs; `start_s` is the time until GET `ready` answered 200.

    At the end it gets SIGINT and time to stop; then it and all that it started are killed by their handles.
    """
    console.print(f"[dim]starting {shlex.join(command)}[/]", soft_wrap=True)
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve()), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone, and we pass it on
        )
        try:
            with undone_on_error(lambda: _print_end(log)):
                _wait_until_ready(process, ready)
                yield Launched(process, time.perf_counter() - started)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    with httpx.Client(timeout=5.0, trust_env=False, verify=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise RuntimeError(f"{url} was not ready within {_READY_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and everything it started. Its children are looked up before they can lose their parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                console.print(f"[red]the server did not stop in {_STOP_TIMEOUT_S:.0f} s: killed[/]")
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(children, timeout=_CHILDREN_TIMEOUT_S)
        for child in alive:
            console.print(f"[red]the server left a process behind ({child.pid}): killed[/]")
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=5.0)


def _print_end(log: Any) -> None:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-30:]
    console.print("[red]the end of the server's log:[/]")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def free_port() -> int:
    """A free port outside the ephemeral range, so that it stays free until the server listens on it."""
    return free_ports("127.0.0.1", 1)


def in_ms(what: str, times: Distribution, *names: str) -> dict[str, float]:
    """Figures of a distribution (p50, max, ...) in milliseconds, for a row."""
    return {f"{what} {name}": 1e3 * getattr(times, name) for name in names}


def ratio(value: float, base: float) -> float:
    """`value / base`; NaN if either is missing or zero."""
    return value / base if base > 0 else math.nan


def verdict(aim: str, is_hit: bool) -> str:
    """An aim and whether it was reached, for a table."""
    return f"{aim}: {'hit' if is_hit else 'missed'}"


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
    """Print a table: first column left-aligned, numbers right-aligned."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for idx, heading in enumerate(headings):
        table.add_column(heading, justify="right" if idx else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, object]], caption: str = "") -> None:
    """Print a table of rows that have the same keys, which are its headings."""
    print_table(title, list(rows[0]) if rows else [], [list(row.values()) for row in rows], caption)


def print_results(title: str, results: Mapping[str, Mapping[str, object]], caption: str = "") -> None:
    """Print the rows of `measure_each`, with their names in front."""
    print_rows(title, [{"": name, **row} for name, row in results.items()], caption)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def write_result(name: str, settings: argparse.Namespace, results: object) -> Path:
    """Write bench-results/NAME.json with everything needed to repeat the run; NaN becomes null."""
    path = HERE / "bench-results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    options.write_result(path, {"settings": vars(settings), "results": results}, f"python -m benchmarks.{name}")
    console.print(f"written to {path.relative_to(HERE)}")
    return path
