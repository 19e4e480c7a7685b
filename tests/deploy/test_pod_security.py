"""Every pod that the chart renders keeps the Restricted profile, and the check of it finds what the profile forbids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, EVERYTHING, GROWING, Json, render
from tests.support.pod_security import violations

# Values that add volumes, mounts, containers or fields to a pod; each may be given or not.
PARTS: list[Json] = [
    {"worker": {"autoscaling": {"enabled": True}}, "cluster": {"max_workers": 4}},
    {"modelCache": {"persistence": {"enabled": True}}},
    {"apiKeys": {"existingSecret": "keys"}},
    {"tls": {"existingSecret": "certificate"}},
    {"tenants": {"existingConfigMap": "tenants"}},
]
OTHERS = ("rayToken", "kvKey", "imagePullSecrets", "env", "envFrom", "podAnnotations")
REST = {name: EVERYTHING[name] for name in OTHERS}


def pods_of(manifests: list[Json]) -> Iterator[Json]:
    """Every pod template, wherever it is, with the container that KubeRay's operator adds to the head."""
    for manifest in manifests:
        options = manifest.get("spec", {}).get("autoscalerOptions") if manifest["kind"] == "RayCluster" else None
        for template in templates_in(manifest):
            if options is not None and template["metadata"]["labels"]["app.kubernetes.io/component"] == "head":
                added = {"name": "autoscaler", **options}
                spec = template["spec"] | {"containers": [*template["spec"]["containers"], added]}
                template = template | {"spec": spec}
            yield template


def templates_in(node: Any) -> Iterator[Json]:
    """Everything that has the spec of a pod."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    if isinstance(node, dict) and isinstance(node.get("spec"), dict) and "containers" in node["spec"]:
        yield node
    for child in children:
        yield from templates_in(child)


def refused(manifests: list[Json]) -> list[str]:
    found = [
        text for pod in pods_of(manifests) for text in violations(pod["spec"], pod["metadata"].get("annotations", {}))
    ]
    containers = [container for pod in pods_of(manifests) for container in pod["spec"]["containers"]]
    assert len(containers) in (2, 3)  # more than the profile demands: each may write only to what is mounted
    return found + [one["name"] for one in containers if not one["securityContext"].get("readOnlyRootFilesystem")]


def merged(*parts: Json) -> Json:
    result: Json = {}
    for part in parts:
        for name, value in part.items():
            result[name] = result[name] | value if isinstance(result.get(name), dict) else deepcopy(value)
    return result


# Every two parts are given and not given together in these; the other combinations are slow.
PAIRS = {(a, b, c, a ^ b, a ^ c) for a, b, c in itertools.product([False, True], repeat=3)}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, marks=() if given in PAIRS else pytest.mark.slow, id=str(given))
        for given in itertools.product([False, True], repeat=len(PARTS))
    ],
)
def test_every_combination_keeps_the_restricted_profile(given: tuple[bool, ...]) -> None:
    parts = [part for part, is_given in zip(PARTS, given, strict=True) if is_given]
    rest = REST if sum(given) % 2 else {}  # its parts change no volume, container or security context
    assert refused(render(merged(*parts, rest))) == []


@pytest.mark.parametrize("values", [EVERYTHING, EVERYTHING | GROWING], ids=["everything", "everything, growing"])
def test_everything_at_once_keeps_it(values: Json) -> None:
    assert refused(render(values)) == []


@pytest.mark.parametrize("example", sorted((CHART / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_keeps_it(example: Any) -> None:
    assert refused(render(yaml.safe_load(example.read_text()))) == []


def forbidden() -> list[tuple[str, Callable[[Json], object]]]:
    """What the profile forbids, as changes to a pod that keeps it."""

    def first(pod: Json) -> Json:
        container: Json = pod["containers"][0]
        return container

    def own(pod: Json) -> Json:
        context: Json = first(pod)["securityContext"]
        return context

    def shared(pod: Json) -> Json:
        context: Json = pod["securityContext"]
        return context

    return [
        ("hostNetwork is on", lambda pod: pod.update(hostNetwork=True)),
        ("hostPID is on", lambda pod: pod.update(hostPID=True)),
        ("hostIPC is on", lambda pod: pod.update(hostIPC=True)),
        ("of ['hostPath']", lambda pod: pod["volumes"].append({"name": "v", "hostPath": {"path": "/"}})),
        ("of ['nfs']", lambda pod: pod["volumes"].append({"name": "v", "nfs": {"path": "/", "server": "s"}})),
        ("sysctl kernel.msgmax", lambda pod: shared(pod).update(sysctls=[{"name": "kernel.msgmax", "value": "1"}])),
        ("head: privileged", lambda pod: own(pod).update(privileged=True)),
        ("allowPrivilegeEscalation", lambda pod: own(pod).pop("allowPrivilegeEscalation")),
        ("allowPrivilegeEscalation", lambda pod: own(pod).update(allowPrivilegeEscalation=True)),
        ("procMount", lambda pod: own(pod).update(procMount="Unmasked")),
        ("not dropped", lambda pod: own(pod)["capabilities"].update(drop=["NET_RAW"])),
        ("are added", lambda pod: own(pod)["capabilities"].update(add=["IPC_LOCK"])),
        ("runAsNonRoot", lambda pod: shared(pod).pop("runAsNonRoot")),
        ("runAsNonRoot", lambda pod: own(pod).update(runAsNonRoot=False)),
        ("pod runs as root", lambda pod: shared(pod).update(runAsUser=0)),
        ("container runs as root", lambda pod: own(pod).update(runAsUser=0)),
        ("no seccomp profile", lambda pod: shared(pod).pop("seccompProfile")),
        ("no seccomp confinement", lambda pod: own(pod).update(seccompProfile={"type": "Unconfined"})),
        ("no AppArmor", lambda pod: own(pod).update(appArmorProfile={"type": "Unconfined"})),
        ("host process", lambda pod: shared(pod).update(windowsOptions={"hostProcess": True})),
        ("SELinux", lambda pod: own(pod).update(seLinuxOptions={"type": "spc_t"})),
        ("SELinux", lambda pod: shared(pod).update(seLinuxOptions={"user": "u"})),
        ("host port 80", lambda pod: first(pod)["ports"].append({"containerPort": 80, "hostPort": 80})),
        ("to host", lambda pod: first(pod)["livenessProbe"]["httpGet"].update(host="169.254.169.254")),
        ("to host", lambda pod: first(pod).update(lifecycle={"preStop": {"httpGet": {"host": "h", "port": 1}}})),
        ("init: ", lambda pod: pod.update(initContainers=[{"name": "init"}])),
    ]


@pytest.mark.parametrize(("text", "change"), forbidden(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_profile_forbids_is_found(text: str, change: Callable[[Json], object]) -> None:
    head = next(pod for pod in pods_of(DEFAULTS) if pod["spec"]["containers"][0]["name"] == "head")
    pod = deepcopy(head["spec"])
    assert violations(pod) == []
    change(pod)
    assert any(text in found for found in violations(pod))


def test_an_annotation_may_not_end_confinement() -> None:
    pod = next(pods_of(DEFAULTS))["spec"]
    assert violations(pod, {"container.apparmor.security.beta.kubernetes.io/head": "unconfined"})


DEFAULTS = render()
