from __future__ import annotations

import json
import re
import subprocess

import promql_parser
import pytest
import yaml

from tandem.frontend.http.vllm_names import VLLM_SOURCES
from tests.support.chart import CHART, GROWING, HELM, Json, find, refusal, render, validate

NGINX = "nginx.ingress.kubernetes.io"
INGRESS: Json = {"ingress": {"enabled": True, "host": "llm.example"}}
GATEWAY: Json = {"gateway": {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]}}
TLS: Json = {"tls": {"existingSecret": "certificate"}}
DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")  # of the Gateway API
WORKERS = {
    "app.kubernetes.io/name": "tandem",
    "app.kubernetes.io/instance": "release",
    "app.kubernetes.io/component": "worker",
}


def template_of(manifests: list[Json], name: str) -> Json:
    template: Json = find(manifests, "StatefulSet", f"release-{name}")["spec"]["template"]
    return template


def kinds(values: Json) -> set[str]:
    return {manifest["kind"] for manifest in render(values)}


def test_nothing_is_exposed_by_default() -> None:
    assert not kinds({}) & {"Ingress", "HTTPRoute", "BackendTLSPolicy"}


@pytest.mark.parametrize(("values", "protocol"), [({}, "HTTP"), (TLS, "HTTPS")])
def test_streams_pass_through_an_ingress(values: Json, protocol: str) -> None:
    manifests = render(INGRESS | values)
    ingress = find(manifests, "Ingress", "release")
    validate(ingress)
    assert ingress["metadata"]["annotations"] == {
        f"{NGINX}/proxy-buffering": "off",
        f"{NGINX}/proxy-read-timeout": "3600",
        f"{NGINX}/proxy-send-timeout": "3600",
        f"{NGINX}/proxy-body-size": "8m",
        f"{NGINX}/backend-protocol": protocol,
    }
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "llm.example"
    backend = rule["http"]["paths"][0]["backend"]["service"]
    service = find(manifests, "Service", backend["name"])
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    assert "tls" not in ingress["spec"]


def test_an_ingress_is_as_its_values_say() -> None:
    given: Json = {"className": "nginx", "tlsSecret": "public", "timeoutSeconds": 600}
    given["annotations"] = {f"{NGINX}/proxy-buffering": "on", "cert-manager.io/cluster-issuer": "ours"}
    values = {"router": {"max_body_bytes": 64_000_000}, "ingress": INGRESS["ingress"] | given}
    ingress = find(render(values), "Ingress", "release")
    validate(ingress)
    annotations = ingress["metadata"]["annotations"]
    assert annotations[f"{NGINX}/proxy-body-size"] == "64000000", "as large as the server's own bound"
    assert annotations[f"{NGINX}/proxy-buffering"] == "on", "what is given replaces the chart's"
    assert annotations[f"{NGINX}/proxy-read-timeout"] == "600"
    assert (annotations["cert-manager.io/cluster-issuer"], ingress["spec"]["ingressClassName"]) == ("ours", "nginx")
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example"], "secretName": "public"}]


def test_a_gateway_ends_no_answer() -> None:
    manifests = render(GATEWAY | {"service": {"port": 8080}})
    route = find(manifests, "HTTPRoute", "release")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == GATEWAY["gateway"]["parentRefs"]
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert all(DURATION.fullmatch(value) for value in rule["timeouts"].values())
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["backendRefs"] == [{"name": "release", "port": 8080}]
    assert find(manifests, "Service", "release")["spec"]["ports"][0]["port"] == 8080
    assert "hostnames" not in route["spec"]
    assert "BackendTLSPolicy" not in {manifest["kind"] for manifest in manifests}


@pytest.mark.parametrize(
    ("ca", "expected"),
    [
        ("", {"wellKnownCACertificates": "System"}),
        ("our-ca", {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "our-ca"}]}),
    ],
)
def test_a_gateway_checks_the_servers_certificate(ca: str, expected: Json) -> None:
    backend = {"hostname": "tandem.example", "caConfigMap": ca}
    policy = find(
        render({"gateway": GATEWAY["gateway"] | {"backendTls": backend}} | TLS), "BackendTLSPolicy", "release"
    )
    assert policy["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "release"}]
    assert policy["spec"]["validation"] == {"hostname": "tandem.example"} | expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ingress": {"enabled": True}}, "needs ingress.host"),
        ({"gateway": {"enabled": True}}, "needs gateway.parentRefs"),
        (GATEWAY | TLS, "needs gateway.backendTls.hostname"),
        ({"gateway": GATEWAY["gateway"] | {"timeouts": {"request": "600"}}}, "pattern"),
        ({"gateway": GATEWAY["gateway"] | {"timeouts": {"requests": "0s"}}}, "requests"),
        ({"ingress": {"hosts": ["a"]}}, "hosts"),
        ({"podDisruptionBudget": {"maxUnavailableWorkers": 0}}, "maxUnavailableWorkers"),
        ({"worker": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "topologyKey"),
    ],
)
def test_what_cannot_work_is_reported_at_once(values: Json, message: str) -> None:
    assert message in refusal(values)


def test_a_drain_of_nodes_takes_one_worker_pod_at_a_time() -> None:
    manifests = render()
    budget = find(manifests, "PodDisruptionBudget", "release-worker")
    validate(budget)
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["selector"]["matchLabels"]) == (1, WORKERS)
    labels = find(manifests, "StatefulSet", "release-worker")["spec"]["template"]["metadata"]["labels"]
    assert WORKERS.items() <= labels.items()
    assert [one["metadata"]["name"] for one in manifests if one["kind"] == "PodDisruptionBudget"] == ["release-worker"]


@pytest.mark.parametrize(("min_workers", "max_unavailable", "expected"), [(2, 1, 1), (0, 1, 2), (2, 5, 0)])
def test_of_pods_of_a_raycluster_a_fixed_number_stays(min_workers: int, max_unavailable: int, expected: int) -> None:
    """It has no scale subresource: Kubernetes would let a budget with maxUnavailable evict no pod at all."""
    values = GROWING | {"podDisruptionBudget": {"maxUnavailableWorkers": max_unavailable}}
    values |= {"cluster": GROWING["cluster"] | {"min_workers": min_workers}}
    budget = find(render(values), "PodDisruptionBudget", "release-worker")
    validate(budget)
    assert budget["spec"]["minAvailable"] == expected
    assert "maxUnavailable" not in budget["spec"]


def test_the_head_may_be_protected_and_budgets_left_out() -> None:
    budget = find(render({"podDisruptionBudget": {"protectHead": True}}), "PodDisruptionBudget", "release-head")
    validate(budget)
    assert budget["spec"]["minAvailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"] == WORKERS | {"app.kubernetes.io/component": "head"}
    assert "PodDisruptionBudget" not in kinds({"podDisruptionBudget": {"enabled": False}})


@pytest.mark.parametrize("growing", [False, True])
def test_pods_have_the_priority_and_the_spread_that_are_given(growing: bool) -> None:
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    given = [spread, spread | {"labelSelector": {"matchLabels": {"a": "b"}}}]
    values: Json = GROWING if growing else {}
    worker = values.get("worker", {}) | {"priorityClassName": "batch", "topologySpreadConstraints": given}
    manifests = render(values | {"worker": worker, "head": {"priorityClassName": "serving"}})
    if growing:
        cluster = find(manifests, "RayCluster", "release")["spec"]
        head, pods = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]
    else:
        head, pods = (template_of(manifests, name) for name in ("head", "worker"))
    for pod in (head, pods):
        validate({"apiVersion": "v1", "kind": "Pod", **pod})
    assert (head["spec"]["priorityClassName"], pods["spec"]["priorityClassName"]) == ("serving", "batch")
    own = {"labelSelector": {"matchLabels": WORKERS}}
    assert pods["spec"]["topologySpreadConstraints"] == [spread | own, given[1]]
    assert "topologySpreadConstraints" not in head["spec"]
    for name in ("head", "worker"):
        plain = template_of(render(), name)["spec"]
        assert not {"priorityClassName", "topologySpreadConstraints"} & plain.keys()


def test_the_example_for_keda_asks_for_what_its_release_exports() -> None:
    text = (CHART / "examples" / "keda" / "worker-pods.yaml").read_text()
    scaled = yaml.safe_load(text)
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    command = re.sub(r"\\?\n#", "", text[text.index("helm install") : text.index("kubectl")])
    (settings,) = re.findall(r"--set (\S+)", command)
    finished = subprocess.run(
        [str(HELM), "template", "tandem", str(CHART), "--set", settings], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    manifests = [one for one in yaml.safe_load_all(finished.stdout) if one]
    target = scaled["spec"]["scaleTargetRef"]
    assert find(manifests, target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    script = find(manifests, "ConfigMap", "tandem")["data"]["head.sh"]
    for flag in ("--vllm-metric-names", "--min-workers=2", "--max-workers=8"):
        assert flag in script
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 8)
    (trigger,) = scaled["spec"]["triggers"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes strings only"
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    asked = set(re.findall(r"vllm:[a-z_]+", query))
    assert asked == {"vllm:num_requests_running", "vllm:num_requests_waiting"} <= VLLM_SOURCES.keys()
    monitor = json.dumps(find(manifests, "ServiceMonitor", "tandem"))
    assert "metricRelabelings" not in monitor, "the label `service` is the name of the Service"
    assert 'service="tandem"' in query
