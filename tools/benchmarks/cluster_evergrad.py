"""Evergrad's operator as one side of the comparison, started from the virtual environment as the chart starts
it."""

import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from cluster_plane import NAMESPACE, NODE_LABEL, TAINT, Plane, collection

from bed import product_images
from bed.places import CONTROL_ADDRESS, REPOSITORY
from bed.shell import run

RUNS_PER_CLAIM = 25
"""Number of runs that share a claim, as in a team.

Each run adds an annotation to its claim, so a single claim for 1,000 runs would distort the measurement.
"""
_PORT = 8080


class Evergrad:
    """TrainingRuns with four nodes. The pods of their coordinators are additional, and are counted."""

    name = "evergrad"
    processes = ("evergrad",)
    path = f"/apis/evergrad.dev/v1alpha1/namespaces/{NAMESPACE}/trainingruns"
    resource = "trainingruns"

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    @staticmethod
    def version() -> str:
        """Return the commit of the operator."""
        words = [
            "git",
            "-C",
            str(REPOSITORY),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=12",
        ]
        return run(words).strip()

    @staticmethod
    def build() -> None:
        """Compile the virtual environment's modules, as in the image; otherwise each start would compile
        them."""
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", sysconfig.get_path("purelib")],
            check=False,
        )

    def prepare(self, *, runs: int) -> None:
        """Create the CRD, manually bound claims (kwok has no provisioner) and the operator."""
        api = self._plane.api
        crd = yaml.safe_load(
            (REPOSITORY / "crds/trainingrun.yaml").read_text(encoding="utf-8")
        )
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        self._plane.wait_for_crds([crd["metadata"]["name"]])
        names = sorted({_claim(number) for number in range(runs)})
        for name in names:
            api.create("/api/v1/persistentvolumes", _volume(name))
            api.create(
                collection("v1", "persistentvolumeclaims", NAMESPACE), _claim_body(name)
            )
        self._plane.wait_for_claims(len(names))
        self.start()

    def start(self) -> None:
        """Start the operator. Returns when it is ready."""
        words = [
            Path(sys.executable),
            "-m",
            "evergrad_operator",
            "--all-namespaces",
            "--lease-namespace",
            NAMESPACE,
        ]
        words += ["--host", CONTROL_ADDRESS, "--port", str(_PORT)]
        words += [
            "--trainer-image",
            product_images.name_of("trainer", product_images.version()),
            "--operator-image",
            product_images.name_of("operator", product_images.version()),
        ]
        environment = {"KUBECONFIG": str(self._plane.kubeconfig), "PYTHONSAFEPATH": "1"}
        self._plane.spawn("evergrad", words, environment)
        self._plane.wait_ready(_PORT)

    def body(self, number: int) -> dict[str, Any]:
        """Return the TrainingRun with this number."""
        return {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": f"run-{number:04}", "namespace": NAMESPACE},
            "spec": {
                "nodes": {"min": 4, "max": 4},
                "resources": {"requests": {"cpu": "1"}},
                "storage": {"claimName": _claim(number)},
                "template": {"nodeSelector": NODE_LABEL, "tolerations": [TAINT]},
                "training": {
                    "model": {
                        "config": {
                            "model_type": "llama",
                            "hidden_size": 64,
                            "num_hidden_layers": 2,
                        }
                    },
                    "data": {
                        "sources": [{"name": "docs", "path": "documents.jsonl"}],
                        "sequenceLength": 128,
                    },
                    "batching": {"globalBatchSize": 8, "microBatchSize": 2},
                    "optimizer": {"learningRate": 0.003},
                    "horizon": {"steps": 1000},
                },
            },
        }

    @staticmethod
    def run_of(labels: dict[str, str]) -> str | None:
        """Return the run that a pod with these labels trains for, or None for any other pod, including
        coordinators."""
        return (
            labels.get("evergrad.dev/run")
            if labels.get("evergrad.dev/role") == "node"
            else None
        )

    @staticmethod
    def owns(verb: str, resource: str) -> bool:
        """Return whether only the operator writes this."""
        children = ("configmaps", "services", "networkpolicies", "poddisruptionbudgets")
        is_pod = resource == "pods" and verb in ("POST", "DELETE")
        return (
            verb == "APPLY"
            or resource.startswith("trainingruns")
            or is_pod
            or (resource in children and verb == "POST")
        )

    def count_events(self) -> float:
        """Return the operator's own count of posted events, because the API server does not record the
        sender."""
        with urllib.request.urlopen(
            f"http://{CONTROL_ADDRESS}:{_PORT}/metrics", timeout=10
        ) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("evergrad_operator_events_total{")
        )


def _claim(number: int) -> str:
    return f"data-{number // RUNS_PER_CLAIM:02}"


def _volume(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Ti"},
            "claimRef": {"namespace": NAMESPACE, "name": name},
            "hostPath": {"path": "/nowhere"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
        },
    }


def _claim_body(name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {**spec, "storageClassName": "", "volumeName": name},
    }
