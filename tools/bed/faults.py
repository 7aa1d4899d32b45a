"""Injects faults into a bed: containers, nodes, links, kubelets, the API server and etcd."""

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
    """A process of a container, with its process ID on the machine."""

    pid: int
    command: str

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, signal)


class Faults:
    """Injects faults into a running bed. `restore` undoes all faults."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._devices: set[tuple[str, str]] = set()

    # Containers

    def processes(
        self, namespace: str, pod: str, container: str | None = None
    ) -> list[Process]:
        """Return the processes of a pod's container (default: the first container), the main process first.

        Raises BedError if no process runs.
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
        """Send SIGKILL to a container's main process, as the kernel does. The exit code is 137."""
        self.processes(namespace, pod, container)[0].kill()

    # Nodes

    def kill_node(self, name: str) -> None:
        """Power off the node: all its processes end, including containers and the kubelet."""
        boxes.kill(node_named(name).name)

    def start_node(self, name: str, *, wait: bool = True) -> None:
        """Power on the node, with the same disk and no running containers.

        Returns when the node is Ready, or immediately if `wait` is False.
        """
        entry = node_named(name)
        node.start_box(entry)
        storage.mount_all(name)
        node.start_kubelet(entry)
        node.start_proxy(entry)
        if wait:
            self.wait_ready(name)

    def restart_node(self, name: str, *, wait: bool = True) -> None:
        """Reboot the node: power it off and on."""
        self.kill_node(name)
        self.start_node(name, wait=wait)

    def freeze_node(self, name: str) -> None:
        """Freeze all processes of the node, including containers."""
        cgroups.set_frozen(node_named(name).name, True)

    def thaw_node(self, name: str, *, wait: bool = True) -> None:
        """Resume all processes of a frozen node."""
        cgroups.set_frozen(node_named(name).name, False)
        if wait:
            self.wait_ready(name)

    def partition_node(self, name: str) -> None:
        """Disconnect the node from the network. Its processes continue to run."""
        boxes.network(
            boxes.pid_of(boxes.CONTROL), [f"link set v{node_named(name).name} down"]
        )

    def heal_node(self, name: str, *, wait: bool = True) -> None:
        """Reconnect the node."""
        boxes.network(
            boxes.pid_of(boxes.CONTROL), [f"link set v{node_named(name).name} up"]
        )
        if wait:
            self.wait_ready(name)

    def free_pods(self, name: str) -> None:
        """Add the taint out-of-service to a dead node, so that its pods are removed. See unfree_pods."""
        self._set_taints(
            name,
            lambda taints: [
                *taints,
                {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"},
            ],
        )

    def unfree_pods(self, name: str) -> None:
        """Remove the taint out-of-service from the node."""
        self._set_taints(name, lambda taints: taints)

    def set_gpus(self, name: str, count: int, *, resource: str = "example.com/gpu") -> None:
        """Set the number of fake devices of a node; 0 removes them. Returns when they are allocatable."""
        path = f"/api/v1/nodes/{node_named(name).name}"
        if count:
            self._api.patch(
                f"{path}/status", {"status": {"capacity": {resource: str(count)}}}
            )
            self._devices.add((name, resource))
        else:
            # A merge patch does not fail if the kubelet has already removed the devices.
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
        """Send SIGKILL to the kubelet only. Its pods continue to run."""
        boxes.kill_daemon(node_named(name).name, "kubelet")

    def start_kubelet(self, name: str, *, wait: bool = True) -> None:
        """Start the kubelet again."""
        node.start_kubelet(node_named(name))
        if wait:
            self.wait_ready(name)

    def kill_apiserver(self) -> None:
        """Send SIGKILL to the API server."""
        boxes.kill_daemon(boxes.CONTROL, "kube-apiserver")

    def start_apiserver(self) -> None:
        """Start the API server again. Returns when it is ready."""
        control_plane.start_apiserver(state.read().profile)
        control_plane.wait_for_apiserver(self._api)

    def kill_etcd(self) -> None:
        """Send SIGKILL to etcd. The API server continues to run but cannot answer requests that need etcd."""
        boxes.kill_daemon(boxes.CONTROL, "etcd")

    def start_etcd(self) -> None:
        """Start etcd again. Returns when the API server is ready."""
        control_plane.start_etcd()
        control_plane.wait_for_apiserver(self._api)

    # Afterwards

    def wait_ready(self, name: str, *, seconds: float = 600) -> float:
        """Wait until the node reports Ready after this call and has no failure taints.

        Returns the seconds that this took.
        """
        entry, now = node_named(name), datetime.now(UTC)

        def is_well() -> bool:
            return node.is_ready(self._api, entry, since=now) and not self._troubled(entry)

        return wait_until(f"{name} Ready", is_well, seconds=seconds)

    def restore(self) -> None:
        """Undo all faults: start, thaw, reconnect, untaint and uncordon. Wait until both nodes are Ready."""
        _start_if_dead(boxes.CONTROL, "etcd", control_plane.start_etcd)
        if not _is_running(boxes.CONTROL, "kube-apiserver"):
            self.start_apiserver()
        control_plane.wait_for_apiserver(self._api)
        for entry in NODES:
            self._restore_node(entry)
        for entry in NODES:
            self.wait_ready(entry.name)
            # A kubelet that has just started registers each device that it finds on its node with the
            # quantity 0. Remove these devices afterwards.
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
    """Return the process's pid in its container. The container's main process has the lowest pid there.

    Pids of the machine start again at low numbers after an overflow, so a child may have a lower one there.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        # The process ended meanwhile.
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
