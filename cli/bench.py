"""`tandem bench`: closed-loop load against an OpenAI-compatible server; a table on screen and JSON in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandem.cli.options import (
    ApiKey,
    Output,
    Report,
    ServedModel,
    ServerUrl,
    check_writable,
    no_server,
    print_whole,
    printable,
    progress_bars,
    write_report,
    write_result,
)
from tandem.cli.version import commit, product_version
from tandem.loadtest.bench_report import BenchRun, bench_report
from tandem.loadtest.client import MeasuringClient, run_measured
from tandem.loadtest.closed_loop import ChatLoad, LoadRun, run_chats, run_completions
from tandem.loadtest.html_report import check_plots
from tandem.loadtest.prompts import random_prompts
from tandem.loadtest.stats import Distribution, LoadSummary
from tandem.protocol.errors import ConfigError, ServingError

Dataset = Literal["random", "chat"]
Concurrency = Annotated[
    str, typer.Option(help="Requests at once; several numbers, separated by commas, make one run each.")
]
NumRequests = Annotated[
    int,
    typer.Option(min=0, help="Requests in each run, or sessions for chat; 0 = three for each client, at least 8."),
]
InputTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens in each turn.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Answer tokens; end-of-sequence is ignored.")]
DatasetName = Annotated[
    Dataset,
    typer.Option(help="random: unrelated prompts, nothing to cache. chat: conversations that resend their history."),
]
NumTurns = Annotated[int, typer.Option(min=1, help="Turns of each conversation (chat only).")]
NumWarmup = Annotated[int, typer.Option(min=0, help="Unmeasured requests before each run.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same prompts.")]

_WORDS_PER_TOKEN = 0.75  # in English text; the chat dataset needs no exact sizes


class WarmupError(ServingError):
    """No request of a warm-up succeeded: there is nothing to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What one benchmark sends."""

    url: str
    model: str
    concurrency: tuple[int, ...]
    num_requests: int
    input_tokens: int
    output_tokens: int
    dataset: Dataset
    turns: int
    warmup: int
    seed: int


def bench(
    url: ServerUrl = "http://127.0.0.1:8000",
    model: ServedModel = "",
    concurrency: Concurrency = "1,8,32",
    requests: NumRequests = 0,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = 64,
    dataset: DatasetName = "random",
    turns: NumTurns = 4,
    warmup: NumWarmup = 2,
    seed: Seed = 0,
    output: Output = None,
    report: Report = None,
    api_key: ApiKey = "",
) -> int:
    """Measure TTFT, ITL and throughput of an OpenAI-compatible server.

    Closed loop: each client sends its next request when the last one is answered. All requests stream, and ask for
    ignore_eos and running usage. Servers that do not know these two ignore them.

    TTFT: request to first token. ITL: gap between two streamed events. TPOT: mean time per token after the first.

    Exit code 1 if any request failed.

    [bold]Examples[/bold]

    [cyan]tandem bench --concurrency 1,8,32 --input-tokens 128 --output-tokens 64 --output result.json[/cyan]

    [cyan]tandem bench --dataset chat --turns 4 --concurrency 8 --report report.html[/cyan]
    """
    levels = _parse_concurrency(concurrency)
    check_writable(output, report)
    if report is not None:
        check_plots()
    client = _make_client(url, api_key)
    settings = BenchSettings(
        url=url, model=model or run_measured(_first_model(client, url)), concurrency=levels, num_requests=requests,
        input_tokens=input_tokens, output_tokens=output_tokens, dataset=dataset, turns=turns, warmup=warmup, seed=seed,
    )  # fmt: skip
    try:
        runs = run_measured(_measure_all(client, settings))
    except WarmupError as exc:
        sys.stderr.write(f"tandem: {printable(exc.message)}\n")
        return 1
    summaries = [run.summary for run in runs]
    _report(settings, summaries, output)
    if report is not None:
        facts = _facts(settings) | _errors(summaries)
        page = bench_report(f"Load on {settings.model}", facts, _one_line(_HEADINGS), _rows(summaries), runs)
        write_report(report, page)
    return 1 if any(summary.num_errors for summary in summaries) else 0


async def measure(client: MeasuringClient, settings: BenchSettings, concurrency: int, progress: Progress) -> BenchRun:
    """Warm up, then one measured run at this concurrency. Raises WarmupError if no request of the warm-up succeeds."""
    num_requests = settings.num_requests or max(8, 3 * concurrency)
    task = progress.add_task(f"{concurrency} at once", total=num_requests)
    # Each run and its warm-up have a seed of their own; otherwise a prefix cache would already have the prompts.
    seed = 1_000_003 * settings.seed + 2 * concurrency
    warmup = await _send(client, settings, settings.warmup, concurrency, seed + 1)
    errors = [timing.error for timing in warmup.timings if timing.error]
    if errors and len(errors) == len(warmup.timings):
        raise WarmupError(f"every request of the warm-up failed, the first with: {_readable(errors[0])}")
    run = await _send(client, settings, num_requests, concurrency, seed, lambda: progress.advance(task))
    return BenchRun(concurrency, run)


async def _measure_all(client: MeasuringClient, settings: BenchSettings) -> list[BenchRun]:
    runs = []
    with progress_bars() as progress:
        for concurrency in settings.concurrency:
            runs.append(await measure(client, settings, concurrency, progress))
            progress.console.print(_line(runs[-1]), markup=False, highlight=False, soft_wrap=True)
    return runs


async def _send(
    client: MeasuringClient,
    settings: BenchSettings,
    num_requests: int,
    concurrency: int,
    seed: int,
    on_done: Callable[[], None] | None = None,
) -> LoadRun:
    model, output_tokens = settings.model, settings.output_tokens
    if settings.dataset == "chat":
        load = ChatLoad(
            num_sessions=num_requests,
            num_turns=settings.turns,
            words_per_turn=max(1, round(settings.input_tokens * _WORDS_PER_TOKEN)),
            output_tokens=output_tokens,
            seed=seed,
        )
        return await run_chats(client, load, model=model, concurrency=concurrency, on_done=on_done)
    prompts = await random_prompts(
        client, model=model, num_prompts=num_requests, num_tokens=settings.input_tokens, seed=seed
    )
    return await run_completions(
        client, prompts, model=model, output_tokens=output_tokens, concurrency=concurrency, on_done=on_done
    )


def _make_client(url: str, api_key: str) -> MeasuringClient:
    if "://" not in url:
        raise ConfigError(f"url={url!r} is not of the form http://host:port")
    try:
        return MeasuringClient(url, api_key=api_key)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


async def _first_model(client: MeasuringClient, url: str) -> str:
    try:
        models = await client.request_json("GET", "/v1/models")
    except OSError as exc:
        raise no_server(url, exc, "name another with --url") from exc
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError) as exc:
        raise ConfigError(f"url={url} does not list models; name one with --model") from exc


def _parse_concurrency(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"concurrency={text!r} is not a list of numbers such as 1,8,32") from exc
    if min(levels) < 1:
        raise ConfigError(f"concurrency={text!r} has a number below 1")
    return levels


def _line(run: BenchRun) -> str:
    """What one run measured, as soon as it is known."""
    summary = run.summary
    (ttft, ttft_p99), (itl, itl_p99) = (_ms(one, "p50", "p99") for one in (summary.ttft_s, summary.itl_s))
    line = (
        f"{summary.concurrency} at once: {summary.num_requests} requests in {run.run.duration_s:.1f} s, "
        f"{summary.output_tokens_per_s:.1f} tok/s, TTFT p50 {ttft} p99 {ttft_p99} ms, ITL p50 {itl} p99 {itl_p99} ms"
    )
    return line + (f", {summary.num_errors} failed" if summary.num_errors else "")


def _readable(error: str) -> str:
    """The message of an error body in OpenAI's form; other errors unchanged."""
    status, _, body = error.partition(": ")
    try:
        return f"{json.loads(body)['error']['message']} ({status})"
    except (ValueError, LookupError, TypeError):
        return error


def _report(settings: BenchSettings, summaries: list[LoadSummary], output: Path | None) -> None:
    console = Console()
    print_summaries(settings, summaries, console)
    if output is not None:
        content = {name: getattr(settings, name) for name in BenchSettings.__slots__}
        write_result(output, {"settings": content, "results": [summary.as_dict() for summary in summaries]})
        console.print(f"written to {output}", highlight=False, markup=False)


def print_summaries(settings: BenchSettings, summaries: list[LoadSummary], console: Console) -> None:
    """Print the table of all runs, and the first error of each that had any."""
    model = printable(settings.model)
    console.print(
        f"\n{model}: {settings.dataset}, {settings.input_tokens} tokens in, {settings.output_tokens} out",
        highlight=False,
        markup=False,
    )
    print_whole(_table(summaries), console)
    console.print("[dim]TTFT, ITL and TPOT in ms; ITL = gap between streamed events[/dim]")
    for summary in summaries:
        if summary.num_errors:
            console.print(f"[red]concurrency {summary.concurrency}: {summary.num_errors} errors, the first:[/red]")
            console.print(f"  {printable(_readable(summary.first_error))}", markup=False)


_HEADINGS = (
    *("at\nonce", "\nsent", "\nfailed", "\ntok/s", "\nreq/s", "TTFT\np50", "TTFT\np99"),
    *("ITL\np50", "ITL\np99", "ITL\nmax", "TPOT\np50"),
)


def _table(summaries: list[LoadSummary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _rows(summaries):
        table.add_row(*row)
    return table


def _errors(summaries: Sequence[LoadSummary]) -> dict[str, str]:
    """The first error of each run that had any, for a page."""
    return {
        f"{summary.num_errors} errors at {summary.concurrency}": f"the first: {_readable(summary.first_error)}"
        for summary in summaries
        if summary.num_errors
    }


def _rows(summaries: Sequence[LoadSummary]) -> list[list[str]]:
    return [
        [
            str(summary.concurrency),
            str(summary.num_requests),
            str(summary.num_errors),
            f"{summary.output_tokens_per_s:.1f}",
            f"{summary.requests_per_s:.2f}",
            *_ms(summary.ttft_s, "p50", "p99"),
            *_ms(summary.itl_s, "p50", "p99", "max"),
            *_ms(summary.tpot_s, "p50"),
        ]
        for summary in summaries
    ]


def _one_line(headings: Sequence[str]) -> list[str]:
    """The headings of the terminal's table, with units, for a page."""
    names = [heading.replace("\n", " ").strip() for heading in headings]
    return [f"{name} ms" if name.split()[0] in {"TTFT", "ITL", "TPOT"} else name for name in names]


def _facts(settings: BenchSettings) -> dict[str, str]:
    """What was run, for the report."""
    prompts = f"{settings.turns} turns a conversation, " if settings.dataset == "chat" else ""
    return {
        "server": f"{settings.url}, model {settings.model}",
        "load": f"{settings.dataset}, {prompts}{settings.input_tokens} tokens in, {settings.output_tokens} out",
        "seed": str(settings.seed),
        "version": f"{product_version()}, {commit()}",
    }


def _ms(distribution: Distribution, *names: str) -> list[str]:
    if not distribution.count:
        return ["-"] * len(names)
    values = [getattr(distribution, name) * 1e3 for name in names]
    return [f"{value:.1f}" if value < 1000 else f"{value:.0f}" for value in values]
