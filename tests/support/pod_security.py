"""The Restricted profile of Kubernetes' Pod Security Standards (v1.34, with Baseline) as a function of a pod's spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(pod: Spec, annotations: Mapping[str, str] = {}) -> list[str]:
    """What the profile's admission would refuse. Empty = the pod may run in a namespace that enforces it."""
    containers = [one for name in ("initContainers", "containers", "ephemeralContainers") for one in pod.get(name, ())]
    assert containers, "a pod has a container"
    found = [*_of_pod(pod, annotations), *_of_security("pod", pod.get("securityContext", {}))]
    for container in containers:
        found += [f"{container['name']}: {text}" for text in _of_container(container, pod.get("securityContext", {}))]
    return found


def _of_pod(pod: Spec, annotations: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name} is on" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    for volume in pod.get("volumes", ()):
        kinds = volume.keys() - {"name"}
        if not kinds or not kinds <= _VOLUMES:
            yield f"volume {volume['name']} is of {sorted(kinds)}"
    for sysctl in pod.get("securityContext", {}).get("sysctls", ()):
        if sysctl["name"] not in _SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    for name, value in annotations.items():
        is_allowed = value in ("", "runtime/default") or value.startswith("localhost/")
        if name.startswith("container.apparmor.security.beta.kubernetes.io/") and not is_allowed:
            yield f"AppArmor {value}"


def _of_container(container: Spec, pod: Spec) -> Iterator[str]:
    own = container.get("securityContext", {})
    yield from _of_security("container", own)
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if "seccompProfile" not in own and "seccompProfile" not in pod:
        yield "no seccomp profile"
    yield from (f"host port {port['hostPort']}" for port in container.get("ports", ()) if port.get("hostPort"))
    yield from _hosts(container)


def _of_security(of: str, context: Spec) -> Iterator[str]:
    """What is forbidden in the securityContext of a pod and of a container alike."""
    if context.get("runAsUser") == 0:
        yield f"{of} runs as root"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
        yield f"{of} has no seccomp confinement"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
        yield f"{of} has no AppArmor confinement"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield f"{of} is a host process"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{of} has SELinux options"


def _hosts(container: Spec) -> Iterator[str]:
    """Probes and hooks that go to another host."""
    hooks = [container.get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    hooks += container.get("lifecycle", {}).values()
    for hook in hooks:
        for action in ("httpGet", "tcpSocket"):
            if isinstance(hook, Mapping) and hook.get(action, {}).get("host"):
                yield f"{action} to host {hook[action]['host']}"
