"""Kubeflow Trainer and JobSet as one side of the comparison: pinned Go modules, their manifests, with
webhooks and two managers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cluster_plane import NAMESPACE, NODE_LABEL, TAINT, Plane, collection

from bed import toolbox
from bed.pki import CURVE
from bed.shell import run

SOURCES = Path(__file__).with_name("cluster_tools")
MODULES = {"trainer": "github.com/kubeflow/trainer/v2", "jobset": "sigs.k8s.io/jobset"}
_PACKAGES = {
    "trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
    "jobset": "sigs.k8s.io/jobset",
}
_TITLES = {"trainer": "Trainer", "jobset": "JobSet"}
_WEBHOOK_PORTS = {"trainer": 9443, "jobset": 9444}
_HEALTH_PORTS = {"trainer": 8081, "jobset": 8082}
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_KINDS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}


class Kubeflow:
    """TrainJobs with four nodes, managed by both managers as released, except that leader election is off."""

    name = "kubeflow"
    processes = ("trainer", "jobset")
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
    resource = "trainjobs"

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._folder = plane.scratch / "kubeflow"

    @staticmethod
    def version() -> str:
        """Return the pinned releases, for example ``Trainer v2.3.0, JobSet v0.12.0``."""
        return ", ".join(f"{title} {pinned(name)}" for name, title in _TITLES.items())

    @staticmethod
    def build() -> None:
        """Compile both managers unless they are cached. Raises BedError."""
        for name in _PACKAGES:
            binary(name)

    def prepare(self, *, runs: int) -> None:
        """Create CRDs, the certificate, both managers and their webhooks, and the released torch runtime for
        kwok's nodes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        crds = list(_read("trainer", "manifests/base/crds")) + list(
            _read("jobset", "config/components/crd/bases")
        )
        for document in crds:
            self._put(document)
        self._plane.wait_for_crds([document["metadata"]["name"] for document in crds])
        self._sign()
        self._configure()
        self.start()
        for document in self._webhooks():
            self._put(document)
        (runtime,) = _read("trainer", "manifests/base/runtimes/torch_distributed.yaml")
        (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        pod |= {"tolerations": [TAINT], "nodeSelector": NODE_LABEL}
        pod["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
        self._plane.api.create(
            collection("trainer.kubeflow.org/v1alpha1", "clustertrainingruntimes"), runtime
        )

    def start(self) -> None:
        """Start both managers. Returns when they are ready."""
        for name in self.processes:
            environment = {
                "KUBECONFIG": str(self._plane.kubeconfig),
                "TMPDIR": str(self._folder),
            }
            words = [binary(name), f"--config={self._folder / name}.yaml"]
            words += (
                ["--zap-log-level=2"] if name == "trainer" else ["--metrics-bind-address=0"]
            )
            self._plane.spawn(name, words, environment)
        for name in self.processes:
            self._plane.wait_ready(_HEALTH_PORTS[name])

    def body(self, number: int) -> dict[str, Any]:
        """Return the TrainJob with this number."""
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": f"run-{number:04}", "namespace": NAMESPACE},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {"numNodes": 4},
            },
        }

    @staticmethod
    def run_of(labels: dict[str, str]) -> str | None:
        """Return the run that a pod with these labels trains for, or None for any other pod."""
        return labels.get(_JOBSET_LABEL)

    @staticmethod
    def owns(verb: str, resource: str) -> bool:
        """Return whether only one of the two managers writes this. The Job controller in kcm writes pods.

        Trainer applies a ConfigMap for each TrainJob: the runtime at the time of the TrainJob's creation.
        """
        return resource.startswith(("jobsets", "trainjobs")) or (verb, resource) in (
            ("POST", "jobs"),
            ("POST", "services"),
            ("APPLY", "configmaps"),
        )

    def count_events(self) -> float:
        """Return 0: neither manager posts events for runs that start. The Job controller's events count for
        kcm."""
        return 0.0

    # ---- installation --------------------------------------------------------------------------------------

    def _put(self, document: dict[str, Any]) -> None:
        self._plane.api.create(_KINDS[document["kind"]], document)

    def _sign(self) -> None:
        """Write the webhooks' certificate, signed by the bed's authority, to the path that both managers
        read."""
        keys, folder = self._plane.keys, self._folder / "k8s-webhook-server/serving-certs"
        folder.mkdir(parents=True, exist_ok=True)
        words: list[object] = [
            "openssl",
            "req",
            "-x509",
            "-CA",
            keys / "ca.crt",
            "-CAkey",
            keys / "ca.key",
            *CURVE,
        ]
        words += ["-subj", "/CN=webhooks", "-addext", "basicConstraints=critical,CA:FALSE"]
        words += [
            "-addext",
            "extendedKeyUsage=serverAuth",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ]
        run([*words, "-keyout", folder / "tls.key", "-out", folder / "tls.crt"])
        self._certificates = folder

    def _configure(self) -> None:
        """Write the released configurations with the bed's differences: certificates, addresses, and no
        leader election."""
        (trainer,) = _read(
            "trainer", "manifests/base/manager/controller_manager_config.yaml"
        )
        trainer["certManagement"] = {"enable": False}
        trainer["leaderElection"]["leaderElect"] = False
        (jobset,) = _read(
            "jobset", "config/components/manager/controller_manager_config.yaml"
        )
        jobset["internalCertManagement"] = {"enable": False}
        jobset["leaderElection"]["leaderElect"] = False
        jobset["webhook"] = {"certDir": str(self._certificates)}
        for name, content in {"trainer": trainer, "jobset": jobset}.items():
            content.setdefault("health", {})["healthProbeBindAddress"] = (
                f":{_HEALTH_PORTS[name]}"
            )
            content.setdefault("webhook", {})["port"] = _WEBHOOK_PORTS[name]
            (self._folder / f"{name}.yaml").write_text(json.dumps(content))

    def _webhooks(self) -> Iterator[dict[str, Any]]:
        """Yield all released webhooks with URLs. Webhooks for pods receive only pods of JobSets, as in
        JobSet's own patch."""
        authority = self._plane.authority
        for name, place in (
            ("trainer", "manifests/base/webhook/manifests.yaml"),
            ("jobset", "config/components/webhook/manifests.yaml"),
        ):
            for document in _read(name, place):
                document["metadata"]["name"] = f"{name}-{document['kind'].lower()}"
                for webhook in document["webhooks"]:
                    service = webhook["clientConfig"].pop("service")
                    url = f"https://127.0.0.1:{_WEBHOOK_PORTS[name]}{service['path']}"
                    webhook["clientConfig"] = {"url": url, "caBundle": authority}
                    if "pod" in webhook["name"]:
                        webhook["objectSelector"] = {
                            "matchExpressions": [
                                {"key": _JOBSET_LABEL, "operator": "Exists"}
                            ]
                        }
                yield document


def binary(name: str) -> Path:
    """Return the path of `trainer` or `jobset`; build it unless it is cached. Raises BedError."""
    for known, package in _PACKAGES.items():
        toolbox.TOOLS.setdefault(
            known, toolbox.Tool({known: package}, minutes="1 to 3 minutes", sources=SOURCES)
        )
    return toolbox.build(name) / name


def pinned(name: str) -> str:
    """Return the version of `trainer` or `jobset` that its go.mod requires. Raises LookupError if it requires
    none."""
    text = (SOURCES / name / "go.mod").read_text(encoding="utf-8")
    found = re.search(rf"^\s*{re.escape(MODULES[name])} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"{SOURCES / name / 'go.mod'}: requires no {MODULES[name]}.")
    return found[1]


def _read(name: str, place: str) -> Iterator[dict[str, Any]]:
    """Yield the YAML documents of a file, or of all files in a folder, of one of the two modules."""
    words = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", MODULES[name]]
    target = Path(run(words, directory=SOURCES / name).strip()) / place
    for file in sorted(target.glob("*.yaml")) if target.is_dir() else [target]:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if document and document.get("kind") != "Kustomization":
                yield document
