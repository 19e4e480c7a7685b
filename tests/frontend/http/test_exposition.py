"""Metrics as text: both formats, for whichever the scraper asks, and vLLM's names for the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as library_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from tandem.cli.metrics_reference import exported_metrics
from tandem.frontend.http.exposition import CLASSIC, OPENMETRICS, as_openmetrics, exposition, prefers_openmetrics
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.vllm_names import VLLM_SOURCES
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import Role, WorkerLoad
from tandem.router.admission_metrics import AdmissionCollector
from tandem.router.workers.metrics import LoadCollector, WorkerCollector
from tandem.scheduling.admission.stats import TenantStats
from tandem.scheduling.admission.work import Work
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.workers.registry import Registry
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.builders import add_ready, make_card
from tests.support.engines_harness import completion, routing, routing_by_decider, spec_of
from tests.support.fake_backend import FakeBackend, make_client
from tests.support.fake_openai import MODEL, fake_openai
from tests.support.keys import api_keys_of

PLAIN, WITH_NAMES = RouterConfig(), RouterConfig(vllm_metric_names=True)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2_CLASSIC_FIRST = "text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.1"

Value = Callable[..., float | None]


def busy_workers() -> CollectorRegistry:
    """The metrics of two decode workers and one prefill worker, and of the queue of two tenants."""
    registry, metrics = Registry(), CollectorRegistry()
    for name, role, num_free in (("p", Role.PREFILL, 1000), ("d0", Role.DECODE, 300), ("d1", Role.DECODE, 900)):
        add_ready(registry, make_card(name, role, num_blocks=1000))
        load = WorkerLoad(num_waiting=2, num_running=3, num_free_blocks=num_free, num_preemptions=4)
        registry.note_load(name, load, 1.0)
    queued = {"a": Work(5, 0, 0.0), "b": Work(6, 0, 0.0)}
    stats = {name: TenantStats() for name in queued}
    metrics.register(LoadCollector(registry))
    metrics.register(WorkerCollector(registry))
    metrics.register(AdmissionCollector(SimpleNamespace(stats=stats, queued=lambda: queued, shadow=Shadow())))
    return metrics


def busy_server() -> CollectorRegistry:
    metrics = busy_workers()
    frontend = FrontendMetrics(metrics)
    frontend.prompt_tokens.inc(100)
    frontend.cached_tokens.inc(40)
    frontend.generation_tokens.inc(30)
    for seconds in (0.02, 0.3):
        frontend.ttft_s.observe(seconds)
        frontend.duration_s.observe(2 * seconds)
    frontend.itl_s.observe_all([0.01] * 7)
    frontend.finished.labels("stop").inc(2)
    frontend.finished.labels("length").inc()
    frontend.requests.labels("/v1/completions", "200").inc(3)
    frontend.refused_keys.labels('a"b\\c\nd', "unknown").inc()  # label values are escaped alike in both formats
    return metrics


def samples_of(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples}


def values_of(text: str, parse: Callable[[str], Iterable[Metric]] = parse_classic) -> Value:
    samples = samples_of(parse(text))
    return lambda name, **labels: samples.get((name, frozenset(labels.items())))


@pytest.mark.parametrize("config", [PLAIN, WITH_NAMES])
def test_openmetrics_is_what_the_library_would_have_written(config: RouterConfig) -> None:
    metrics = busy_server()
    families = list(metrics.collect())
    text = exposition(metrics.collect(), config, ['m"\\\n# TYPE n_total counter'])
    if not config.vllm_metric_names:
        assert as_openmetrics(text) == library_openmetrics(SimpleNamespace(collect=lambda: families))
        assert b"vllm:" not in text
    parsed = samples_of(parse_openmetrics(as_openmetrics(text).decode()))
    assert parsed == samples_of(parse_classic(text.decode()))
    assert len(parsed) > 100
    assert not [name for name, _ in parsed if name.endswith("_created")]


@pytest.mark.parametrize("command", ["serve", "route"])
def test_every_metric_fits_openmetrics(command: str) -> None:
    """What `as_openmetrics` relies on: a counter is told by its name, and no text has a character to escape."""
    for metric in exported_metrics()[command].values():
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {'"', "\\", "\n"} & set(metric.text), metric.name


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0", True),
        ("Application/OpenMetrics-Text;Q=0.3", True),
        (PROMETHEUS_3, True),
        (PROMETHEUS_2_CLASSIC_FIRST, False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.000, text/plain;q=0", False),
        ("application/openmetrics-text;q=abc", False),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text;q=1e9, text/plain", False),
        (";;;,,,=,q=", False),
        ("," * 20_000, False),
    ],
)
def test_the_format_is_the_one_that_is_asked_for(accept: str, expected: bool) -> None:
    assert prefers_openmetrics(accept) is expected


async def test_a_server_answers_in_the_format_that_its_scraper_prefers(tokenizer: Tokenizer) -> None:
    async with make_client(FakeBackend(tokenizer)) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
        classic = await client.get("/metrics", headers={"accept": PROMETHEUS_2_CLASSIC_FIRST})
        other = await client.get("/metrics", headers={"accept": PROMETHEUS_3})
    assert (classic.headers["content-type"], other.headers["content-type"]) == (CLASSIC, OPENMETRICS)
    assert CLASSIC == "text/plain; version=0.0.4; charset=utf-8", "the only version that every scraper reads"
    for text, parse in ((classic.text, parse_classic), (other.text, parse_openmetrics)):
        assert values_of(text, parse)("tandem_router_finished_total", reason="length") == 1
        assert "_created" not in text


async def test_a_tenants_key_gets_openmetrics_too(tokenizer: Tokenizer) -> None:
    keys = api_keys_of({"sk-a": "a"})
    app = create_app(FakeBackend(tokenizer), tokenizer, RouterConfig(), busy_workers(), api_keys=keys)
    async with app_client(app) as client:
        headers = {"authorization": "Bearer sk-a", "accept": PROMETHEUS_3}
        text = (await client.get("/metrics", headers=headers)).text
    value = values_of(text, parse_openmetrics)
    assert value("tandem_worker_running", worker="p", role="prefill") == 3
    assert value("tandem_router_queue_requests", tenant="a") is None


def test_vllms_names_have_the_same_values() -> None:
    value = values_of(exposition(busy_server().collect(), WITH_NAMES, ["m"]).decode())
    of = {"model_name": "m", "engine": "0"}
    assert value("vllm:num_requests_running", **of) == 9
    assert value("vllm:num_requests_waiting", **of) == 6 + 11, "on workers, and in the router for both tenants"
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert value(f"vllm:{name}", **of) == pytest.approx(0.4), "of the decode workers: the prefill worker's is empty"
    assert value("vllm:prompt_tokens_total", **of) == value("vllm:prefix_cache_queries_total", **of) == 100
    assert (value("vllm:prefix_cache_hits_total", **of), value("vllm:generation_tokens_total", **of)) == (40, 30)
    for worker in ("p", "d0", "d1"):
        assert value("vllm:num_preemptions_total", model_name="m", engine=worker) == 4
    assert value("vllm:request_success_total", finished_reason="stop", **of) == 2
    assert value("vllm:request_success_total", finished_reason="length", **of) == 1
    assert value("vllm:time_to_first_token_seconds_count", **of) == 2
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.025", **of) == 1
    assert value("vllm:time_to_first_token_seconds_sum", **of) == pytest.approx(0.32)
    for name in ("inter_token_latency", "time_per_output_token"):
        assert value(f"vllm:{name}_seconds_bucket", le="+Inf", **of) == 7
    assert value("vllm:e2e_request_latency_seconds_sum", **of) == pytest.approx(0.64)


def test_their_types_are_those_of_vllm() -> None:
    families = list(parse_openmetrics(as_openmetrics(exposition(busy_server().collect(), WITH_NAMES, ["m"])).decode()))
    kinds = {one.name: one.type for one in families if one.name.startswith("vllm:")}
    assert kinds.keys() == VLLM_SOURCES.keys()
    counters = {"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"}
    for name, kind in kinds.items():
        plain = name.removeprefix("vllm:")
        is_gauge = plain.startswith("num_requests_") or plain.endswith("_perc")
        expected = "gauge" if is_gauge else "counter" if plain in counters | {"request_success"} else "histogram"
        assert kind == expected, name


@pytest.mark.parametrize("models", [[], ["m", "n"]])
def test_sums_over_several_models_name_no_model(models: list[str]) -> None:
    value = values_of(exposition(busy_server().collect(), WITH_NAMES, models).decode())
    assert value("vllm:num_requests_running", model_name="", engine="0") == 9


def test_a_name_without_its_source_is_not_there() -> None:
    """Without workers there is no KV to use, and a frontend process does not know the workers."""
    metrics = CollectorRegistry()
    metrics.register(LoadCollector(Registry()))
    metrics.register(AdmissionCollector(SimpleNamespace(stats={}, queued=dict, shadow=Shadow())))
    text = exposition(metrics.collect(), WITH_NAMES, ["m"]).decode()
    assert {family.name for family in parse_classic(text) if family.name.startswith("vllm:")} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    }
    frontend = CollectorRegistry()
    FrontendMetrics(frontend)
    assert b"num_requests" not in exposition(frontend.collect(), WITH_NAMES, ["m"])


async def test_a_router_of_engines_has_them_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": RouterConfig(vllm_metric_names=True, request_timeout_s=20.0)}
    with fake_openai() as fake:
        fake.metrics = "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\nvllm:kv_cache_usage_perc 0.25\n"
        async with routing(spec_of(fake, "a"), **options) as router:
            await router.client.post("/v1/completions", json=completion())
            one = await router.client.get("/metrics", headers={"accept": PROMETHEUS_3})
        async with routing_by_decider(tmp_path, spec_of(fake, "a"), **options) as decider:
            frontend = await decider.frontend("frontend")
            await frontend.client.post("/v1/completions", json=completion())
            joined = await frontend.client.get("/metrics", headers={"accept": PROMETHEUS_3})
    for answer in (one, joined):
        value = values_of(answer.text, parse_openmetrics)
        of = {"model_name": MODEL, "engine": "0"}
        assert value("vllm:num_requests_running", **of) == 2
        assert value("vllm:kv_cache_usage_perc", **of) == pytest.approx(0.25)
        assert value("vllm:e2e_request_latency_seconds_count", **of) == 1
        assert "finished_reason" not in answer.text
