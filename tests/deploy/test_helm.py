import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from protocol.config import ClusterConfig, EngineConfig, RouterConfig, TierConfig, TransferConfig
from tests.deploy.commands import accept, tandem_commands

CHART = Path(__file__).resolve().parents[2] / "helm" / "tandem"
HELM = Path(sys.executable).parent / "helm"
COMPONENTS = {
    "engine": EngineConfig,
    "transfer": TransferConfig,
    "tiers": TierConfig,
    "router": RouterConfig,
    "cluster": ClusterConfig,
}
NOT_VALUES = {
    "engine",
    "transfer",
    "tiers",
    "router",
    "ray_address",
}  # parts of ClusterConfig, and what the chart itself decides
FILES = {"router": {"tenants", "api_key_file"}}  # flags that are no config fields: the command reads the files

EVERYTHING = {
    "engine": {"model": "org/big-model", "dtype": "bfloat16", "pool_bytes": 40_000_000_000, "block_size": 32},
    "transfer": {"checksums": "all", "lease_ttl_s": 12.5},
    "tiers": {"host_cache_gb": 1.5, "disk_cache_path": "/kv", "object_cache_codec": "int8"},
    "router": {"port": 9000, "cors_allow_origins": ["a", "b"]},
    "cluster": {"num_prefill": 2, "num_decode": 2, "autoscale": False, "num_gpus_per_worker": 0.5},
    "worker": {"replicas": 4, "gpus": 1, "nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}]},
    "modelCache": {"persistence": {"enabled": True, "storageClassName": "fast"}},
    "networkPolicy": {"enabled": True, "allowFrom": [{"namespaceSelector": {}}]},
    "imagePullSecrets": [{"name": "registry"}],
    "env": {"HF_HUB_OFFLINE": 1},
    "envFrom": [{"secretRef": {"name": "hub"}}],
    "podAnnotations": {"a": "b"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
}


def helm(*args: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *args, "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60, check=False
    )


def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    finished = helm("template", "release", str(CHART), values=values)
    assert finished.returncode == 0, finished.stderr
    return [manifest for manifest in yaml.safe_load_all(finished.stdout) if manifest]


def find(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_chart_lints_and_its_manifests_are_valid(values: dict[str, Any]) -> None:
    finished = helm("lint", "--strict", str(CHART), values=values)
    assert finished.returncode == 0, finished.stdout
    manifests = render(values)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    kinds = {manifest["kind"] for manifest in manifests}
    assert {"StatefulSet", "Service", "ServiceAccount", "ConfigMap"} <= kinds
    assert ({"PersistentVolumeClaim", "NetworkPolicy"} <= kinds) == bool(values)


@pytest.mark.parametrize("component", COMPONENTS)
def test_values_have_the_names_of_the_config_fields(component: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    names = {field.name for field in fields(COMPONENTS[component])} - NOT_VALUES | FILES.get(component, set())
    assert set(schema[component]["properties"]) == names
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())[component]) <= names


def test_head_runs_a_command_that_the_command_line_accepts() -> None:
    scripts = find(render(EVERYTHING), "ConfigMap", "release")["data"]
    pull, serve = tandem_commands(scripts["head.sh"])
    flags = accept(serve)
    assert flags["ray_address"] == "auto"
    for component in ("engine", "transfer", "tiers", "router", "cluster"):
        for field, value in EVERYTHING[component].items():
            assert flags[field] == value, field
    assert flags["host"] == "0.0.0.0"
    assert accept(pull) == {"name": "org/big-model"}
    assert tandem_commands(scripts["worker.sh"]) == [pull]


@pytest.mark.parametrize(("colocated", "expected"), [(True, "--colocated"), (False, "--disaggregated")])
def test_colocated_is_a_flag(colocated: bool, expected: str) -> None:
    script = find(render({"cluster": {"colocated": colocated}}), "ConfigMap", "release")["data"]["head.sh"]
    assert expected in tandem_commands(script)[1]
    assert accept(tandem_commands(script)[1])["colocated"] is colocated


def test_workers_find_the_head_through_its_service() -> None:
    manifests = render()
    service = find(manifests, "Service", "release-head")
    assert "--address=release-head:6379" in find(manifests, "ConfigMap", "release")["data"]["worker.sh"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = find(manifests, "StatefulSet", "release-head")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_pods_are_not_root_and_are_probed() -> None:
    manifests = render(EVERYTHING)
    for name in ("release-head", "release-worker"):
        pod = find(manifests, "StatefulSet", name)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"startupProbe", "livenessProbe"} <= container.keys()
    head = find(manifests, "StatefulSet", "release-head")["spec"]["template"]["spec"]["containers"][0]
    assert head["livenessProbe"]["httpGet"]["path"] == "/health"
    assert head["readinessProbe"]["httpGet"]["path"] == "/ready"
    worker = find(manifests, "StatefulSet", "release-worker")["spec"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"block_sise": 16}},
        {"router": {"port": 0}},
        {"transfer": {"transport": "pigeon"}},
        {"cluster": {"ray_address": "elsewhere"}},
        {"workers": {}},
    ],
)
def test_misspelt_and_bad_values_are_refused(values: dict[str, Any]) -> None:
    finished = helm("template", "release", str(CHART), values=values)
    assert finished.returncode != 0
    assert "don't meet the specifications of the schema" in finished.stderr
