"""The Helm chart as it renders, and what to look for in its manifests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.support.commands import accept, tandem_commands

Json = dict[str, Any]

CHART = Path(__file__).resolve().parents[2] / "helm" / "tandem"
HELM = Path(sys.executable).parent / "helm"
EVERYTHING: Json = {
    "engine": {"model": "org/big-model", "dtype": "bfloat16", "pool_bytes": 40_000_000_000, "block_size": 32},
    "transfer": {"checksums": "all", "lease_ttl_s": 12.5},
    "tiers": {
        "host_cache_gb": 1.5,
        "disk_cache_path": "/kv",
        "object_cache_codec": "int8",
        "tier": ["s3://b/p?gb=5&codec=int8"],
    },
    "router": {"port": 9000, "cors_allow_origins": ["a", "b"]},
    "cluster": {"num_prefill": 2, "num_decode": 2, "autoscale": False, "num_gpus_per_worker": 0.5},
    "worker": {"replicas": 4, "gpus": 1, "nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}]},
    "modelCache": {"persistence": {"enabled": True, "storageClassName": "fast"}},
    "rayToken": {"existingSecret": "our-ray", "key": "ray"},
    "apiKeys": {"existingSecret": "our-keys"},
    "tls": {"existingSecret": "our-certificate"},
    "tenants": {"existingConfigMap": "our-tenants"},
    "kvKey": {"existingSecret": "our-kv", "key": "kv"},
    "networkPolicy": {"enabled": True, "allowFrom": [{"namespaceSelector": {}}], "allowToPorts": [443, 8443]},
    "imagePullSecrets": [{"name": "registry"}],
    "env": {"HF_HUB_OFFLINE": 1},
    "envFrom": [{"secretRef": {"name": "hub"}}],
    "podAnnotations": {"a": "b"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
}
GROWING: Json = {
    "cluster": {"num_prefill": 1, "num_decode": 2, "min_workers": 2, "max_workers": 6, "num_cpus_per_worker": 3.0},
    "worker": {"autoscaling": {"enabled": True, "idleTimeoutSeconds": 90}, "gpus": 1},
}


def helm(*args: str, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *args, "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60, check=False
    )


def render(values: Json | None = None) -> list[Json]:
    finished = helm("template", "release", str(CHART), values=values)
    assert finished.returncode == 0, finished.stderr
    return [manifest for manifest in yaml.load_all(finished.stdout, yaml.CSafeLoader) if manifest]


def refusal(values: Json) -> str:
    finished = helm("template", "release", str(CHART), values=values)
    assert finished.returncode != 0
    return finished.stderr


def find(manifests: list[Json], kind: str, name: str) -> Json:
    return next(m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)


def scripts(manifests: list[Json]) -> dict[str, str]:
    found: dict[str, str] = find(manifests, "ConfigMap", "release")["data"]
    return found


def serve_flags(manifests: list[Json]) -> Json:
    """What the head's command means to the command line."""
    (serve,) = tandem_commands(scripts(manifests)["head.sh"])
    return accept(serve)


def validate(manifest: Json) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
