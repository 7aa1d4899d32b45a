"""The *restricted* level of Pod Security, as in
https://kubernetes.io/docs/concepts/security/pod-security-standards/ (1.34)."""

from collections.abc import Iterator, Mapping
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
}


def violations(pod: Mapping[str, Any]) -> list[str]:
    """Return each rule that the pod violates, as a text; empty for a pod that may run in an enforcing
    namespace."""
    spec = pod["spec"]
    return [
        *_of_pod(spec),
        *(
            text
            for container in _containers(spec)
            for text in _of_container(container, spec)
        ),
    ]


def _containers(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        one
        for key in ("containers", "initContainers", "ephemeralContainers")
        for one in spec.get(key, ())
    ]


def _of_pod(spec: Mapping[str, Any]) -> Iterator[str]:
    security = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(key) and key != "shareProcessNamespace":
            yield key
    for volume in spec.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']}: {kinds}"
    if security.get("runAsUser") == 0:
        yield "runAsUser 0"
    for sysctl in security.get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    if security.get("seLinuxOptions", {}).get("type", "") not in (
        "",
        "container_t",
        "container_init_t",
        "container_kvm_t",
    ):
        yield "seLinuxOptions"
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    if security.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "appArmorProfile"


def _of_container(container: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    own, pod, name = (
        container.get("securityContext", {}),
        spec.get("securityContext", {}),
        container["name"],
    )
    if own.get("privileged"):
        yield f"{name}: privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield f"{name}: capabilities.drop"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities.add"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield f"{name}: runAsNonRoot"
    if own.get("runAsUser") == 0:
        yield f"{name}: runAsUser 0"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield f"{name}: seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    for port in container.get("ports", ()):
        if port.get("hostPort"):
            yield f"{name}: hostPort"
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        if container.get(kind, {}).get("httpGet", {}).get("host") or container.get(
            kind, {}
        ).get("tcpSocket", {}).get("host"):
            yield f"{name}: {kind} names a host"
