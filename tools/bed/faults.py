"""What can go wrong with a cluster, done on purpose: containers, nodes, links, kubelets, API
server and etcd."""

import os
import signal as signals
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bed import boxes, cgroups, control_plane, node, state, storage
from bed.api import Api, ApiError
from bed.places import CGROUPS, NAME, NODES, Node, node_named
from bed.shell import BedError, wait_until

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


@dataclass(frozen=True)
class Process:
    """A process of a container, seen from outside."""

    pid: int
    command: str

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, signal)


class Faults:
    """Faults of a bed that is up. `restore` undoes whatever was done."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._devices: set[tuple[str, str]] = set()

    # Containers

    def processes(
        self, namespace: str, pod: str, container: str | None = None
    ) -> list[Process]:
        """The processes of a pod's container (by default its first), the main one first.

        BedError where none runs.
        """
        found = self._api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        statuses = found["status"].get("containerStatuses", []) + found["status"].get(
            "initContainerStatuses", []
        )
        chosen = [
            entry
            for entry in statuses
            if container in (None, entry["name"]) and entry.get("containerID")
        ]
        if not chosen:
            raise BedError(
                f"{namespace}/{pod}: no container {container or ''} has been started."
            )
        identity = chosen[0]["containerID"].rpartition("/")[2]
        box = found["spec"]["nodeName"]
        folder = next((CGROUPS / "pids" / NAME / box).glob(f"kubepods/**/{identity}"), None)
        pids = (
            sorted(cgroups.pids_in(folder / "cgroup.procs"), key=_pid_inside)
            if folder
            else []
        )
        if not pids:
            raise BedError(
                f"{namespace}/{pod}: nothing runs in container {chosen[0]['name']}."
            )
        return [Process(pid, _command(pid)) for pid in pids]

    def kill_container(
        self, namespace: str, pod: str, container: str | None = None
    ) -> None:
        """SIGKILL of a container's main process, as the kernel or an operator of the node would: exit code
        137."""
        self.processes(namespace, pod, container)[0].kill()

    # Nodes

    def kill_node(self, name: str) -> None:
        """Power off: containers, kubelet and all end at once."""
        boxes.kill(node_named(name).name)

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Power on: the same disk, nothing running.

        Returns when the node is Ready, unless told not to wait.
        """
        entry = node_named(name)
        node.start_box(entry)
        storage.mount_all(name)
        node.start_kubelet(entry)
        node.start_proxy(entry)
        if wait:
            self.wait_ready(name)

    def restart_node(self, name: str, *, wait: bool = True) -> None:
        """A reboot: off, and on at once."""
        self.kill_node(name)
        self.start_node(name, wait=wait)

    def freeze_node(self, name: str) -> None:
        """Every process of the node stops, containers included; none of them notices."""
        cgroups.set_frozen(node_named(name).name, True)

    def thaw_node(self, name: str, *, wait: bool = True) -> None:
        """Every process goes on where it stopped."""
        cgroups.set_frozen(node_named(name).name, False)
        if wait:
            self.wait_ready(name)

    def partition_node(self, name: str) -> None:
        """The node's cable is out: nobody reaches it, what runs there runs on."""
        boxes.network(
            boxes.pid_of(boxes.CONTROL), [f"link set v{node_named(name).name} down"]
        )

    def heal_node(self, name: str, *, wait: bool = True) -> None:
        """The cable is in again."""
        boxes.network(
            boxes.pid_of(boxes.CONTROL), [f"link set v{node_named(name).name} up"]
        )
        if wait:
            self.wait_ready(name)

    def free_pods(self, name: str) -> None:
        """Say that a dead node stays dead (taint out-of-service), so that its pods are removed; see
        unfree_pods."""
        self._set_taints(
            name,
            lambda taints: [
                *taints,
                {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"},
            ],
        )

    def unfree_pods(self, name: str) -> None:
        """Take that taint away."""
        self._set_taints(name, lambda taints: taints)

    def set_gpus(self, name: str, count: int, *, resource: str = "example.com/gpu") -> None:
        """Let the node offer made-up devices; 0 takes them away. Returns when they are allocatable."""
        path = f"/api/v1/nodes/{node_named(name).name}"
        if count:
            self._api.patch(
                f"{path}/status", {"status": {"capacity": {resource: str(count)}}}
            )
            self._devices.add((name, resource))
        else:
            # No error where the kubelet has just taken them away itself.
            gone = {part: {resource: None} for part in ("capacity", "allocatable")}
            self._api.patch(f"{path}/status", {"status": gone})
            self._devices.discard((name, resource))
        expected = str(count) if count else None
        wait_until(
            f"{count} {resource} on {name}",
            lambda: self._api.get(path)["status"]["allocatable"].get(resource) == expected,
            seconds=600,
        )

    # Daemons

    def kill_kubelet(self, name: str) -> None:
        """SIGKILL of the kubelet alone: its pods run on."""
        boxes.kill_daemon(node_named(name).name, "kubelet")

    def start_kubelet(self, name: str, *, wait: bool = True) -> None:
        """Start it again."""
        node.start_kubelet(node_named(name))
        if wait:
            self.wait_ready(name)

    def kill_apiserver(self) -> None:
        """SIGKILL of the API server."""
        boxes.kill_daemon(boxes.CONTROL, "kube-apiserver")

    def start_apiserver(self) -> None:
        """Start it again; returns when it is ready."""
        control_plane.start_apiserver(state.read().profile)
        control_plane.wait_for_apiserver(self._api)

    def kill_etcd(self) -> None:
        """SIGKILL of etcd: the API server stays and answers nothing that needs it."""
        boxes.kill_daemon(boxes.CONTROL, "etcd")

    def start_etcd(self) -> None:
        """Start it again; returns when the API server is ready."""
        control_plane.start_etcd()
        control_plane.wait_for_apiserver(self._api)

    # Afterwards

    def wait_ready(self, name: str, *, seconds: float = 600) -> float:
        """Until the node is Ready by a word it said after this call, and its taints of trouble are gone; the
        seconds it took."""
        entry, now = node_named(name), datetime.now(UTC)

        def is_well() -> bool:
            return node.is_ready(self._api, entry, since=now) and not self._troubled(entry)

        return wait_until(f"{name} Ready", is_well, seconds=seconds)

    def restore(self) -> None:
        """Everything back: what was killed is started, thawed, connected, untainted, uncordoned; both nodes
        Ready."""
        _start_if_dead(boxes.CONTROL, "etcd", control_plane.start_etcd)
        if not _is_running(boxes.CONTROL, "kube-apiserver"):
            self.start_apiserver()
        control_plane.wait_for_apiserver(self._api)
        for entry in NODES:
            self._restore_node(entry)
        for entry in NODES:
            self.wait_ready(entry.name)
            # A kubelet that has just been started writes down with none each device that it has found with
            # its node as it registers: they are taken away behind that.
            for name, resource in sorted(self._devices):
                if name == entry.name:
                    self.set_gpus(name, 0, resource=resource)
            self.unfree_pods(entry.name)
            self._api.patch(
                f"/api/v1/nodes/{entry.name}", {"spec": {"unschedulable": None}}
            )

    def _restore_node(self, entry: Node) -> None:
        if not boxes.is_up(entry.name):
            self.start_node(entry.name, wait=False)
            return
        cgroups.set_frozen(entry.name, False)
        self.heal_node(entry.name, wait=False)
        _start_if_dead(entry.name, "kubelet", lambda: node.start_kubelet(entry))

    def _set_taints(self, name: str, change: Any) -> None:
        path = f"/api/v1/nodes/{node_named(name).name}"
        for _ in range(5):
            found = self._api.get(path)
            taints = found["spec"].get("taints", [])
            wanted = change([taint for taint in taints if taint["key"] != OUT_OF_SERVICE])
            if wanted == taints:
                return
            version = found["metadata"]["resourceVersion"]
            try:
                self._api.patch(
                    path,
                    {"metadata": {"resourceVersion": version}, "spec": {"taints": wanted}},
                )
                return
            except ApiError as error:
                if error.status != 409:
                    raise
        raise BedError(f"{name}: its taints change faster than they can be written.")

    def _troubled(self, entry: Node) -> bool:
        taints = self._api.get(f"/api/v1/nodes/{entry.name}")["spec"].get("taints", [])
        return any(
            taint["key"]
            in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
            for taint in taints
        )


def _is_running(box: str, name: str) -> bool:
    try:
        boxes.daemon_pid(box, name)
    except BedError:
        return False
    return True


def _start_if_dead(box: str, name: str, start: Any) -> None:
    if not _is_running(box, name):
        start()


def _pid_inside(pid: int) -> int:
    """The process id that it has in its container, where the main process has the least.

    The machine's own numbers begin again once they are used up, so that a child may have a lower one.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        # It ended meanwhile.
        return sys.maxsize
    (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""
