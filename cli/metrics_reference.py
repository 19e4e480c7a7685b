"""Generates docs/metrics.md from the objects that define the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry

from tandem.cluster.engine_frontend import show_num_processes
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.tls import TlsMetrics
from tandem.frontend.http.vllm_names import VLLM_SOURCES
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.metrics import KeyCollector
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.engines.metrics import EngineCollector
from tandem.router.reservation import ReservationContext
from tandem.router.workers.metrics import (
    CacheSizingCollector,
    LoadCollector,
    MoveCollector,
    PinCollector,
    WorkerCollector,
)
from tandem.runtime.tracing.export import SpanExport
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.workers.registry import Registry

_UNITS = ("seconds", "bytes", "tokens", "blocks", "ratio")
_INTRODUCTION = """# Metrics

Generated from the code by `make generated`. `GET /metrics` has them in Prometheus' text format, on the HTTP port of
`tandem serve` and `tandem route`. With `--router-processes` it sums those of all processes. Workers have no port of
their own: what they report is in the router's metrics, under the label `worker`. Samples that name a tenant need an
operator's key if the server has API keys.

Counters only rise, and restart at zero with the server. Those with the label `worker` restart when that worker is
replaced, and have no samples while it is away; `rate` and `increase` of Prometheus allow for that. `serve` is
`tandem serve` with Tandem's own engine; with `--engine` it has the metrics of `route`. A scraper whose `Accept` header
prefers `application/openmetrics-text` gets OpenMetrics 1.0, without `_created` samples.

| Metric | Type | Labels | Unit | Of | Meaning |
|---|---|---|---|---|---|"""
_VLLM_NAMES = """
## Names of vLLM

With `--vllm-metric-names`, values that vLLM has too are exported under its names as well. Dashboards, scaling rules,
load tools and the Gateway API's inference extension then read a Tandem server as if it were one vLLM server. The label
`model_name` is the name of the served model, and empty where `tandem route` serves several; `engine` is `0`. The bounds
of the buckets are Tandem's. A name whose source a server does not have (table above) is not there.

| Metric | Is |
|---|---|"""
_VLLM_REMARKS = {
    "vllm:num_requests_running": ", of all workers",
    "vllm:num_requests_waiting": ", of all workers and tenants",
    "vllm:num_preemptions": "; `engine` is the worker",
    "vllm:request_success": "; `finished_reason` is `stop` or `length`",
    "vllm:kv_cache_usage_perc": ": the used share of the blocks of that role which is fuller; 1 = all",
    "vllm:gpu_cache_usage_perc": ": the same, under the name before vLLM 0.11",
    "vllm:time_per_output_token_seconds": ": the same, under the name before vLLM 0.11",
}
# Metrics of parts that a server has only with these flags.
_CONDITIONS = {
    "tandem_tls": "`--tls-cert`",
    "tandem_decider": "`--tracing` and `--router-processes`",
    "spans": "`--tracing`",
}


_OWN_ANSWERS = {"tandem_router_finished"}  # has no samples where answers are forwarded, as not each event is read there


class MetricDefinition(NamedTuple):
    """A metric as it is exported."""

    name: str  # name of its samples; those of a histogram add endings
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names that a query may use."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)

    @property
    def unit(self) -> str:
        """The unit in its name; "" = a number of things."""
        words = self.name.removesuffix("_total").split("_")
        return next((unit for unit in _UNITS if unit in words), "")

    @property
    def condition(self) -> str:
        """The flags without which a server does not have it; "" = none."""
        return next((flags for part, flags in _CONDITIONS.items() if part in self.name), "")


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    return "\n".join([_INTRODUCTION, *_rows(), _VLLM_NAMES, *_vllm_rows()]) + "\n"


def exported_metrics() -> dict[str, dict[str, MetricDefinition]]:
    """By command, every metric by its name."""
    return {command: {one.name: one for one in _definitions(parts)} for command, parts in _parts().items()}


def _rows() -> Iterator[str]:
    """A row for each metric of any command, by name: those of one part have the same beginning."""
    commands = exported_metrics()
    everything = {name: one for metrics in commands.values() for name, one in metrics.items()}
    for name, one in sorted(everything.items()):
        labels = ", ".join(f"`{label}`" for label in one.labels)
        of = ", ".join(f"`{command}`" for command, known in commands.items() if name in known)
        of += f" with {one.condition}" if one.condition else ""
        yield f"| `{name}` | {one.kind} | {labels} | {one.unit} | {of} | {one.text}. |"


def _vllm_rows() -> Iterator[str]:
    kinds = {name.removesuffix("_total"): one.kind for name, one in exported_metrics()["serve"].items()}
    for name, sources in VLLM_SOURCES.items():
        ends = ["_total" if kinds[source] == "counter" else "" for source in sources]
        named = " and ".join(f"`{source}{end}`" for source, end in zip(sources, ends, strict=True))
        yield f"| `{name}{ends[0]}` | {named}{_VLLM_REMARKS.get(name, '')} |"


def _parts() -> dict[str, list[Any]]:
    """By command, the collectors of a server without workers, engines and keys: only definitions are read."""
    registry = Registry()
    pins = SimpleNamespace(num_pins=0, num_blocks=0, max_blocks=0, num_refused={})
    shared: list[Any] = [
        LoadCollector(registry),
        AdmissionCollector(cast(Any, SimpleNamespace(stats={}, queued=dict, shadow=Shadow()))),
        MoveCollector(ReservationContext(now=time.monotonic)),
        KeyCollector(ApiKeys()),
        *_registered(FrontendMetrics),
        *_registered(TlsMetrics),
        *_registered(SpanExport("router").register),
        *_registered(SpanExport("decider").register),
    ]
    serve = [
        WorkerCollector(registry),
        CacheSizingCollector(CacheSizing(registry, CostModel())),
        PinCollector(cast(Any, SimpleNamespace(summary=lambda: pins)), registry),
    ]
    fleet = SimpleNamespace(engines=[], clock=time.monotonic)
    route = [
        EngineCollector(cast(Any, fleet), lambda: 0),
        *_registered(lambda found: show_num_processes(found, lambda: 1)),
    ]
    forwarded = [one for one in shared if getattr(one, "_name", "") not in _OWN_ANSWERS]
    return {"serve": [*shared, *serve], "route": [*forwarded, *route]}


def _registered(register: Any) -> list[Any]:
    """The metrics that `register` adds to a registry."""
    found: list[Any] = []
    register(cast(CollectorRegistry, SimpleNamespace(register=found.append)))
    return found


def _definitions(parts: list[Any]) -> Iterator[MetricDefinition]:
    for part in parts:
        # A metric object knows its labels, but the families that it collects do not. Families of collectors do.
        own = getattr(part, "_labelnames", None)
        for family in part.collect():
            labels = getattr(family, "_labelnames", ()) if own is None else own
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield MetricDefinition(name, family.type, tuple(labels), family.documentation)
