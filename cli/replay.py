"""`tandem replay`: a trace through placement and other policies on simulated workers; a table, JSON, an HTML report."""

from __future__ import annotations

import datetime
import json
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.cli.version import commit, machine, product_version
from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest, read_trace
from tandem.protocol.errors import ConfigError
from tandem.simulator.arrivals import at_load, spread
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.measures import Slo, summarize
from tandem.simulator.policies import POLICIES
from tandem.simulator.reference import REFERENCE_POLICIES, ReferenceResult, route
from tandem.simulator.report import COLUMNS, html_report
from tandem.simulator.simulation import Outcome, simulate

__all__ = ["replay"]

_ALL = "all"
Run = TypeVar("Run")


def replay(
    trace: Annotated[Path, typer.Argument(help="Trace of block hashes, .jsonl or .jsonl.gz.")],
    workers: Annotated[int, typer.Option(help="Workers in all.")] = 8,
    num_prefill: Annotated[
        int, typer.Option(help="How many of them prefill while the rest decodes; 0 = each does both.")
    ] = 0,
    policy: Annotated[
        str, typer.Option(help=f"One or several of {', '.join(POLICIES)}, separated by commas; or {_ALL}.")
    ] = "tandem",
    worker_machine: Annotated[str, typer.Option("--machine", help=f"One of {', '.join(MACHINES)}.")] = "h200-70b",
    load: Annotated[
        float, typer.Option(help="Share of what the workers could do without cache; 0 = the trace's own pace.")
    ] = 0.85,
    requests: Annotated[int, typer.Option(help="Only so many from the start; 0 = all.")] = 0,
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token that a request must not exceed.")] = 5.0,
    slo_itl: Annotated[float, typer.Option(help="The same of its mean gap between tokens.")] = 0.1,
    host_cache_gb: Annotated[float, typer.Option(help="Host memory for KV of each worker.")] = 0.0,
    peer_reads: Annotated[bool, typer.Option(help="Workers may read KV from each other's pools.")] = True,
    reference: Annotated[
        bool, typer.Option(help="Reference semantics: private LRU of --capacity blocks, prefill only, 70 % busy.")
    ] = False,
    capacity: Annotated[int, typer.Option(help="Blocks of 512 tokens in each worker's cache (--reference).")] = 4000,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the result as JSON.", show_default=False)] = None,
    report: Annotated[Path | None, typer.Option(help="File for a report as HTML.", show_default=False)] = None,
) -> int:
    """Replay a trace in virtual time: what would this policy do with that load on so many workers?

    Placement, cost model, prefix index and bookings are the product's own; workers are modelled. The router starts from
    its priors and learns the machines' speed from their steps. An hour of a thousand workers takes a minute.

    [bold]Examples[/bold]

    [cyan]tandem replay trace.jsonl.gz --workers 8 --prefill 6 --policy tandem,dynamo --report report.html[/cyan]

    [cyan]tandem replay trace.jsonl.gz --reference --workers 64 --capacity 4000 --policy all[/cyan]
    """
    for name, value, least in [("workers", workers, 1), ("num_prefill", num_prefill, 0), ("capacity", capacity, 1)]:
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    if num_prefill >= workers:
        raise ConfigError(f"num_prefill={num_prefill} leaves none of {workers} workers to decode")
    for path in (output, report):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist")
    arrivals = _read(trace, requests)
    console = Console(highlight=False)
    if reference:
        if report is not None:
            raise ConfigError("--report needs the full simulation; leave --reference out")
        results = _each(
            _choose(policy, REFERENCE_POLICIES),
            lambda name: route(arrivals, name, num_workers=workers, capacity_blocks=capacity),
            console,
        )
        _print_reference(results, console)
        _write_json(output, [{"policy": name, **_fields(result)} for name, result in results.items()])
        return 0
    hardware = _lookup("machine", worker_machine, MACHINES)
    cluster = Cluster(
        machine=hardware,
        num_prefill=num_prefill,
        num_decode=workers - num_prefill,
        host_cache_tokens=int(host_cache_gb * 1e9 / hardware.kv_token_bytes),
        peer_reads=peer_reads,
    )
    slo = Slo(slo_ttft, slo_itl)
    timed = _arrivals(arrivals, load, cluster, seed)
    outcomes = _each(
        _choose(policy, POLICIES), lambda name: _served(simulate(timed, cluster, name, seed), trace), console
    )
    facts = _facts(trace, timed, cluster, load, slo, seed)
    for fact, text in facts.items():
        console.print(f"[dim]{fact}:[/] {text}", soft_wrap=True)
    _print_summaries(list(outcomes.values()), slo, console)
    _write_json(output, [summarize(outcome, slo).as_dict() for outcome in outcomes.values()])
    if report is not None:
        report.write_text(html_report(f"Replay of {trace.name}", facts, list(outcomes.values()), slo))
        console.print(f"written to {report}")
    return 0


def _read(trace: Path, num_requests: int) -> list[TraceRequest]:
    try:
        arrivals = list(read_trace(trace))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"trace {trace} cannot be read: {exc}") from exc
    arrivals = arrivals[: num_requests or None]
    if len(arrivals) < 2:
        raise ConfigError(f"trace {trace} has {len(arrivals)} requests; a replay needs two or more")
    return arrivals


def _arrivals(requests: Sequence[TraceRequest], load: float, cluster: Cluster, seed: int) -> list[TraceRequest]:
    if load < 0:
        raise ConfigError(f"load={load} must not be negative; 0 is the trace's own pace")
    requests = sorted(requests, key=lambda request: request.arrival_s)
    return at_load(spread(requests, random.Random(seed)), load or None, cluster)


def _choose(policy: str, known: Mapping[str, object]) -> list[str]:
    names = list(known) if policy == _ALL else policy.split(",")
    for name in names:
        _lookup("policy", name, known)
    return names


def _lookup(what: str, name: str, known: Mapping[str, Run]) -> Run:
    if name not in known:
        raise ConfigError(f"{what}={name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]


def _each(names: Sequence[str], run: Callable[[str], Run], console: Console) -> dict[str, Run]:
    results = {}
    for name in names:
        with console.status(f"{name} ..."):
            results[name] = run(name)
    return results


def _served(outcome: Outcome, trace: Path) -> Outcome:
    if not outcome.jobs:
        raise ConfigError(f"no request of {trace} fits into the pool of this machine")
    return outcome


def _facts(
    trace: Path, requests: Sequence[TraceRequest], cluster: Cluster, load: float, slo: Slo, seed: int
) -> dict[str, str]:
    split = f"{cluster.num_prefill} prefill, {cluster.num_decode} decode" if cluster.num_prefill else "colocated"
    pace = f"{load:.0%} of what these workers could do without cache" if load else "the trace's own pace"
    host = f", {cluster.host_cache_tokens:,} tokens in host memory" if cluster.host_cache_tokens else ""
    return {
        "trace": f"{trace.name}, {len(requests):,} requests in {requests[-1].arrival_s / 60:.1f} minutes",
        "workers": f"{cluster.num_workers} x {cluster.machine.kind}, {split}",
        "KV of each": f"{cluster.machine.pool_tokens:,} tokens in the pool{host}",
        "load": pace,
        "SLO": f"TTFT at most {slo.ttft_s:g} s and mean ITL at most {slo.itl_s * 1e3:g} ms",
        "seed": str(seed),
        "version": f"{product_version()}, {commit()}",
    }


def _print_summaries(outcomes: Sequence[Outcome], slo: Slo, console: Console) -> None:
    summaries = [summarize(outcome, slo) for outcome in outcomes]
    _print_table(list(COLUMNS), [[write(summary) for write in COLUMNS.values()] for summary in summaries], console)
    if summaries[0].num_refused:
        console.print(f"{summaries[0].num_refused} requests are longer than a pool and were left out")
    wall_s, place_s = (sum(getattr(summary, name) for summary in summaries) for name in ("wall_s", "place_s"))
    console.print(f"[dim]simulated in {wall_s:.1f} s, of which {place_s:.1f} s in the policies[/]")


def _print_reference(results: Mapping[str, ReferenceResult], console: Console) -> None:
    headings = ["policy", "block hit %", "token hit %", "imbalance", "wait mean s", "p50 s", "p99 s"]
    rows = [
        [
            name,
            f"{100 * result.block_hit_ratio:.2f}",
            f"{100 * result.token_hit_ratio:.2f}",
            f"{result.imbalance:.3f}",
            f"{result.wait_mean_s:.2f}",
            f"{result.wait_p50_s:.2f}",
            f"{result.wait_p99_s:.2f}",
        ]
        for name, result in results.items()
    ]
    _print_table(headings, rows, console)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for idx, heading in enumerate(headings):
        table.add_column(heading, justify="right" if idx else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Shortened numbers are wrong ones: rather fold lines.
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _fields(result: ReferenceResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ReferenceResult.__slots__}


def _write_json(output: Path | None, results: Sequence[Mapping[str, Any]]) -> None:
    if output is None:
        return
    document = {
        "command": shlex.join(["tandem", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": product_version(),
        "commit": commit(),
        "machine": machine(),
        "block_size": TRACE_BLOCK_SIZE,
        "results": results,
    }
    output.write_text(json.dumps(document, indent=2) + "\n")
