import base64
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from tandem.cli.reference import HELM_COMPONENTS
from tandem.cli.serve import SERVE_FIELDS, build_config
from tandem.cluster.engines.layout import parallelism_of
from tests.support.chart import (
    CHART,
    EVERYTHING,
    GROWING,
    Json,
    find,
    helm,
    refusal,
    render,
    scripts,
    serve_flags,
    validate,
)
from tests.support.commands import accept, tandem_commands


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_chart_lints_and_its_manifests_are_valid(values: Json) -> None:
    finished = helm("lint", "--strict", str(CHART), values=values)
    assert finished.returncode == 0, finished.stdout
    manifests = render(values)
    for manifest in manifests:
        validate(manifest)
    kinds = {manifest["kind"] for manifest in manifests}
    assert {"StatefulSet", "Service", "ServiceAccount", "ConfigMap", "NetworkPolicy"} <= kinds
    assert ("PersistentVolumeClaim" in kinds) == bool(values)
    assert ("Secret" in kinds) == (not values)


@pytest.mark.parametrize("component", HELM_COMPONENTS)
def test_values_have_the_names_of_the_config_fields(component: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    names = {field.name for field in HELM_COMPONENTS[component]}
    assert set(schema[component]["properties"]) == names
    assert set(yaml.safe_load((CHART / "values.yaml").read_text())[component]) <= names


def test_every_setting_of_serve_is_a_value_of_the_chart() -> None:
    values = {field.name for fields in HELM_COMPONENTS.values() for field in fields}
    settings = {field.name for field in SERVE_FIELDS}
    assert settings - values == {"ray_address"}, "the chart joins its own Ray"


@pytest.mark.parametrize("value", ["12.5", "1e1"])
def test_a_number_may_be_a_string_as_helm_set_makes_it(value: str) -> None:
    assert serve_flags(render({"transfer": {"lease_ttl_s": value}}))["lease_ttl_s"] == float(value)


def test_head_runs_a_command_that_the_command_line_accepts() -> None:
    manifests = render(EVERYTHING)
    flags = serve_flags(manifests)
    assert flags["ray_address"] == "auto"
    for component in ("engine", "transfer", "tiers", "router", "cluster"):
        for field, value in EVERYTHING[component].items():
            assert flags[field] == value, field
    assert flags["host"] == "0.0.0.0"
    (pull,) = tandem_commands(scripts(manifests)["worker.sh"])
    assert accept(pull) == {"name": "org/big-model"}


@pytest.mark.parametrize(
    ("values", "delay_s", "grace_s"),
    [
        ({}, 5, 45),
        ({"terminationGracePeriodSeconds": 300}, 5, 285),
        ({"router": {"shutdown_delay_s": 12.5}}, 12.5, 37),
        ({"router": {"shutdown_grace_s": 7}}, 5, 7),
        ({"terminationGracePeriodSeconds": 5}, 5, 0),
    ],
)
def test_answers_have_the_time_between_sigterm_and_sigkill(values: Json, delay_s: float, grace_s: float) -> None:
    flags = serve_flags(render(values))
    assert (flags["shutdown_delay_s"], flags["shutdown_grace_s"]) == (delay_s, grace_s)


@pytest.mark.parametrize(("colocated", "expected"), [(True, "--colocated"), (False, "--no-colocated")])
def test_colocated_is_a_flag(colocated: bool, expected: str) -> None:
    (serve,) = tandem_commands(scripts(render({"cluster": {"colocated": colocated}}))["head.sh"])
    assert expected in serve
    assert accept(serve)["colocated"] is colocated


@pytest.mark.parametrize("example", sorted((CHART / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_renders_to_valid_manifests_and_flags(example: Path) -> None:
    values = yaml.safe_load(example.read_text())
    manifests = render(values)
    for manifest in manifests:
        validate(manifest)
    (serve,) = tandem_commands(scripts(manifests)["head.sh"])
    flags = accept(serve)
    assert (flags["engine_args"], flags["engine_kind"]) == (values["cluster"]["engine_args"], "vllm")
    words = {word.partition("=")[0] for word in serve}
    given = {name: value for name, value in flags.items() if f"--{name.replace('_', '-')}" in words}
    config = build_config(given | {"engine_kind": "vllm"})
    assert parallelism_of(config).num_gpus == config.num_gpus_per_worker == values["worker"]["gpus"]
    assert config.num_prefill + config.num_decode == values["worker"]["replicas"]
    (container,) = find(manifests, "StatefulSet", "release-worker")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == values["worker"]["gpus"]


def test_workers_find_the_head_through_its_service() -> None:
    manifests = render()
    service = find(manifests, "Service", "release-head")
    assert "--address=release-head:6379" in scripts(manifests)["worker.sh"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = find(manifests, "StatefulSet", "release-head")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def pods(manifests: list[Json]) -> dict[str, Json]:
    return {
        name: find(manifests, "StatefulSet", f"release-{name}")["spec"]["template"]["spec"]
        for name in ("head", "worker")
    }


def mounted(pod: Json) -> dict[str, Json]:
    """Volumes by the path they are mounted at."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def environment(pod: Json) -> dict[str, str]:
    (container,) = pod["containers"]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_pods_may_do_and_write_no_more_than_they_need(values: Json) -> None:
    for pod in pods(render(values)).values():
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        places = mounted(pod)
        writable = {
            path for path, volume in places.items() if "emptyDir" in volume or "persistentVolumeClaim" in volume
        }
        assert writable == {"/tmp", "/home/tandem", "/dev/shm", "/var/cache/tandem"}
        assert environment(pod)["HOME"] in writable
        assert environment(pod)["TANDEM_CACHE"] in writable


def test_pods_are_probed() -> None:
    both = pods(render(EVERYTHING))
    for pod in both.values():
        (container,) = pod["containers"]
        assert {"startupProbe", "livenessProbe"} <= container.keys()
    head = both["head"]["containers"][0]
    assert head["livenessProbe"]["httpGet"]["path"] == "/health"
    assert head["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert both["worker"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["the chart's", "the user's"])
def test_ray_and_tiers_have_secrets_from_a_secret(values: Json) -> None:
    manifests = render(values)
    flags = serve_flags(manifests)
    made = {"release-ray-token": "token", "release-kv-key": "key"}
    wanted = {"our-ray": "ray", "our-kv": "kv"} if values else made
    for pod in pods(manifests).values():
        assert environment(pod)["RAY_AUTH_MODE"] == "token"
        paths = environment(pod)["RAY_AUTH_TOKEN_PATH"], str(flags["kv_key_file"])
        for path, (name, key) in zip(paths, wanted.items(), strict=True):
            folder, _, file = path.rpartition("/")
            secret = mounted(pod)[folder]["secret"]
            assert (secret["secretName"], secret["items"]) == (name, [{"key": key, "path": file}])
            assert secret["defaultMode"] == 0o440
    if not values:
        secrets = {name: find(manifests, "Secret", name)["data"][key] for name, key in made.items()}
        assert [len(base64.b64decode(secret)) for secret in secrets.values()] == [64, 64]
        again = render(values)
        for name, secret in secrets.items():
            assert find(again, "Secret", name)["data"][made[name]] != secret, "it is random"
            assert secret not in json.dumps([one for one in manifests if one["kind"] != "Secret"])


def test_an_upgrade_keeps_the_secrets() -> None:
    """`lookup` finds nothing without a cluster; it is what keeps an existing Secret."""
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    assert 'lookup "v1" "Secret" $root.Release.Namespace $name' in template
    assert re.search(r"get \$present \$key \| default \(randAlphaNum 64", template)


def test_api_keys_and_tenants_come_to_the_head_only() -> None:
    manifests = render(EVERYTHING)
    flags, both = serve_flags(manifests), pods(manifests)
    head = mounted(both["head"])
    (folder, keys), (other, tenants) = (str(flags[name]).rsplit("/", 1) for name in ("api_key_file", "tenants"))
    secret = head[folder]["secret"]
    assert (secret["secretName"], secret["items"]) == ("our-keys", [{"key": "keys", "path": keys}])
    assert secret["defaultMode"] & 0o027 == 0, "the server would refuse the file"
    assert head[other]["configMap"] == {"name": "our-tenants", "items": [{"key": "tenants.toml", "path": tenants}]}
    assert not {folder, other} & mounted(both["worker"]).keys()
    assert serve_flags(render())["api_key_file"] == ""


@pytest.mark.parametrize(
    ("values", "scheme"),
    [({}, "http"), (EVERYTHING, "https"), ({"router": {"tls_cert": "/c", "tls_key": "/k"}}, "https")],
)
def test_probes_and_the_service_speak_as_the_server_does(values: Json, scheme: str) -> None:
    manifests = render(values)
    (head,) = pods(manifests)["head"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert head[probe]["httpGet"]["scheme"] == scheme.upper()
    assert find(manifests, "Service", "release")["spec"]["ports"][0]["appProtocol"] == scheme


def test_the_certificate_comes_from_a_secret_to_the_head_only() -> None:
    manifests = render(EVERYTHING)
    flags = serve_flags(manifests)
    folders = {str(flags[name]).rpartition("/")[0] for name in ("tls_cert", "tls_key")}
    assert [str(flags[name]).rpartition("/")[2] for name in ("tls_cert", "tls_key")] == ["tls.crt", "tls.key"]
    (folder,) = folders
    both = pods(manifests)
    secret = mounted(both["head"])[folder]["secret"]
    assert secret == {"secretName": "our-certificate", "defaultMode": 0o440}  # all of it: renewed in place
    (head,) = both["head"]["containers"]
    assert not any("subPath" in mount for mount in head["volumeMounts"]), "such a mount never changes"
    assert folder not in mounted(both["worker"])


@pytest.mark.parametrize(
    ("given", "router", "expected"),
    [
        ("apiKeys.existingSecret", {"api_key_file": "/keys"}, "{} and router.api_key_file"),
        ("tenants.existingConfigMap", {"tenants": "/tenants"}, "{} and router.tenants"),
        ("tls.existingSecret", {"tls_cert": "/c", "tls_key": "/k"}, "{} and router.tls_cert"),
        ("", {"tls_client_ca": "/ca"}, "probes have no certificate to show"),
    ],
)
def test_files_are_named_once_and_can_be_used(given: str, router: Json, expected: str) -> None:
    part, _, name = given.partition(".")
    assert expected.format(given) in refusal(({part: {name: "ours"}} if given else {}) | {"router": router})


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_only_http_comes_in_and_only_names_and_models_go_out(values: Json) -> None:
    manifests = render(values)
    within, http = find(manifests, "NetworkPolicy", "release"), find(manifests, "NetworkPolicy", "release-http")
    release = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": "release"}
    peers = [{"podSelector": {"matchLabels": release}}]
    assert within["spec"]["podSelector"] == {"matchLabels": release}
    assert (within["spec"]["policyTypes"], within["spec"]["ingress"]) == (["Ingress", "Egress"], [{"from": peers}])
    ports = [443, 8443] if values else [443]
    assert within["spec"]["egress"] == [
        {"to": peers},
        {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        {"ports": [{"port": port, "protocol": "TCP"} for port in ports]},
    ]
    assert http["spec"]["podSelector"] == {"matchLabels": release | {"app.kubernetes.io/component": "head"}}
    allowed = {"from": [{"namespaceSelector": {}}]} if values else {}
    assert http["spec"]["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]} | allowed]


def test_an_empty_list_of_outside_ports_makes_no_rule() -> None:
    policy = find(render({"networkPolicy": {"allowToPorts": []}}), "NetworkPolicy", "release")
    assert len(policy["spec"]["egress"]) == 2
    assert not [one for one in render({"networkPolicy": {"enabled": False}}) if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"block_sise": 16}},
        {"router": {"port": 0}},
        {"router": {"max_connections": 0}},
        {"engine": {"block_size": 0}},
        {"engine": {"model": ""}},
        {"transfer": {"lease_ttl_s": 0}},
        {"transfer": {"lease_ttl_s": "soon"}},
        {"transfer": {"transport": 5}},
        {"tiers": {"tier": "host:4GB"}},
        {"cluster": {"ray_address": "elsewhere"}},
        {"workers": {}},
    ],
)
def test_misspelt_and_bad_values_are_refused(values: Json) -> None:
    assert "don't meet the specifications of the schema" in refusal(values)


@pytest.mark.parametrize(
    ("serve", "code", "num_starts"),
    [
        ('[ "$(wc -l <starts)" -gt 2 ] && exit 0; kill -9 $$', 0, 3),
        ("exit 2", 2, 1),
        ('trap "exit 0" TERM; kill -TERM $PPID; while :; do sleep 0.1; done', 0, 1),
    ],
    ids=["killed", "refused", "told to stop"],
)
def test_the_head_starts_a_server_that_was_killed_again(tmp_path: Path, serve: str, code: int, num_starts: int) -> None:
    """Its workers run on, on other machines. The commands here stand for Ray and Tandem."""
    for name, body in {"ray": "", "tandem": f'echo "$*" >>starts; {serve}'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "starts").touch()
    finished = subprocess.run(
        ["bash", "-c", scripts(render())["head.sh"]],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    starts = (tmp_path / "starts").read_text().splitlines()
    assert (finished.returncode, len(starts)) == (code, num_starts), finished.stderr
    assert all(start.startswith("serve --ray-address=auto") for start in starts)


@pytest.mark.parametrize("values", [GROWING, EVERYTHING | GROWING], ids=["plain", "everything"])
def test_rays_autoscaler_reads_the_servers_bounds_from_the_raycluster(values: Json) -> None:
    """KubeRay's operator gives Ray's autoscaler the whole resource; what Ray makes of it is Ray's own code."""
    manifests = render(values)
    assert not [one for one in manifests if one["kind"] == "StatefulSet"]
    cluster = find(manifests, "RayCluster", "release")
    assert cluster["spec"]["enableInTreeAutoscaling"] is True
    config = _derive_autoscaling_config_from_ray_cr(cluster | {"metadata": cluster["metadata"] | {"namespace": "n"}})
    workers = config["available_node_types"]["workers"]
    assert (workers["min_workers"], workers["max_workers"]) == (2, 6)
    assert {name: workers["resources"][name] for name in ("CPU", "GPU")} == {"CPU": 3, "GPU": 1}
    assert config["available_node_types"]["headgroup"]["resources"]["CPU"] == 0
    assert (config["idle_timeout_minutes"], cluster["spec"]["workerGroupSpecs"][0]["replicas"]) == (1.5, 3)
    flags = serve_flags(manifests)
    assert (flags["min_workers"], flags["max_workers"]) == (2, 6)
    assert "--no-monitor" in scripts(manifests)["head.sh"], "the operator starts the autoscaler"
    assert "--num-gpus=1 --num-cpus=3" in scripts(manifests)["worker.sh"]


def test_pods_of_a_raycluster_are_those_of_the_statefulsets() -> None:
    plain = GROWING | {"worker": GROWING["worker"] | {"autoscaling": {"enabled": False}}}
    spec, still = find(render(GROWING), "RayCluster", "release")["spec"], render(plain)
    templates = {"head": spec["headGroupSpec"]["template"], "worker": spec["workerGroupSpecs"][0]["template"]}
    for name, template in templates.items():
        fixed = find(still, "StatefulSet", f"release-{name}")["spec"]["template"]
        validate({"apiVersion": "v1", "kind": "Pod", **template})
        assert template["metadata"]["labels"] == fixed["metadata"]["labels"], "services and policies find it"
        template["spec"]["volumes"] = [one for one in template["spec"]["volumes"] if one["name"] != "kubernetes-access"]
        assert template["spec"] == fixed["spec"]


def test_only_rays_autoscaler_may_ask_kubernetes() -> None:
    spec = find(render(GROWING), "RayCluster", "release")["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["autoscalerOptions"]["volumeMounts"]}
    assert mounts["kubernetes-access"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    for template in (spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]):
        assert template["spec"]["automountServiceAccountToken"] is False
        (container,) = template["spec"]["containers"]
        assert "kubernetes-access" not in {mount["name"] for mount in container["volumeMounts"]}
    names = {volume["name"] for volume in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    assert set(mounts) <= names
    environment = {entry["name"]: entry["value"] for entry in spec["autoscalerOptions"]["env"]}
    assert environment["RAY_AUTH_TOKEN_PATH"].startswith(mounts["ray-token"])
    assert spec["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("setting", ["max_workers", "num_cpus_per_worker"])
def test_a_raycluster_needs_to_know_what_grows(setting: str) -> None:
    assert f"needs cluster.{setting}" in refusal(GROWING | {"cluster": GROWING["cluster"] | {setting: 0}})
