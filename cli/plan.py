"""`tandem plan`: before buying, which memory, how many GPUs and which shape a model and a load need."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from tandem.cli.http_client import error_message, server_client
from tandem.cli.options import ApiKey, Report, check_writable, printable, progress_bars, write_report, write_result
from tandem.cli.replay import print_table, read_requests
from tandem.cluster.model_store import resolve_model, served_name
from tandem.loadtest.html_report import check_plots, html_page
from tandem.loadtest.stats import without_nan
from tandem.loadtest.traces import TraceRequest
from tandem.protocol.errors import ConfigError
from tandem.scheduling.planning.advice import size_text
from tandem.scheduling.planning.geometry import Geometry, geometry_of
from tandem.scheduling.planning.hardware import GPUS, gpu_named
from tandem.scheduling.planning.learned import calibrated, learned_from, live_worker
from tandem.scheduling.planning.roofline import PlannedWorker, plan_worker
from tandem.simulator.arrivals import chats, spread
from tandem.simulator.measures import Slo
from tandem.simulator.plan import Memory, Prices, ShapePlan, contexts, cost_of, memory_for, needed_text, plan_shapes
from tandem.simulator.plan_report import plan_plots
from tandem.simulator.shapes import ATTAINMENT, ShapeSearch, machine_of

_MAX_CURVE_REQUESTS = 20_000  # of a trace, for the curve of hits
_READ_TIMEOUT_S = 10.0
_MAX_POOLS_BYTES = 64 << 20
_SHORT = 20  # multiples of the SLO's TTFT: a capacity is too high by about the inverse
_SHOWN_CONTEXTS = (1 << 10, 1 << 13, 1 << 16, 1 << 17, 1 << 20)

Engine = Literal["tandem", "vllm", "sglang"]
KvCacheDtype = Literal["auto", "fp8"]
Model = Annotated[str, typer.Option(help="Built-in name, hub id, or a folder with a config.json; needs no weights.")]
GpuName = Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}. Empty with --from = the server's own.")]
Trace = Annotated[
    Path | None, typer.Option(help="Trace of block hashes, .jsonl or .jsonl.gz; without, made-up conversations.")
]
SloTtft = Annotated[float, typer.Option(help="SLO: most seconds to the first token.")]
SloItl = Annotated[float, typer.Option(help="SLO: most seconds between tokens, as a request's mean.")]
Rate = Annotated[float, typer.Option(help="The load in requests per second; 0 = the trace's own pace.")]
Price = Annotated[float | None, typer.Option(help="Dollars per GPU and hour.", show_default=False)]
NumGpus = Annotated[int, typer.Option(min=1, max=512, help="GPUs whose shapes are compared, such as one node's.")]
NumRanks = Annotated[int, typer.Option(min=0, max=64, help="GPUs of each worker; 0 = as few as hold the model.")]
EngineName = Annotated[Engine, typer.Option(help="Whose KV layout: Tandem's own pool keeps every layer in full.")]
KvDtype = Annotated[KvCacheDtype, typer.Option(help="Type of KV in the workers' pools; auto = the model's.")]
HostCache = Annotated[float, typer.Option(min=0, max=1e6, help="GB of host memory for KV in each simulated worker.")]
NumRequests = Annotated[int, typer.Option(min=50, max=20_000, help="Requests of the trace that are simulated.")]
FromUrl = Annotated[str, typer.Option("--from", help="A running server: its learned costs calibrate the plan.")]
FromModel = Annotated[str, typer.Option(help="The model that server serves, if it is another one: as --model.")]
Json = Annotated[Path | None, typer.Option("--json", help="File for the result as JSON.", show_default=False)]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]


class PlanError(ConfigError):
    """The server of --from cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The requests to plan for, in the order of their arrival."""

    recorded: Sequence[TraceRequest]  # for the curve of hits
    simulated: Sequence[TraceRequest]  # their first ones, from second 0 on
    text: str

    @property
    def mean_tokens(self) -> float:
        """Mean length of a simulated prompt."""
        return sum(one.num_prompt_tokens for one in self.simulated) / len(self.simulated)

    @property
    def mean_output_tokens(self) -> float:
        """Mean length of a simulated answer."""
        return sum(one.num_output_tokens for one in self.simulated) / len(self.simulated)


def plan(
    model: Model,
    gpu: GpuName = "",
    trace: Trace = None,
    slo_ttft: SloTtft = 2.0,
    slo_itl: SloItl = 0.05,
    rate: Rate = 0.0,
    price: Price = None,
    gpus: NumGpus = 8,
    tensor_parallel_size: NumRanks = 0,
    engine: EngineName = "vllm",
    kv_cache_dtype: KvDtype = "auto",
    host_cache_gb: HostCache = 0.0,
    requests: NumRequests = 600,
    from_url: FromUrl = "",
    from_model: FromModel = "",
    report: Report = None,
    json_file: Json = None,
    seed: Seed = 0,
    api_key: ApiKey = "",
) -> int:
    """Plan memory, GPUs and shape for a model and a load, before buying.

    KV and parameters come from the model's config.json, times from data sheets at efficiencies that were measured, or
    with --from from what a running server has learned. Shapes are simulated with the product's own placement. Exit code
    1 if nothing meets the SLO.

    [bold]Examples[/bold]

    [cyan]tandem plan --model ./llama-70b --gpu h200 --trace trace.jsonl.gz --price 3.5 --report plan.html[/cyan]

    [cyan]tandem plan --model org/name --from http://127.0.0.1:8000 --slo-ttft 1[/cyan]
    """
    _check_numbers(slo_ttft=slo_ttft, slo_itl=slo_itl, rate=rate or 1.0, price=1.0 if price is None else price)
    check_writable(report, json_file)
    if report is not None:
        check_plots()
    worker, hardware = _worker(model, gpu, tensor_parallel_size, engine, kv_cache_dtype, from_url, from_model, api_key)
    load = _load(trace, requests, seed)
    host_tokens = int(host_cache_gb * 1e9 / worker.kv_bytes(load.mean_tokens) * load.mean_tokens)
    answer = _find(worker, hardware, load, Slo(slo_ttft, slo_itl), rate, gpus, host_tokens, seed)
    prices = Prices(dollars_per_hour=price or 0.0, watts=gpu_named(gpu).watts if gpu else 0.0)
    memory = memory_for(worker, answer.num_workers, load.recorded, answer.rate, prices)
    output_tokens = load.mean_output_tokens
    facts = {"model": f"{served_name(model)}: {_model_text(worker)}"} | _facts(worker, hardware, load, answer, memory)
    rows = _shape_rows(answer, worker, output_tokens, prices)
    _print(facts, worker, rows, answer.verdict)
    if json_file is not None:
        write_result(json_file, _content(facts, worker, memory, answer, output_tokens, prices))
    if report is not None:
        plots = plan_plots(worker, memory, answer, output_tokens, prices)
        title, facts = f"Plan for {served_name(model)}", facts | {"verdict": answer.verdict}
        write_report(report, html_page(title, facts, _HEADINGS, rows, plots, bold_row=0))
    return 0 if max(one.rate for one in answer.served) else 1


def _find(
    worker: PlannedWorker, hardware: str, load: _Load, slo: Slo, rate: float, gpus: int, host_tokens: int, seed: int
) -> ShapePlan:
    """Simulate the shapes of so many GPUs, with a bar of the runs."""
    with progress_bars() as progress:
        task = progress.add_task("simulated runs", total=None)
        search = ShapeSearch(
            requests=load.simulated,
            machine=machine_of(worker, hardware, load.mean_tokens),
            slo=slo,
            host_cache_tokens=host_tokens,
            seed=seed,
            on_run=lambda: progress.advance(task),
        )
        return plan_shapes(search, worker, max(gpus // worker.num_gpus, 2), rate or search.pace)


def _check_numbers(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1e9:  # nan is not
            hint = "; leave it out to plan without dollars" if name == "price" else ""
            raise ConfigError(f"{name}={value:g} must be greater than 0 and finite{hint}")


def read_geometry(model: str, kv_cache_dtype: KvCacheDtype = "auto") -> Geometry:
    """The sizes of a model, from its folder's config.json. Raises `ConfigError`."""
    path = Path(os.path.expanduser(model))
    folder = path.resolve() if path.is_dir() else resolve_model(model, needs_weights=False)
    try:
        return geometry_of(_config_fields(folder, model), model, kv_element_bytes=1 if kv_cache_dtype == "fp8" else 0)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"model={model!r}: a field of its config.json cannot be read ({exc!r}); repair the file"
        ) from exc


def _config_fields(folder: Path, name: str) -> dict[str, Any]:
    """Fields under transformers' names, with its defaults; as they are in the file for a type it does not know."""
    from tandem.engine.architecture import load_config, text_config  # transformers takes a second

    try:
        config = load_config(folder)
    except ConfigError as exc:
        return _raw_fields(folder, name, exc)
    text = text_config(config)
    fields: dict[str, Any] = text.to_dict()
    aliases = {alias: fields[field] for alias, field in text.attribute_map.items() if field in fields}
    whole = config.to_dict()
    outer = {name: whole[name] for name in ("quantization_config", "dtype") if whole.get(name) is not None}
    return aliases | fields | outer


def _raw_fields(folder: Path, name: str, error: ConfigError) -> dict[str, Any]:
    try:
        fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        raise error from None
    if not isinstance(fields, dict):
        raise ConfigError(f"model={name!r}: its config.json is not a JSON object; repair the file") from error
    text = fields.get("text_config")
    return fields | text if isinstance(text, dict) else fields


def _worker(
    model: str, gpu: str, ranks: int, engine: Engine, kv: KvCacheDtype, url: str, from_model: str, api_key: str
) -> tuple[PlannedWorker, str]:
    """The worker to plan with, and where its figures come from."""
    geometry, is_own_pool = read_geometry(model, kv), engine == "tandem"
    if not url:
        if not gpu:
            raise ConfigError(f"gpu='' names no accelerator; give --gpu, one of {', '.join(GPUS)}, or --from URL")
        planned = plan_worker(geometry, gpu_named(gpu), ranks, is_own_pool=is_own_pool)
        return planned, f"{planned.num_gpus} x {gpu}, by its data sheet"
    learned = learned_from(_pools(url, api_key), url)
    expected = served_name(from_model or model)
    if learned.model and learned.model not in (expected, os.path.basename(expected)):
        raise ConfigError(
            f"from={url} serves {learned.model[:80]!r}, not {expected!r}; name that model by --from-model"
        )
    if not gpu and not from_model and kv == "auto":
        return live_worker(learned, geometry, url), f"{learned.kind}, learned from {learned.num_steps:,} steps"
    if not learned.gpu_name:
        raise ConfigError(
            f"from={url} runs on {learned.kind[:60]!r}, whose data sheet is not known, so its costs cannot be scaled; "
            "leave --gpu, --from-model and --kv-cache-dtype out to plan for that server"
        )
    live_geometry = read_geometry(from_model or model)  # its KV counts as the model's type
    live = plan_worker(live_geometry, GPUS[learned.gpu_name], learned.num_gpus, is_own_pool=is_own_pool)
    gpu = gpu or learned.gpu_name
    planned = plan_worker(geometry, gpu_named(gpu), ranks, is_own_pool=is_own_pool)
    text = f"{planned.num_gpus} x {gpu}, scaled from {learned.kind} and its {learned.num_steps:,} steps"
    return calibrated(planned, live, learned), text


def _pools(url: str, api_key: str) -> bytes:
    content, late_s = bytearray(), time.monotonic() + _READ_TIMEOUT_S
    with (
        server_client(url, api_key, read_timeout_s=_READ_TIMEOUT_S, lost_error=PlanError) as client,
        client.stream("GET", "/v1/pools") as response,
    ):
        for piece in response.iter_bytes():
            content += piece
            if len(content) > _MAX_POOLS_BYTES or time.monotonic() > late_s:
                raise PlanError(
                    f"from={url} sends its /v1/pools without end ({len(content):,} bytes within "
                    f"{_READ_TIMEOUT_S:g} s); name a Tandem server"
                )
    if response.status_code != 200:
        raise PlanError(f"from={url} has no /v1/pools to read: {error_message(response.status_code, bytes(content))}")
    return bytes(content)


def _load(trace: Path | None, num_simulated: int, seed: int) -> _Load:
    rng = random.Random(seed)
    if trace is None:
        recorded, name = chats(max(num_simulated, 2000), rng), "made-up conversations (no --trace)"
    else:
        recorded, name = read_requests(trace, _MAX_CURVE_REQUESTS), trace.name
    recorded = sorted(recorded, key=lambda request: request.arrival_s)
    timed = spread(recorded[:num_simulated], rng)
    simulated = [replace(one, arrival_s=one.arrival_s - timed[0].arrival_s) for one in timed]
    text = f"{name}: {len(recorded):,} requests for the hits, the first {len(simulated):,} simulated"
    return _Load(recorded=recorded, simulated=simulated, text=text)


def _model_text(worker: PlannedWorker) -> str:
    geometry, shown = worker.geometry, [round(worker.kv_bytes(1 << n) / (1 << n)) for n in (10, 20)]
    own = f"; {geometry.pool_token_bytes:,} B in Tandem's own pool" if geometry.pool_token_bytes > shown[0] else ""
    kv = f"{shown[0]:,} B a token" if shown[0] == shown[1] else f"{shown[0]:,} B a token of 1k, {shown[1]:,} B of 1M"
    weights = size_text(geometry.checkpoint_bytes)
    return f"{geometry.num_params / 1e9:.2f} B parameters, {weights} of weights; KV {kv}{own}"


def _facts(worker: PlannedWorker, hardware: str, load: _Load, answer: ShapePlan, memory: Memory) -> dict[str, str]:
    """The answer as text, by name."""
    slo, host_tokens, gap = answer.slo, answer.host_cache_tokens, {k: size_text(v) for k, v in memory.gap.items()}
    host = f"; {size_text(worker.kv_bytes(host_tokens))} of host memory a worker" if host_tokens else ""
    needed = [needed_text(name, one) for name, one in answer.needed.items()]
    points = {name: _from_text(worker.break_even(name)) for name in worker.tiers}
    return {
        "worker": f"{hardware}; pool {size_text(worker.pool_bytes)}, {worker.num_contexts(1 << 17):,} contexts of 128k",
        "load": f"{load.text}; {answer.rate:.3g} requests/s{host}",
        "SLO": f"TTFT {slo.ttft_s:g} s and mean ITL {slo.itl_s * 1e3:g} ms for {ATTAINMENT:.0%} of the requests",
        "loading beats computing": "; ".join(f"{name} {point}" for name, point in points.items()),
        "memory": "; ".join(one["text"] for one in memory.advice),
        "gap": f"{gap['useful_bytes']} of KV are worth keeping, {gap['pool_bytes']} fit into the pools; the other hits "
        f"need {gap['restore_bytes_per_s']}/s, host memory gives {gap['host_bytes_per_s']}/s",
        "workers for the load": "; ".join(needed) or "none are enough",
        **_caution(load, answer),
    }


def _caution(load: _Load, answer: ShapePlan) -> dict[str, str]:
    """A queue grows slowly: over a short time a pace that is too high meets the SLO."""
    shortest_s = len(load.simulated) / max(*(one.rate for one in answer.served), 1e-9)
    if shortest_s > _SHORT * answer.slo.ttft_s:
        return {}
    return {"caution": f"at the highest pace the simulated requests last {shortest_s:.3g} s; raise --requests"}


def _from_text(point: int | None) -> str:
    if point is None:
        return "never"
    return "always" if point <= 1024 else f"from {point // 1024}k tokens"


_HEADINGS = ["shape", "requests/s in SLO", "tokens/s per GPU", "in SLO % at the load", "$ per M tokens", "J per token"]


def _shape_rows(answer: ShapePlan, worker: PlannedWorker, output_tokens: float, prices: Prices) -> list[list[str]]:
    rows = []
    for idx, served in enumerate(answer.served):
        cost = cost_of(served, worker, output_tokens, prices)
        at_load = f"{100 * answer.at_load[idx].attainment:.1f}" if answer.at_load else "-"
        numbers = [served.rate, cost["tokens_per_s_gpu"], cost["dollars_per_million"], cost["joules_per_token"]]
        rate, speed, dollars, joules = ("-" if math.isnan(one) else f"{one:,.2f}" for one in numbers)
        rows.append([str(served.shape), rate, speed, at_load, dollars, joules])
    return rows


def _print(facts: dict[str, str], worker: PlannedWorker, rows: Sequence[Sequence[str]], verdict: str) -> None:
    console = Console(highlight=False)
    for name, text in facts.items():
        console.print(f"[dim]{name}:[/] {escape(printable(text))}", soft_wrap=True)
    console.print()
    names = ["prefill", "transfer", *worker.tiers]
    shown = [row for row in contexts(worker) if row["num_tokens"] in _SHOWN_CONTEXTS]
    print_table(
        ["context", "KV", *(f"{name} s" for name in names)],
        [
            [
                f"{row['num_tokens'] / 1024:.0f}k",
                size_text(row["kv_bytes"]),
                *(f"{row[f'{name}_s']:.3g}" for name in names),
            ]
            for row in shown
        ],
        console,
    )
    print_table(_HEADINGS, rows, console)
    console.print(f"[bold]{verdict}[/]", soft_wrap=True)


def _content(
    facts: dict[str, str],
    worker: PlannedWorker,
    memory: Memory,
    answer: ShapePlan,
    output_tokens: float,
    prices: Prices,
) -> dict[str, Any]:
    """The plan as JSON."""
    served = [
        {
            "shape": str(one.shape),
            "num_prefill": one.shape.num_prefill,
            "num_decode": one.shape.num_decode,
            "requests_per_s": one.rate,
            **cost_of(one, worker, output_tokens, prices),
            "summary": one.summary.as_dict() if one.summary else None,
        }
        for one in answer.served
    ]
    content = {
        "facts": facts,
        "verdict": answer.verdict,
        "worker": {"num_gpus": worker.num_gpus, "pool_bytes": worker.pool_bytes, "costs": worker.costs._asdict()},
        "geometry": {
            "num_params": worker.geometry.num_params,
            "checkpoint_bytes": worker.geometry.checkpoint_bytes,
            "pool_token_bytes": worker.geometry.pool_token_bytes,
        },
        "contexts": contexts(worker),
        "break_even_tokens": {name: worker.break_even(name) for name in worker.tiers},
        "break_even_bytes_per_s": worker.break_even_rate(1 << 17),
        "memory": asdict(memory),
        "rate": answer.rate,
        "shapes": served,
        "needed": {
            name: one and {"shape": str(one.shape), "attainment": one.attainment} for name, one in answer.needed.items()
        },
    }
    return dict(without_nan(content))
