from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cli.metrics_reference import exported_metrics, metrics_page
from tandem.text.tokenizer import Tokenizer
from tests.support.engines_harness import routing, spec_of
from tests.support.fake_backend import FakeBackend, make_client
from tests.support.fake_openai import fake_openai
from tests.support.toy_tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def known(command: str) -> set[str]:
    return {name for metric in exported_metrics()[command].values() for name in metric.sample_names}


def shown(text: str) -> set[str]:
    """Names of the samples in what Prometheus reads."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_a_router_of_engines_exports_what_is_documented() -> None:
    with fake_openai() as fake:
        async with routing(spec_of(fake, "a")) as router:
            names = shown((await router.client.get("/metrics")).text)
    assert "tandem_engine_ready" in names
    assert names <= known("route")


async def test_a_router_of_engines_shows_of_their_load_what_engines_report() -> None:
    """It has no series for what only Tandem's own workers have: a 0 there would look like a measurement."""
    with fake_openai() as fake:
        fake.metrics = "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\nvllm:kv_cache_usage_perc 0.25\n"
        fake.metrics += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        async with routing(spec_of(fake, "a")) as router:
            await router.all_ready("a")
            families = text_string_to_metric_families((await router.client.get("/metrics")).text)
            samples = {one.name: one.value for family in families for one in family.samples if "worker" in one.labels}
    assert samples == {
        "tandem_worker_running": 2.0,
        "tandem_worker_waiting": 1.0,
        "tandem_worker_kv_tokens": 400.0,
        "tandem_worker_free_blocks": 75.0,
        "tandem_worker_blocks": 100.0,
    }
    own = ("tandem_worker_", "tandem_tier_", "tandem_fetch_", "tandem_link_", "tandem_dropped_")
    assert {name for name in known("route") if name.startswith(own)} == samples.keys()


async def test_the_frontend_exports_what_is_documented(tmp_path: Path) -> None:
    async with make_client(FakeBackend(Tokenizer(build_tokenizer(tmp_path)))) as client:
        await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
        names = shown((await client.get("/metrics")).text)
    assert "tandem_router_itl_seconds_bucket" in names
    assert names <= known("serve")


def test_no_definition_is_left_out() -> None:
    """Every name that the code passes to a metric, as far as it is spelled out there."""
    stems = {name.removesuffix("_total") for metrics in exported_metrics().values() for name in metrics}
    found = set()
    for folder in ("router", "cluster", "worker", "frontend", "runtime", "kv_transfer", "scheduling"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
                    found |= {text for text in texts if str(text).startswith("tandem_")}
    assert len(found) > 30
    assert found <= stems


@pytest.mark.parametrize("command", ["serve", "route"])
def test_names_and_texts_are_as_prometheus_expects(command: str) -> None:
    for metric in exported_metrics()[command].values():
        assert re.fullmatch(r"tandem(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|us|minutes|kb|mb)(_|$)", metric.name), "base units only"
        assert len(metric.text.split()) >= 4, f"{metric.name}: {metric.text}"
        assert not metric.text.endswith("."), metric.name
        assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels), metric


def test_labels_are_documented() -> None:
    metrics = exported_metrics()["serve"]
    assert metrics["tandem_router_requests_total"].labels == ("endpoint", "status")
    assert metrics["tandem_link_bytes_total"].labels == ("worker", "peer")
    assert metrics["tandem_link_bytes_total"].unit == "bytes"
    assert "`tandem_api_key_file_damaged` | gauge" in metrics_page()
