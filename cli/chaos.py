"""`tandem chaos`: starts a server, loads it and makes faults; says what was done and whether a client lost anything."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from tandem.loadtest.chaos import ChaosRun, chaos_client, plan, run_chaos, sample_requests
from tandem.loadtest.stats import Distribution
from tandem.protocol.errors import ConfigError, ServingError

__all__ = ["chaos"]

_SERVING = re.compile(r"Serving (\S+) on (http://\S+)")
_START_S = 600.0
_STOP_S = 60.0
_FLAGS = ["--host-cache-gb=0.1", "--max-restarts=1000", "--no-autoscale"]
_LINK_FAULTS = "delay=0.02,stick=0.002,fail=0.01,lose=0.002,tear=0.005,flip=0.01,garble=0.005,drop=0.01,repeat=0.01"


class ChaosError(ServingError):
    """The server for the trial did not start, or did not end."""


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="For how many minutes to make faults.")] = 2.0,
    seed: Annotated[int, typer.Option(help="The same seed plans the same faults and requests.")] = 0,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 2,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Clients at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="Of each answer.")] = 100,
    router_processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Router processes; if there are several, one is killed from time to time."),
    ] = 1,
    model: Annotated[str, typer.Option(help="Model, as for tandem serve; empty = the default model.")] = "",
    link_faults: Annotated[
        str, typer.Option(help="Faults of KV transfers and their rates; none = no faults.")
    ] = _LINK_FAULTS,
) -> int:
    """Test what clients lose while workers die: on a server of its own, under steady load, with minutes of faults.

    Workers are killed, or stopped for 3 and 20 s; KV is delayed, damaged and lost on its way; the folder of the disk
    cache vanishes. Every answer is compared with an undisturbed one. The exit code is 1 if a request failed, a token
    differed, or a worker held memory that nobody used.

    [bold]Examples[/bold]

    [cyan]tandem chaos --minutes 10[/cyan]

    [cyan]tandem chaos --seed 7 --prefill 1 --decode 3 --streams 16[/cyan]
    """
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    duration_s = minutes * 60
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as scratch:
        folder = Path(scratch)
        flags = [f"--prefill={prefill}", f"--decode={decode}", f"--router-processes={router_processes}"]
        flags += [f"--disk-cache-path={folder / 'kv'}", *_FLAGS]
        flags += [f"--model={model}"] if model else []
        flags += [f"--inject-faults=seed={seed},{link_faults}"] if link_faults != "none" else []
        say(f"seed {seed}; the server's log: {folder / 'serve.log'}")
        with _serving(flags, folder / "serve.log") as (process, name, url):
            trial = partial(
                run_chaos,
                server=psutil.Process(process.pid),
                requests=sample_requests(seed, name, max_tokens),
                events=plan(seed, duration_s, has_edges=router_processes > 1, has_disk=True),
                duration_s=duration_s,
                num_streams=streams,
                seed=seed,
                disk_folder=folder / "kv",
                say=say,
            )
            run = asyncio.run(_with_client(url, trial))
        _show(run, Console(highlight=False))
    for line in run.lost:
        say(f"lost: {line}")
    return 1 if run.lost else 0


async def _with_client(url: str, trial: Callable[[httpx.AsyncClient], Awaitable[ChaosRun]]) -> ChaosRun:
    async with chaos_client(url) as client:
        return await trial(client)


@contextmanager
def _serving(flags: list[str], log_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """`tandem serve` with these flags: its process, the model's name and the URL. Raises `ChaosError`."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "serve", "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not reach the server: we stop it
        )
    try:
        deadline_s = time.monotonic() + _START_S
        while (found := _SERVING.search(log_path.read_text(errors="replace"))) is None:
            if process.poll() is not None:
                raise ConfigError(f"tandem serve did not start:\n{log_path.read_text(errors='replace')[-1500:]}")
            if time.monotonic() > deadline_s:
                raise ChaosError(f"tandem serve was not ready within {_START_S:g} s")
            time.sleep(0.1)
        yield process, found[1], found[2]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ChaosError(f"tandem serve did not end within {_STOP_S:g} s after Ctrl-C") from None


def _show(run: ChaosRun, console: Console) -> None:
    done = Table("done to the server", "times", title="what was done")
    for kind, count in sorted(run.events.items()):
        done.add_row(kind, str(count))
    console.print(done)
    seen = Table("kind of request", "answers", title="what clients saw")
    for kind, count in sorted(run.num_requests.items()):
        seen.add_row(kind, str(count))
    console.print(seen)
    silences = Distribution.of(run.silences_s)
    facts = Table("", "", title="result")
    facts.add_row("requests", str(run.num_requests.total()))
    facts.add_row("failed", str(len(run.failed)))
    facts.add_row("different from the undisturbed answer", str(len(run.wrong)))
    facts.add_row(
        "longest silence of a request, p50 / p99 / max",
        f"{silences.p50:.2f} / {silences.p99:.2f} / {silences.max:.2f} s",
    )
    facts.add_row("sent again, as a router process died", str(run.num_sent_again))
    facts.add_row(
        "moves by cause", ", ".join(f"{cause} {count:g}" for cause, count in sorted(run.moves.items())) or "none"
    )
    facts.add_row("workers that hold what nobody uses", str(sum(map(bool, run.held.values()))))
    console.print(facts)
