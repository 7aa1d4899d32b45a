"""A new control plane of the bed with simulated nodes: its daemons, their CPU and memory, and readiness."""

import base64
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bed import boxes, places
from bed.api import Api
from bed.cluster import Bed
from bed.process_state import is_alive
from bed.shell import wait_until

NAMESPACE = "bench"
NUM_NODES, NODE_CPUS = 200, 32
NODE_LABEL = {"type": "kwok"}
TAINT = {"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}
"""The taint of simulated nodes, as a toleration."""
DAEMONS = {
    "kcm": "kube-controller-manager",
    "apiserver": "kube-apiserver",
    "scheduler": "kube-scheduler",
    "etcd": "etcd",
    "kwok": "kwok",
}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the process started, and its current and maximum resident memory in MiB."""

    cpu: float
    rss: float
    peak: float


class Plane:
    """One running control plane."""

    def __init__(self) -> None:
        self.kubeconfig: Path = places.KUBECONFIG
        self.keys: Path = places.pki()
        self.scratch: Path = places.work()
        self.api = Api(self.kubeconfig)

    @property
    def authority(self) -> str:
        """Return the certificate of the bed's authority, in base64."""
        return base64.b64encode((self.keys / "ca.crt").read_bytes()).decode()

    # ---- daemons -------------------------------------------------------------------------------------------

    def spawn(
        self,
        name: str,
        command: Sequence[object],
        environment: dict[str, str],
    ) -> None:
        """Start a daemon in the control plane's box, so that all operators run under the same conditions."""
        boxes.spawn(boxes.CONTROL, name, command, environment=environment)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a daemon. Returns when it has ended. Raises BedError after 30 s."""
        pid = boxes.daemon_pid(boxes.CONTROL, name)
        os.kill(pid, signal.SIGTERM)
        wait_until(
            f"the end of {name}",
            lambda: not is_alive(pid),
            seconds=30,
            pause=0.01,
        )

    def usage(self, name: str) -> Usage:
        """Return CPU and memory of a daemon. Raises BedError if it does not run."""
        pid = boxes.daemon_pid(boxes.CONTROL, DAEMONS.get(name, name))
        return read_usage(Path(f"/proc/{pid}"))

    def wait_ready(self, port: int, *, seconds: float = 60) -> float:
        """Wait until /readyz at this port of the control plane's address answers 200, and return the seconds.

        Raises BedError after ``seconds``.
        """

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(
                    f"http://{places.CONTROL_ADDRESS}:{port}/readyz", timeout=5
                ) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        return wait_until(f"/readyz at port {port}", is_ready, seconds=seconds)

    # ---- objects -------------------------------------------------------------------------------------------

    def wait_for_crds(self, names: Sequence[str]) -> None:
        """Wait until the API server serves all of these CRDs. Raises BedError after 30 s."""

        def is_served(name: str) -> bool:
            crd = self.api.get(
                f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            )
            conditions = (crd.get("status") or {}).get("conditions") or ()
            return any(
                entry["type"] == "Established" and entry["status"] == "True"
                for entry in conditions
            )

        for name in names:
            wait_until(
                f"CRD {name}",
                lambda name=name: is_served(name),
                seconds=30,
            )  # type: ignore[misc]
        time.sleep(1.0)  # its paths come a moment later

    def wait_for_claims(self, number: int) -> None:
        """Wait until ``number`` claims are bound. Raises BedError after 60 s."""
        path = collection("v1", "persistentvolumeclaims", NAMESPACE)

        def are_bound() -> bool:
            return (
                sum(
                    claim["status"].get("phase") == "Bound"
                    for claim in self.api.get(path)["items"]
                )
                == number
            )

        wait_until(
            f"{number} bound claims",
            are_bound,
            seconds=60,
            pause=0.5,
        )

    def add_nodes(self) -> None:
        """Create simulated nodes. Returns when all are Ready. Raises BedError after 120 s."""
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda number: self.api.create("/api/v1/nodes", _node(number)),
                    range(NUM_NODES),
                )
            )

        def are_ready() -> bool:
            return sum(map(_is_ready, self.api.get("/api/v1/nodes")["items"])) == NUM_NODES

        wait_until(
            f"{NUM_NODES} nodes Ready",
            are_ready,
            seconds=120,
            pause=0.5,
        )

    def wait_until_quiet(
        self, names: Sequence[str], *, level: float = 0.3, seconds: float = 60
    ) -> None:
        """Wait until these daemons together use less than `level` cores for two seconds, or until `seconds`
        have passed."""
        deadline, calm = time.monotonic() + seconds, 0
        before = sum(self.usage(name).cpu for name in names)
        while calm < 2 and time.monotonic() < deadline:
            time.sleep(1.0)
            now = sum(self.usage(name).cpu for name in names)
            calm = calm + 1 if now - before < level else 0
            before = now


@contextmanager
def fresh() -> Iterator[Plane]:
    """Start a bed of the profile kwok with all nodes and the namespace, and stop it afterwards. Raises
    BedError."""
    Bed.up("kwok")
    try:
        plane = Plane()
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        wait_until(
            "ServiceAccount default", lambda: plane.api.is_there(account), seconds=60
        )
        plane.add_nodes()
        yield plane
    finally:
        Bed.down()


def collection(version: str, plural: str, namespace: str = "") -> str:
    """Return the path of all objects of one kind."""
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"/{'apis' if '/' in version else 'api'}/{version}{inside}/{plural}"


def read_usage(process: Path) -> Usage:
    """Return CPU and memory of all threads, from the process's folder in /proc."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    sizes = dict(
        line.split(":", 1)
        for line in (process / "status").read_text().splitlines()
        if line.startswith("Vm")
    )
    mib = {key: int(value.split()[0]) / 1024 for key, value in sizes.items()}
    return Usage(
        (int(fields[11]) + int(fields[12])) / _TICKS,
        mib["VmRSS"],
        mib["VmHWM"],
    )


def busy_seconds() -> tuple[float, float]:
    """Return the busy seconds and all seconds of the machine's processors since boot."""
    numbers = [
        int(word) / _TICKS
        for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _node(number: int) -> dict[str, Any]:
    room = {"cpu": str(NODE_CPUS), "memory": "256Gi", "pods": "110"}
    return {
        "metadata": {
            "name": f"kwok-{number:03}",
            "labels": NODE_LABEL,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {
            "taints": [{"key": TAINT["key"], "value": "fake", "effect": TAINT["effect"]}]
        },
        "status": {"capacity": room, "allocatable": room},
    }


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions") or ()
    return any(
        entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions
    )
