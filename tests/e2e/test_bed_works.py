"""The bed behaves like other clusters: volumes shared between nodes, names and devices; and its faults
work."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE

from bed import images
from bed.api import ApiError, Object
from bed.fixtures import Cluster
from bed.places import API_SERVICE, NODES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
WRITER = """
import os, pathlib, socket, time
name = os.environ["HOSTNAME"]
pathlib.Path("/data", name).write_text("here")
while len(list(pathlib.Path("/data").iterdir())) < 2:
    time.sleep(0.05)
address = socket.getaddrinfo("kubernetes.default.svc.cluster.local", None)[0][4][0]
print(f"uid={os.getuid()} address={address} files={sorted(os.listdir('/data'))}", flush=True)
time.sleep(3600)
"""
FILLER = """
import errno, os, time
try:
    with open("/data/big", "wb") as file:
        while True:
            file.write(bytes(2**20))
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
time.sleep(3600)
"""


def wait_for(look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return the result of `look` as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "not so after a long while"
        time.sleep(0.1)
    return found


class Room:
    """A namespace and the tests' operations in it."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = cluster.api
        self.storage_class = cluster.storage_class
        self.name = f"bed-{uuid.uuid4().hex[:8]}"
        self.path = f"/api/v1/namespaces/{self.name}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": self.name}})
        wait_for(lambda: self.api.is_there(f"{self.path}/serviceaccounts/default"))

    def claim(self, name: str, size: str) -> None:
        spec = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": size}},
            "storageClassName": self.storage_class,
        }
        self.api.create(
            f"{self.path}/persistentvolumeclaims",
            {"metadata": {"name": name}, "spec": spec},
        )

    def pod(self, name: str, node: str, code: str, claim: str) -> None:
        container = {
            "name": "main",
            "image": images.BASE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "-c", code],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
        }
        spec: Object = {
            "nodeName": node,
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "runAsNonRoot": True,
                "fsGroup": 20001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        }
        self.api.create(f"{self.path}/pods", {"metadata": {"name": name}, "spec": spec})

    def log(self, pod: str) -> str:
        try:
            return str(self.api.get(f"{self.path}/pods/{pod}/log"))
        except ApiError:
            return ""

    def restarts(self, pod: str) -> int:
        statuses = self.api.get(f"{self.path}/pods/{pod}")["status"].get(
            "containerStatuses", []
        )
        return int(statuses[0]["restartCount"]) if statuses else 0


@pytest.fixture
def room(cluster: Cluster) -> Iterator[Room]:
    if not cluster.is_bed:
        pytest.skip("These tests are about the bed; another cluster was named.")
    made = Room(cluster)
    yield made
    made.api.delete(made.path)


def test_pods_of_both_nodes_share_a_volume_as_any_user_and_resolve_names(
    room: Room,
) -> None:
    room.claim("data", "1Gi")
    for node in NODES:
        room.pod(f"writer-{node.name}", node.name, WRITER, "data")
    for node in NODES:
        said = wait_for(lambda node=node: room.log(f"writer-{node.name}"))
        assert said == f"uid=10001 address={API_SERVICE} files=['writer-n1', 'writer-n2']\n"


def test_a_small_volume_can_become_full_and_is_deleted_with_its_claim(room: Room) -> None:
    room.claim("small", "32Mi")
    room.pod("filler", "n2", FILLER, "small")
    assert wait_for(lambda: room.log("filler")) == "ENOSPC\n"
    volume = room.api.get(f"{room.path}/persistentvolumeclaims/small")["spec"]["volumeName"]
    room.api.delete(f"{room.path}/pods/filler", gracePeriodSeconds=0)
    room.api.delete(f"{room.path}/persistentvolumeclaims/small")
    wait_for(lambda: not room.api.is_there(f"/api/v1/persistentvolumes/{volume}"))


def test_faults_of_every_kind_are_reverted_completely(room: Room, faults: Any) -> None:
    room.claim("data", "64Mi")
    for node in NODES:
        room.pod(f"writer-{node.name}", node.name, WRITER, "data")
    wait_for(lambda: room.log("writer-n1") and room.log("writer-n2"))

    faults.kill_container(room.name, "writer-n1")
    wait_for(lambda: room.restarts("writer-n1") == 1)
    faults.set_gpus("n1", 4)
    faults.kill_kubelet("n1")
    faults.kill_etcd()
    faults.kill_apiserver()
    faults.restore()
    assert (
        "example.com/gpu" not in room.api.get("/api/v1/nodes/n1")["status"]["allocatable"]
    )

    faults.restart_node("n2")
    wait_for(lambda: room.restarts("writer-n2") == 1)
    assert wait_for(lambda: room.log("writer-n2")).startswith(
        "uid=10001"
    )  # the limited volume is mounted there again
