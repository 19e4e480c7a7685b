"""`tandem replay`: a trace through placement and other policies on simulated workers; a table, JSON, an HTML report."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from tandem.cli.options import Output, Report, check_writable, print_whole, progress_bars, write_report, write_result
from tandem.cli.version import commit, product_version
from tandem.loadtest.html_report import check_plots
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

_ALL = "all"
Run = TypeVar("Run")

TraceFile = Annotated[Path, typer.Argument(help="Trace of block hashes, .jsonl or .jsonl.gz.")]
NumWorkers = Annotated[int, typer.Option(help="Number of workers.")]
NumPrefill = Annotated[
    int, typer.Option(help="How many of the workers prefill; the others decode. 0 = each does both.")
]
Policies = Annotated[
    str, typer.Option(help=f"One or several of {', '.join(POLICIES)}, separated by commas; or {_ALL}.")
]
Machine = Annotated[str, typer.Option("--machine", help=f"One of {', '.join(MACHINES)}.")]
Load = Annotated[
    float, typer.Option(help="Load, as a share of what the workers could do without a cache; 0 = the trace's own pace.")
]
NumRequests = Annotated[int, typer.Option(min=0, help="Replay only this many requests from the start; 0 = all.")]
SloTtft = Annotated[float, typer.Option(help="SLO: most seconds to the first token.")]
SloItl = Annotated[float, typer.Option(help="SLO: most seconds between tokens, as a request's mean.")]
HostCache = Annotated[float, typer.Option(min=0, help="GB of host memory for KV in each worker.")]
PeerReads = Annotated[bool, typer.Option(help="Workers may read KV from each other's pools.")]
Reference = Annotated[
    bool,
    typer.Option(help="Reference semantics: a private LRU cache of --capacity blocks, prefill only, 70 % busy."),
]
Capacity = Annotated[int, typer.Option(help="Blocks of 512 tokens in each worker's cache (--reference).")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """A trace, and the conditions that are the same for all policies."""

    trace: Path
    requests: Sequence[TraceRequest]  # in the order of their arrival
    cluster: Cluster
    load: float
    slo: Slo
    seed: int

    def run(self, policy: str, on_arrival: Callable[[], object]) -> Outcome:
        """The outcome under this policy. Raises `ConfigError` if no request fits into a pool."""
        outcome = simulate(self.requests, self.cluster, policy, self.seed, on_arrival)
        if not outcome.jobs:
            raise ConfigError(f"no request of {self.trace} fits into the pool of this machine")
        return outcome

    def facts(self) -> dict[str, str]:
        """The conditions as text, by name."""
        cluster = self.cluster
        split = f"{cluster.num_prefill} prefill, {cluster.num_decode} decode" if cluster.num_prefill else "colocated"
        host = f", {cluster.host_cache_tokens:,} tokens in host memory" if cluster.host_cache_tokens else ""
        share = f"{self.load:.0%} of what these workers could do without a cache"
        minutes = self.requests[-1].arrival_s / 60
        return {
            "trace": f"{self.trace.name}, {len(self.requests):,} requests in {minutes:.1f} minutes",
            "workers": f"{cluster.num_workers} x {cluster.machine.kind}, {split}",
            "KV of each": f"{cluster.machine.pool_tokens:,} tokens in the pool{host}",
            "load": share if self.load else "the trace's own pace",
            "SLO": f"TTFT at most {self.slo.ttft_s:g} s and mean ITL at most {self.slo.itl_s * 1e3:g} ms",
            "seed": str(self.seed),
            "version": f"{product_version()}, {commit()}",
        }


def replay(
    trace: TraceFile,
    workers: NumWorkers = 8,
    num_prefill: NumPrefill = 0,
    policy: Policies = "tandem",
    worker_machine: Machine = "h200-70b",
    load: Load = 0.85,
    requests: NumRequests = 0,
    slo_ttft: SloTtft = 5.0,
    slo_itl: SloItl = 0.1,
    host_cache_gb: HostCache = 0.0,
    peer_reads: PeerReads = True,
    reference: Reference = False,
    capacity: Capacity = 4000,
    seed: Seed = 0,
    output: Output = None,
    report: Report = None,
) -> int:
    """Replay a trace in virtual time: what would this policy do with that load on these workers?

    Placement, cost model, prefix index and bookings are the product's own code; only workers are modelled. The router
    starts from its prior costs and learns the machines' speed from their steps. An hour of a thousand workers takes a
    minute.

    [bold]Examples[/bold]

    [cyan]tandem replay trace.jsonl.gz --workers 8 --prefill 6 --policy tandem,dynamo --report report.html[/cyan]

    [cyan]tandem replay trace.jsonl.gz --reference --workers 64 --capacity 4000 --policy all[/cyan]
    """
    _check_counts(workers, num_prefill, capacity)
    check_writable(output, report)
    recorded = read_requests(trace, requests)
    if reference:
        if report is not None:
            raise ConfigError("--report needs the full simulation; leave --reference out")
        return _replay_reference(recorded, policy, workers, capacity, output)
    if report is not None:
        check_plots()
    cluster = _cluster(worker_machine, workers, num_prefill, host_cache_gb, peer_reads)
    timed = _arrivals(recorded, load, cluster, seed)
    slo = Slo(slo_ttft, slo_itl)
    return _replay_simulated(
        _Scenario(trace=trace, requests=timed, cluster=cluster, load=load, slo=slo, seed=seed), policy, output, report
    )


def _replay_simulated(scenario: _Scenario, policy: str, output: Path | None, report: Path | None) -> int:
    """Replay under each policy, print and write the results. Returns the exit code."""
    console = Console(highlight=False)
    outcomes = list(_each(_choose(policy, POLICIES), scenario.run, len(scenario.requests)).values())
    facts, slo = scenario.facts(), scenario.slo
    for fact, text in facts.items():
        console.print(f"[dim]{fact}:[/] {text}", soft_wrap=True)
    _print_summaries(outcomes, slo, console)
    _write_results(output, [summarize(outcome, slo).as_dict() for outcome in outcomes])
    if report is not None:
        write_report(report, html_report(f"Replay of {scenario.trace.name}", facts, outcomes, slo))
    return 0


def _replay_reference(
    recorded: Sequence[TraceRequest], policy: str, workers: int, capacity: int, output: Path | None
) -> int:
    """The same under reference semantics."""
    console = Console(highlight=False)
    results = _each(
        _choose(policy, REFERENCE_POLICIES),
        lambda name, on_arrival: route(
            recorded, name, num_workers=workers, capacity_blocks=capacity, on_arrival=on_arrival
        ),
        len(recorded),
    )
    _print_reference(results, console)
    _write_results(output, [{"policy": name, **asdict(result)} for name, result in results.items()])
    return 0


def _check_counts(workers: int, num_prefill: int, capacity: int) -> None:
    for name, value, least in [("workers", workers, 1), ("num_prefill", num_prefill, 0), ("capacity", capacity, 1)]:
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    if num_prefill >= workers:
        raise ConfigError(f"num_prefill={num_prefill} leaves none of {workers} workers to decode")


def _cluster(worker_machine: str, workers: int, num_prefill: int, host_cache_gb: float, peer_reads: bool) -> Cluster:
    hardware = _lookup("machine", worker_machine, MACHINES)
    return Cluster(
        machine=hardware,
        num_prefill=num_prefill,
        num_decode=workers - num_prefill,
        host_cache_tokens=int(host_cache_gb * 1e9 / hardware.kv_token_bytes),
        peer_reads=peer_reads,
    )


def read_requests(trace: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of a trace, or all for 0. Raises `ConfigError` if it has fewer than two."""
    try:
        requests = list(itertools.islice(read_trace(trace), num_requests or None))
    except (OSError, EOFError, RecursionError, ValueError, zlib.error) as exc:
        raise ConfigError(f"trace {trace} cannot be read: {exc}") from exc
    if len(requests) < 2:
        raise ConfigError(f"trace {trace} has {len(requests)} requests; a replay needs two or more")
    return requests


def _arrivals(requests: Sequence[TraceRequest], load: float, cluster: Cluster, seed: int) -> list[TraceRequest]:
    if not load >= 0:  # nan is not
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


def _each(names: Sequence[str], run: Callable[[str, Callable[[], object]], Run], num_requests: int) -> dict[str, Run]:
    """The result of each policy. `run` calls what it is given once for each request."""
    with progress_bars() as progress:
        bars = [progress.add_task(name, total=num_requests) for name in names]
        return {name: run(name, _ticks(progress, bar)) for name, bar in zip(names, bars, strict=True)}


def _ticks(progress: Progress, bar: TaskID) -> Callable[[], object]:
    """Moves a bar on every hundred calls: moving it takes as long as a step of the simulation."""
    calls = itertools.count(1)

    def tick() -> None:
        if next(calls) % 100 == 0:
            progress.advance(bar, 100)

    return tick


def _print_summaries(outcomes: Sequence[Outcome], slo: Slo, console: Console) -> None:
    summaries = [summarize(outcome, slo) for outcome in outcomes]
    print_table(list(COLUMNS), [[write(summary) for write in COLUMNS.values()] for summary in summaries], console)
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
    print_table(headings, rows, console)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table whose first column has texts, and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for idx, heading in enumerate(headings):
        table.add_column(heading, justify="right" if idx else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print_whole(table, console)


def _write_results(output: Path | None, results: Sequence[Mapping[str, object]]) -> None:
    if output is not None:
        write_result(output, {"block_size": TRACE_BLOCK_SIZE, "results": results})
