"""Installs the operator with Helm as a user would. Tests kill, upgrade and uninstall it."""

import contextlib
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster_runs import read_patiently, wait_for
from operator_watch import count_restarts
from patience import PATIENCE

from evergrad_common.addresses import join_address

ROOT = Path(__file__).resolve().parents[2]
RELEASE, NAMESPACE = "evergrad", "evergrad-system"
SELECTOR = "app.kubernetes.io/name=evergrad,app.kubernetes.io/component=operator"


@dataclass
class Operator:
    """One release of the chart."""

    cluster: Any
    operator_image: str
    trainer_image: str
    namespace: str = NAMESPACE
    is_changed: bool = False
    """Whether the operator was installed again since the last check."""

    def helm(self, *arguments: str, seconds: float = PATIENCE + 60) -> str:
        """Run helm, and return its output."""
        command = [
            str(self.cluster.helm),
            "--kubeconfig",
            str(self.cluster.kubeconfig),
            "--namespace",
            self.namespace,
            *arguments,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, (
            f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
        )
        return done.stdout

    def upgrade(
        self,
        *,
        trainer_image: str | None = None,
        chart: Path = ROOT / "charts/evergrad",
        settings: Sequence[str] = (),
    ) -> None:
        """Install or upgrade, with ``settings`` for helm's --set, and wait until the operator is ready."""
        self.is_changed = True
        images = {
            "image": self.operator_image,
            "trainer.image": trainer_image or self.trainer_image,
        }
        values = []
        for key, image in images.items():
            repository, _, tag = image.rpartition(":")
            values += [
                "--set",
                f"{key}.repository={repository}",
                "--set-string",
                f"{key}.tag={tag}",
            ]
        if chart == ROOT / "charts/evergrad":
            # On a busy machine a response may take longer than the default of 5 s, and the API server would
            # store an object that a test expects to be refused.
            values += ["--set", "webhook.timeoutSeconds=30"]
        self.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(chart),
            "--create-namespace",
            "--wait",
            "--timeout",
            "600s",
            *values,
            *(word for setting in settings for word in ("--set", setting)),
        )

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl in the operator's namespace."""
        command = [
            str(self.cluster.kubectl),
            "--kubeconfig",
            str(self.cluster.kubeconfig),
            "--namespace",
            self.namespace,
            *arguments,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE + 60, check=False
        )
        assert done.returncode == 0 or not check, (
            f"kubectl {' '.join(arguments)}: {done.stderr}"
        )
        return done.stdout

    def pods(self) -> list[dict[str, Any]]:
        """Return all pods of the operator."""
        found: list[dict[str, Any]] = read_patiently(
            self.cluster.api,
            f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={quote(SELECTOR)}",
        )["items"]
        return found

    def pod(self) -> dict[str, Any]:
        """Return the newest pod of the operator."""
        items = self.pods()
        assert items, "the operator has no pod"
        newest: dict[str, Any] = max(
            items, key=lambda pod: pod["metadata"]["creationTimestamp"]
        )
        return newest

    def restarts(self) -> dict[str, int]:
        """Return the number of container restarts by pod."""
        return {pod["metadata"]["name"]: count_restarts(pod) for pod in self.pods()}

    def is_ready(self) -> bool:
        """Return whether a pod of the operator is ready."""
        with contextlib.suppress(AssertionError, OSError):
            pod = self.pod()
            conditions = {
                one["type"]: one["status"] for one in pod["status"].get("conditions", [])
            }
            return (
                conditions.get("Ready") == "True"
                and "deletionTimestamp" not in pod["metadata"]
            )
        return False

    def wait_until_ready(self) -> None:
        """Wait until the operator is ready after a kill or an upgrade."""
        wait_for(self.is_ready, "the operator's readiness")

    def wait_for_rollout(self) -> None:
        """Wait for the rollout of an upgrade or a rollback that was started without waiting."""
        self.kubectl("rollout", "status", "deployment", "-l", SELECTOR, "--timeout=600s")
        self.wait_until_ready()

    def kill(self, faults: Any) -> None:
        """Kill the operator with SIGKILL and replace its pod. A container that is killed repeatedly would be
        restarted after growing pauses."""
        pod = self.pod()["metadata"]
        faults.kill_container(self.namespace, pod["name"])
        self.kubectl(
            "delete", "pod", pod["name"], "--grace-period=0", "--force", "--wait=false"
        )
        wait_for(
            lambda: all(one["metadata"]["uid"] != pod["uid"] for one in self.pods()),
            "the killed operator's end",
        )
        self.wait_until_ready()

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """Run the block without an operator."""
        self.kubectl("scale", "deployment", "-l", SELECTOR, "--replicas=0")
        wait_for(lambda: not self.pods(), "the operator's end")
        try:
            yield
        finally:
            self.kubectl("scale", "deployment", "-l", SELECTOR, "--replicas=1")
            self.wait_until_ready()

    def logs(self) -> str:
        """Return the operator's log."""
        return self.kubectl("logs", "-l", SELECTOR, "--tail=-1")

    def log_of(self, pod: str, *, previous: bool = False) -> str:
        """Return the log of one pod of the operator; ``previous``: the log before its container restarted."""
        return self.kubectl(
            "logs", pod, "--tail=-1", *(["--previous"] if previous else []), check=False
        )

    def metrics(self) -> str:
        """Return the operator's /metrics."""
        pod = self.pod()
        with urllib.request.urlopen(
            f"http://{join_address(pod['status']['podIP'], 8080)}/metrics", timeout=PATIENCE
        ) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        """Uninstall the release. On a cluster that is torn down anyway, do not wait for it."""
        if not self.cluster.is_bed:
            self.helm("uninstall", RELEASE)


def install(cluster: Any) -> Operator:
    """Load the images, install the chart, and wait until the operator is ready."""
    operator_image, trainer_image = cluster.product_images()
    one = Operator(cluster, operator_image, trainer_image)
    one.upgrade()
    # The same tag may name another image than the one that an operator of an earlier session was started
    # with.
    one.kubectl("delete", "pods", "-l", SELECTOR, "--now")
    one.wait_until_ready()
    return one
