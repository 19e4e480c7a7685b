"""`tandem chaos`: a server of its own, load, faults and operators' moves: says what its clients lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from tandem.cli.phases import Phases
from tandem.loadtest.chaos.plan import kinds_of, plan
from tandem.loadtest.chaos.requests import NUM_REQUESTS, chaos_client, sample_requests
from tandem.loadtest.chaos.trial import ChaosRun, run_chaos
from tandem.loadtest.stats import Distribution, minutes_of
from tandem.protocol.errors import ConfigError, ServingError

_SERVING = re.compile(r"Serving (\S+) on (http://\S+)")
_START_S = 600.0
_STOP_S = 60.0
# What parts of a trial take with the default model on a machine with nothing else to do.
_WORKER_START_S = 10.0  # of one core
_TOKEN_S = 0.02
_REST_S = 60.0
_FLAGS = ["--host-cache-gb=0.1", "--max-restarts=1000", "--no-autoscale"]
_LINK_FAULTS = "delay=0.02,stick=0.002,fail=0.01,lose=0.002,tear=0.005,flip=0.01,garble=0.005,drop=0.01,repeat=0.01"


class ChaosError(ServingError):
    """The server for the trial did not start, or did not end."""


def chaos(
    serve_flags: Annotated[
        list[str] | None,
        typer.Argument(help="Further flags of tandem serve, after --.", show_default=False, metavar="[-- FLAGS]"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="How long the load lasts.")] = 2.0,
    seed: Annotated[int, typer.Option(help="The same seed plans the same events and requests.")] = 0,
    events: Annotated[
        str, typer.Option(help="What to do to the server: faults, operations, single kinds (docs/chaos.md), or none.")
    ] = "faults,operations",
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Prefill workers.")] = 2,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 2,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Clients at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="Tokens of each answer.")] = 100,
    router_processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Router processes; if there are several, one is killed from time to time."),
    ] = 1,
    model: Annotated[str, typer.Option(help="Model, as for tandem serve; empty = the default model.")] = "",
    link_faults: Annotated[
        str, typer.Option(help="Faults of KV transfers and their rates; none = no faults.")
    ] = _LINK_FAULTS,
    log: Annotated[
        str, typer.Option(help="File of the server's log; empty = a temporary one, kept if something is lost.")
    ] = "",
) -> int:
    """Test what clients lose while workers die, leave and change roles: on a server of its own, under steady load.

    Workers are killed, or stopped for 3 and 20 s; KV is delayed, damaged and lost in transit; the folder of the disk
    cache vanishes. Workers are flipped, drained, restarted and added, and answers migrate. Every answer is compared
    with an undisturbed one. The exit code is 1 if a request failed, a token differed, a worker held memory that nobody
    used, or an operation did not end.

    [bold]Examples[/bold]

    [cyan]tandem chaos --minutes 10[/cyan]

    [cyan]tandem chaos --seed 7 --prefill 1 --decode 3 --streams 16[/cyan]

    [cyan]tandem chaos --events operations --link-faults none -- --pool-bytes 50000000 --max-num-seqs 8[/cyan]
    """
    kinds = _kinds(events, has_several_routers=router_processes > 1)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-chaos-") as scratch,
        Phases(Console(stderr=True, highlight=False)) as phases,
    ):
        disk_folder, log_path = Path(scratch, "kv"), Path(log or Path(scratch, "serve.log"))
        flags = [f"--router-processes={router_processes}", *_worker_flags(prefill, decode, model, disk_folder)]
        flags += [f"--inject-faults=seed={seed},{link_faults}"] if link_faults != "none" else []
        phases.say(f"seed {seed}; the server's log: {log_path}")
        phases.say(_expected_time(prefill + decode, max_tokens, minutes))
        load = _Load(kinds, seed, minutes * 60, streams, max_tokens, disk_folder)
        run = _trial([*flags, *(serve_flags or [])], log_path, load, phases)
        if run.lost and not log:
            phases.say(f"the server's log is kept: {_kept(log_path)}")
    _show(run, Console(highlight=False))
    for line in run.lost:
        phases.say(f"lost: {line}")
    return 1 if run.lost else 0


@dataclass(frozen=True, slots=True)
class _Load:
    """What a trial does to its server: the kinds of events, and the requests."""

    kinds: list[str]
    seed: int
    duration_s: float
    num_streams: int
    max_tokens: int
    disk_folder: Path  # of the server's disk cache


def _kinds(events: str, *, has_several_routers: bool) -> list[str]:
    kinds = [] if events == "none" else kinds_of(events)
    return kinds if has_several_routers else [kind for kind in kinds if kind != "kill-router"]


def _trial(flags: list[str], log_path: Path, load: _Load, phases: Phases) -> ChaosRun:
    """Start a server, put it under load, and stop it."""
    began_s = time.monotonic()
    phases.begin("starting the server", lambda: _last_line(log_path))
    with _serving(flags, log_path) as (process, model, url):
        phases.say(f"the server is up after {minutes_of(time.monotonic() - began_s)}")
        run = asyncio.run(_run(psutil.Process(process.pid), model, url, load, phases))
        phases.begin("stopping the server")
    run.num_tracebacks = log_path.read_text(errors="replace").count("Traceback (most recent call last)")
    phases.say(f"the trial took {minutes_of(time.monotonic() - began_s)}")
    return run


def _worker_flags(num_prefill: int, num_decode: int, model: str, cache_folder: Path) -> list[str]:
    """The server's flags for its workers."""
    cores = _share_of_cores(num_prefill + num_decode + 1)  # one may be added
    flags = [f"--prefill={num_prefill}", f"--decode={num_decode}", f"--num-cpus-per-worker={cores}", *_FLAGS]
    return [*flags, f"--disk-cache-path={cache_folder}", *([f"--model={model}"] if model else [])]


def _expected_time(num_workers: int, max_tokens: int, minutes: float) -> str:
    """About how long all of it takes."""
    start_s = 20 + _WORKER_START_S * num_workers / len(os.sched_getaffinity(0))
    answers_s = NUM_REQUESTS * max_tokens * _TOKEN_S
    total_s = start_s + answers_s + minutes * 60 + _REST_S
    return (
        f"this takes about {minutes_of(total_s)} with the default model on an idle machine: {minutes_of(start_s)} to "
        f"start, {minutes_of(answers_s)} for undisturbed answers, {minutes_of(minutes * 60)} of load, and "
        f"{minutes_of(_REST_S)} until all workers are at rest"
    )


def _last_line(log: Path) -> str:
    """What the server said last."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:100] if lines else ""
    return ""


async def _run(process: psutil.Process, model: str, url: str, load: _Load, phases: Phases) -> ChaosRun:
    """The trial of a server that was started for it."""
    async with chaos_client(url) as client:
        cards = (await client.get("/v1/models")).raise_for_status().json()["data"]
        requests = sample_requests(load.seed, model, load.max_tokens, cards[0]["max_model_len"])
        return await run_chaos(
            client, process, requests, plan(load.seed, load.duration_s, load.kinds), duration_s=load.duration_s,
            num_streams=load.num_streams, seed=load.seed, disk_folder=load.disk_folder, say=phases.say,
            begin=phases.begin,
        )  # fmt: skip


def _share_of_cores(num_workers: int) -> float:
    """A whole number or below one, where Ray counts in steps of a ten thousandth."""
    share = len(os.sched_getaffinity(0)) / num_workers
    return float(int(share)) if share >= 1 else max(int(share * 1e4) / 1e4, 0.01)


def _kept(log: Path) -> str:
    """A copy of the log that outlives this run."""
    descriptor, path = tempfile.mkstemp(prefix="tandem-chaos-", suffix=".log")
    os.close(descriptor)
    shutil.copyfile(log, path)
    return path


@contextmanager
def _serving(flags: list[str], log_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """`tandem serve` with these flags: its process, the model's name and the URL. Raises `ChaosError`.

    SIGTERM to this process ends the server as Ctrl-C does.
    """
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
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
                lines = log_path.read_text(errors="replace").strip().splitlines()
                raise ConfigError(f"tandem serve did not start: {lines[-1].removeprefix('tandem: ') if lines else ''}")
            if time.monotonic() > deadline_s:
                raise ChaosError(f"tandem serve was not ready within {_START_S:g} s")
            time.sleep(0.1)
        yield process, found[1], found[2]
    finally:
        signal.signal(signal.SIGTERM, former)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ChaosError(f"tandem serve did not end within {_STOP_S:g} s after Ctrl-C") from None


def _show(run: ChaosRun, console: Console) -> None:
    done = Table("done to the server", "times", "left out", title="what was done")
    for kind in sorted(run.events | run.refused):
        done.add_row(kind, str(run.events[kind]), str(run.refused[kind]))
    console.print(done)
    seen = Table("kind of request", "answers", title="what clients saw")
    for kind, count in sorted(run.num_requests.items()):
        seen.add_row(kind, str(count))
    console.print(seen)
    silences = Distribution.of(run.silences_s)
    facts = Table("", "", title="result")
    facts.add_row("requests", str(run.num_requests.total()))
    facts.add_row("failed", ", ".join(f"{code} {count}" for code, count in sorted(run.codes.items())) or "0")
    facts.add_row("different from the undisturbed answer", str(len(run.wrong)))
    facts.add_row(
        "longest silence of a request, p50 / p99 / max",
        f"{silences.p50:.2f} / {silences.p99:.2f} / {silences.max:.2f} s",
    )
    facts.add_row("sent again, as a router process died", str(run.num_sent_again))
    facts.add_row("left by their clients before the end", str(run.num_left))
    facts.add_row(
        "moves by cause", ", ".join(f"{cause} {count:g}" for cause, count in sorted(run.moves.items())) or "none"
    )
    facts.add_row("events that could not be done or did not end as they should", str(len(run.broken)))
    facts.add_row("tracebacks in the server's log", str(run.num_tracebacks))
    facts.add_row("workers that hold what nobody uses", str(sum(map(bool, run.held.values()))))
    console.print(facts)
