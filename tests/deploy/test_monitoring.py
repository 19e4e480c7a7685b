"""Dashboard and alerts of the chart: what they query is exported, and each alert has its entry in the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tandem.cli.metrics_reference import exported_metrics
from tests.support.chart import find, refusal, render

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "helm" / "tandem" / "monitoring"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
GROUPS: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
ROWS = [one for one in DASHBOARD if one["type"] == "row"]
PANELS = [panel for one in DASHBOARD for panel in (one["panels"] if one["type"] == "row" else [one])]
SERVERS = {
    frozenset({"serve", "route"}): "every server",
    frozenset({"serve"}): "tandem serve with its own engine",
    frozenset({"route"}): "tandem route, and tandem serve with --engine",
}
PROMTOOL = shutil.which("promtool")
ENABLED = {
    "monitoring": {
        "dashboard": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://wiki.example/tandem"},
    }
}


def queries() -> list[str]:
    shown = [target["expr"].replace("$__rate_interval", "5m") for panel in PANELS for target in panel["targets"]]
    return [rule["expr"] for rule in RULES] + shown


def servers_with(query: str) -> set[str]:
    """The servers that have each metric of a query, in words."""
    by_command = exported_metrics()
    found = set()
    for selector in selectors(promql_parser.parse(query.replace("$__rate_interval", "5m"))):
        owners = {
            command: metric
            for command, metrics in by_command.items()
            for metric in metrics.values()
            if selector.name in metric.sample_names
        }
        condition = next(iter(owners.values())).condition.replace("`", "")
        found.add(SERVERS[frozenset(owners)] + (f" with {condition}" if condition else ""))
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "args", "vs", "selector"):
        inner = getattr(node, name, None)
        for child in inner if isinstance(inner, list) else [inner]:
            if child is not None and type(child).__module__.startswith("promql_parser"):
                yield from selectors(child)


def known() -> dict[str, tuple[str, ...]]:
    """Labels by the name of a sample."""
    metrics = [metric for command in exported_metrics().values() for metric in command.values()]
    return {name: metric.labels for metric in metrics for name in metric.sample_names}


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_metrics_and_labels_that_are_exported(query: str) -> None:
    labels = known()
    found = list(selectors(promql_parser.parse(query)))
    assert {one.name for one in found} == set(re.findall(r"tandem_[a-z_]+", query)), "the parser found all of them"
    for one in found:
        assert one.name in labels
        assert {matcher.name for matcher in one.matchers.matchers} <= set(labels[one.name])
    for grouped in re.findall(r"by \(([^)]*)\)", query):
        for label in {name.strip() for name in grouped.split(",")} - {"le"}:
            assert any(label in labels[one.name] for one in found), f"{label} is a label of none of them"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_which_servers_have_its_metrics(panel: dict[str, Any]) -> None:
    """In its description, and in place of "No data" where not every server has them."""
    (servers,) = set.union(*(servers_with(target["expr"]) for target in panel["targets"]))
    assert panel["description"].startswith(f"For: {servers}.")
    empty = panel["fieldConfig"]["defaults"]["noValue"]
    assert empty
    if servers != "every server":
        assert empty.startswith("Only ")
        for flag in re.findall(r"--[a-z-]+|own engine", servers):
            assert flag in empty


def test_what_needs_a_flag_or_engines_is_in_a_row_that_is_closed() -> None:
    """Grafana does not ask for the panels of a closed row."""
    for panel in [one for one in DASHBOARD if one["type"] != "row"]:
        assert all(" with --" not in servers for target in panel["targets"] for servers in servers_with(target["expr"]))
    for row in ROWS:
        assert row["collapsed"] == bool(row["panels"])
        for one in ("tandem route", "--tls-cert", "--tracing"):
            assert (one in row["title"]) == any(one in panel["description"] for panel in row["panels"])
    ids = [one["id"] for one in (*ROWS, *PANELS)]
    assert len(ids) == len(set(ids))


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_and_its_entry_in_the_runbook_say_which_servers_have_it(rule: dict[str, Any]) -> None:
    said = rule["annotations"]["servers"]
    assert all(servers in said for servers in servers_with(rule["expr"]))
    (entry,) = re.findall(rf"^## {rule['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, flags=re.DOTALL | re.MULTILINE)
    for part in (f"({rule['labels']['severity']}; {said})", "**Meaning:**", "**Look at:**", "**Do:**"):
        assert part in entry
    assert rule["annotations"]["summary"] in entry
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_runbook_has_no_other_entries() -> None:
    assert re.findall(r"^## (.*)$", RUNBOOK, flags=re.MULTILINE) == [rule["alert"] for rule in RULES]
    assert "tandem_api_key_file_damaged == 1" in {rule["expr"] for rule in RULES}


def test_monitoring_is_off_by_default() -> None:
    manifests = render()
    assert not {manifest["kind"] for manifest in manifests} & {"ServiceMonitor", "PrometheusRule"}
    assert not any(manifest["metadata"]["name"].endswith("-dashboard") for manifest in manifests)


def test_the_chart_brings_them_as_they_are() -> None:
    manifests = render(ENABLED)
    dashboard = find(manifests, "ConfigMap", "release-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["tandem.json"])["panels"] == DASHBOARD
    monitor = find(manifests, "ServiceMonitor", "release")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = find(manifests, "Service", "release")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert selected <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    matching = [
        one["metadata"]["name"]
        for one in manifests
        if one["kind"] == "Service"
        and selected <= one["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in one["spec"]["ports"]]
    ]
    assert matching == ["release"], "no other service has a port of this name"
    assert (endpoint["path"], endpoint["scheme"]) == ("/metrics", "http")


ENGINES = {"cluster": {"engine_kind": "vllm"}}
FLAGS = {"router": {"tracing": True}, "tls": {"existingSecret": "ours"}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ["tandem", "tandem-own-engine"]),
        (ENGINES, ["tandem", "tandem-engines"]),
        (FLAGS, ["tandem", "tandem-own-engine", "tandem-tls", "tandem-tracing"]),
        (ENGINES | FLAGS, ["tandem", "tandem-engines", "tandem-tls", "tandem-tracing"]),
        ({"router": {"tls_cert": "/c", "tls_key": "/k"}}, ["tandem", "tandem-own-engine", "tandem-tls"]),
    ],
)
def test_the_chart_brings_alerts_whose_metrics_its_release_has(values: dict[str, Any], expected: list[str]) -> None:
    groups = find(render(ENABLED | values), "PrometheusRule", "release")["spec"]["groups"]
    assert [group["name"] for group in groups] == expected
    (command,) = {"serve"} if "tandem-own-engine" in expected else {"route"}
    exported = {name for metric in exported_metrics()[command].values() for name in metric.sample_names}
    for group in groups:
        (written,) = [one for one in GROUPS if one["name"] == group["name"]]
        for rule, original in zip(group["rules"], written["rules"], strict=True):
            assert rule["annotations"].pop("runbook_url") == f"https://wiki.example/tandem#{rule['alert'].lower()}"
            assert rule == original
            assert exported & {one.name for one in selectors(promql_parser.parse(rule["expr"]))}


def test_wrong_values_are_refused() -> None:
    assert "alerts" in refusal({"monitoring": {"alerts": True}})


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_agrees(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    shutil.copy(MONITORING / "alerts.yaml", tmp_path / "alerts.yaml")
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases()))
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "cases.yaml"]):
        finished = subprocess.run(
            [PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr


# By alert: series that raise it, and when. Counters that rise by N a minute are "0+Nx60".
RAISED: dict[str, tuple[dict[str, str], str]] = {
    "TandemNotScraped": ({"other": "1x60"}, "10m"),
    "TandemServerErrors": (
        {
            'tandem_router_requests_total{endpoint="/v1/completions",status="200"}': "0+60x60",
            'tandem_router_requests_total{endpoint="/v1/completions",status="503"}': "0+10x60",
            'tandem_router_requests_total{endpoint="/health",status="200"}': "0+6000x60",
        },
        "20m",
    ),
    "TandemStreamErrors": ({"tandem_router_stream_errors_total": "0+2x60"}, "30m"),
    "TandemSlowFirstToken": (
        {
            'tandem_router_ttft_seconds_bucket{le="6.0"}': "0+90x60",
            'tandem_router_ttft_seconds_bucket{le="12.0"}': "0+91x60",
            'tandem_router_ttft_seconds_bucket{le="30.0"}': "0+100x60",
            'tandem_router_ttft_seconds_bucket{le="+Inf"}': "0+100x60",
        },
        "30m",
    ),
    "TandemRefusesRequests": (
        {
            'tandem_router_rejected_total{tenant="a",reason="too_late"}': "0+20x60",
            'tandem_router_admitted_total{tenant="a"}': "0+80x60",
        },
        "30m",
    ),
    "TandemApiKeyFileDamaged": ({"tandem_api_key_file_damaged": "1x60"}, "10m"),
    "TandemAuditLinesLost": ({"tandem_router_lost_audit_lines_total": "0x10 1x50"}, "12m"),
    "TandemPreemptions": ({'tandem_worker_preemptions_total{worker="w",role="decode"}': "0+12x60"}, "30m"),
    "TandemWorkerErrors": ({'tandem_worker_errors_total{worker="w",role="decode"}': "0x10 1x50"}, "12m"),
    "TandemRecomputedPrompts": ({'tandem_worker_recomputed_total{worker="w",role="decode"}': "0x10 9x50"}, "12m"),
    "TandemQuarantinedBlocks": ({'tandem_worker_quarantined_blocks{worker="w",role="decode"}': "3x60"}, "20m"),
    "TandemLinkResets": ({'tandem_link_resets_total{worker="w",peer="v"}': "0x10 5x50"}, "12m"),
    "TandemDroppedMessages": (
        {'tandem_dropped_messages_total{worker="w",at="router",reason="stranger"}': "0x10 20x50"},
        "12m",
    ),
    "TandemCacheTooSmall": ({'tandem_cache_advised_gain{tier="host"}': "0.11x120"}, "90m"),
    "TandemEngineNotReady": ({'tandem_engine_ready{engine="e"}': "0x60"}, "10m"),
    "TandemTlsFilesDamaged": ({'tandem_engine_tls_files_damaged{engine="e"}': "1x60"}, "10m"),
    "TandemCertificateExpires": ({"tandem_tls_certificate_expiry_timestamp_seconds": "600000x120"}, "90m"),
    "TandemSpansDropped": ({'tandem_decider_dropped_spans_total{reason="queue_full"}': "0+1x60"}, "40m"),
}
# What raises none of them, whenever it is asked: 501 is the model's, and probes get 503 while a server starts.
HEALTHY = {
    'tandem_api_keys{state="active"}': "1x120",
    "tandem_api_key_file_damaged": "0x120",
    'tandem_router_requests_total{endpoint="/v1/completions",status="200"}': "0+60x120",
    'tandem_router_requests_total{endpoint="/v1/embeddings",status="501"}': "0+60x120",
    'tandem_router_requests_total{endpoint="/ready",status="503"}': "0+60x120",
    'tandem_router_dropped_spans_total{reason="queue_full"}': "0x120",
    'tandem_worker_errors_total{worker="w",role="decode"}': "3x120",
    'tandem_cache_advised_gain{tier="host"}': "0.01x120",
    'tandem_engine_ready{engine="e"}': "1x120",
    "tandem_tls_files_damaged": "0x120",
    "tandem_tls_certificate_expiry_timestamp_seconds": "9000000x120",
}


def cases() -> dict[str, Any]:
    """A file of `promtool test rules`: each alert is raised by its series, and healthy series raise none."""

    def given(series: dict[str, str]) -> list[dict[str, str]]:
        return [{"series": name, "values": values} for name, values in series.items()]

    def expected(alert: str, series: dict[str, str]) -> list[dict[str, Any]]:
        (rule,) = [rule for rule in RULES if rule["alert"] == alert]
        return [{"exp_labels": rule["labels"] | _labels_of(alert, series), "exp_annotations": rule["annotations"]}]

    tests = [
        {
            "interval": "1m",
            "input_series": given(series),
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected(alert, series)}],
        }
        for alert, (series, at) in RAISED.items()
    ]
    times = ["1m", "15m", "61m", "119m"]
    asked = [{"eval_time": at, "alertname": rule["alert"], "exp_alerts": []} for rule in RULES for at in times]
    healthy = {"interval": "1m", "input_series": given(HEALTHY), "alert_rule_test": asked}
    return {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [*tests, healthy]}


def _labels_of(alert: str, series: dict[str, str]) -> dict[str, str]:
    """Labels of the alert: those of its first series that the rule keeps."""
    (rule,) = [rule for rule in RULES if rule["alert"] == alert]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(series))))
    grouped = re.search(r"sum by \(([^)]*)\)", rule["expr"])
    if grouped:
        return {name: labels[name] for name in grouped[1].split(", ") if name != "le"}
    return {} if "sum(" in rule["expr"] or "absent" in rule["expr"] else labels


def test_each_alert_has_a_case_that_raises_it() -> None:
    assert list(RAISED) == [rule["alert"] for rule in RULES]
    for series, _ in [*RAISED.values(), (HEALTHY, "")]:
        for name in series:
            if name != "other":
                assert set(re.findall(r'(\w+)="', name)) - {"le"} <= set(known()[name.partition("{")[0]])
