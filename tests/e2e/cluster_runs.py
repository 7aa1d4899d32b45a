"""Helpers for runs on a cluster: apply a TrainingRun, watch it, read its volume, and compare it with an
undisturbed local run."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from patience import PATIENCE

from bed.api import ApiError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples/quickstart"
"""Folder of the quickstart example."""
GROUP = "evergrad.dev"
RESOURCE = f"trainingruns.{GROUP}"
_STARTS = {
    "trainingruns": f"/apis/{GROUP}/v1alpha1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
}
_WITHOUT_NAMESPACE = ("persistentvolumes",)
Rows = dict[int, dict[str, Any]]

ENDLESS = 100_000
"""Number of steps of a run that must not complete before its test has observed the expected event, even on a
fast machine."""
CHECKPOINT_INTERVAL = 50
WARMUP_STEPS = 25
"""Number of warm-up steps. It does not depend on the horizon, so a run and its reference train alike."""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TRAINING: dict[str, Any] = {
    "recipe": "pretrain",
    "model": {"config": MODEL},
    "tokenizer": {"type": "byte"},
    "data": {
        "sources": [
            {"name": "docs", "type": "jsonl", "path": "/documents/documents.jsonl"}
        ],
        "sequenceLength": 128,
    },
    "batching": {"globalBatchSize": 16, "microBatchSize": 4},
    "optimizer": {"type": "adamw", "learningRate": 1e-3},
    "schedule": {"type": "wsd"},
    "checkpoint": {"every": {"steps": CHECKPOINT_INTERVAL}, "keep": 2},
    "logging": {"every": {"steps": 50}},
    "runtime": {"precision": "fp32"},
    "reproducibility": {"elastic": "exact"},
}
SPEC: dict[str, Any] = {
    "nodes": {"min": 1, "max": 2},
    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    "storage": {"size": "1Gi"},
    "template": {
        "volumes": [{"name": "documents", "configMap": {"name": "documents"}}],
        "volumeMounts": [{"name": "documents", "mountPath": "/documents"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    },
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings are merged, None removes a key, the rest is replaced."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def make_manifest(
    name: str, *, steps: int, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a TrainingRun of ``steps`` short steps with ``changes`` merged into its spec."""
    training = merged(
        TRAINING,
        {
            "horizon": {"steps": steps},
            "schedule": {"warmup": min(WARMUP_STEPS, steps // 2)},
        },
    )
    spec = {**SPEC, "training": training}
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": merged(spec, changes or {}),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of the complete lines of a JSON-lines file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def last_rows(rows: list[dict[str, Any]]) -> Rows:
    """Return the last row of each step, by step."""
    return {row["step"]: row for row in rows}


class Reference:
    """The same endless run as one undisturbed process on this machine.

    It is paused unless a test requests more steps.
    """

    def __init__(self, folder: Path) -> None:
        manifest = make_manifest("reference", steps=ENDLESS)
        manifest["spec"]["training"]["data"]["sources"][0]["path"] = str(
            folder / "documents.jsonl"
        )
        for key in ("resources", "storage", "template"):
            del manifest["spec"][key]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "documents.jsonl").write_text(documents())
        (folder / "run.yaml").write_text(json.dumps(manifest))
        command = [
            Path(sys.executable).with_name("evergrad"),
            "run",
            folder / "run.yaml",
            "--run-directory",
            folder / "run",
        ]
        self._folder = folder
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def hold(self) -> None:
        """Pause the process, so that the cluster gets the CPU cores."""
        self._process.send_signal(signal.SIGSTOP)

    def up_to(self, step: int) -> Rows:
        """Train until at least ``step``, and return the written rows by step."""

        def reached() -> Rows | None:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            rows = last_rows(read_rows(self._folder / "run/metrics.jsonl"))
            return rows if step in rows else None

        self._process.send_signal(signal.SIGCONT)
        try:
            found: Rows = wait_for(
                reached, f"the undisturbed run's step {step}", seconds=PATIENCE
            )
        finally:
            self.hold()
        return found

    def close(self) -> None:
        """Kill the process. Its last state is not needed."""
        self._process.kill()
        self._process.wait()


def documents() -> str:
    """Return real text: the documents of the quickstart."""
    text = (QUICKSTART / "documents.yaml").read_text("utf-8").split("\n", 1)[1]
    return str(json.loads(text)["data"]["documents.jsonl"])


def wait_for(
    is_so: Callable[[], Any], what: str, *, seconds: float = PATIENCE, every: float = 0.2
) -> Any:
    """Return the first true result.

    Fails after ``seconds``, naming ``what`` and, if it is a function, its last result.
    """
    until, answer = time.monotonic() + seconds, None
    while time.monotonic() < until:
        if answer := is_so():
            return answer
        time.sleep(every)
    raise AssertionError(f"{what}: not within {seconds:g} s (last answer: {answer!r})")


def read_patiently(api: Any, path: str) -> Any:
    """GET a path. If the API server is not available, retry.

    After a restart of etcd, /readyz may report ok before every request is answered: the server answers 429
    or 5xx until its watch caches are filled again.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return api.get(path)
        except (ApiError, OSError) as error:
            is_final = isinstance(error, ApiError) and not _is_temporary(error)
            if is_final or time.monotonic() > until:
                raise
            time.sleep(0.5)


def _is_temporary(error: ApiError) -> bool:
    return error.status == 429 or error.status >= 500


@dataclass
class Runs:
    """Manages the TrainingRuns of one namespace."""

    cluster: Any
    namespace: str
    scratch: Path
    made: list["Run"] = field(default_factory=list)

    def apply(self, manifest: Mapping[str, Any]) -> "Run":
        """Apply a manifest server-side with strict field validation."""
        run = Run(self, str(manifest["metadata"]["name"]))
        self.kubectl("apply", "--server-side", "-f", "-", text=json.dumps(manifest))
        self.made.append(run)
        return run

    def adopt(self, name: str) -> "Run":
        """Return a run that another client applied."""
        self.made.append(Run(self, name))
        return self.made[-1]

    def start(self, name: str, *, steps: int, **changes: Any) -> "Run":
        """Apply a run of ``make_manifest``."""
        return self.apply(make_manifest(name, steps=steps, changes=changes))

    def kubectl(
        self,
        *arguments: str,
        text: str | None = None,
        check: bool = True,
        seconds: float = PATIENCE + 60,
    ) -> str:
        """Return the output of kubectl, including stderr if it fails and a failure is allowed."""
        done = subprocess.run(
            [*self._kubectl, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0 or not check, (
            f"kubectl {' '.join(arguments)}: {done.stderr}"
        )
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    @contextlib.contextmanager
    def watch(self, kind: str, *arguments: str) -> Iterator[list[dict[str, Any]]]:
        """Collect the events of a watch of objects; the list is complete after the block."""
        events: list[dict[str, Any]] = []
        options = (kind, *arguments, "--watch", "--output-watch-events", "--output=json")
        path = self.scratch / f"watch-{kind}.json"
        with path.open("wb") as file:
            process = subprocess.Popen([*self._kubectl, "get", *options], stdout=file)
        try:
            yield events
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)
            text, decoder = path.read_text("utf-8").strip(), json.JSONDecoder()
            while text:
                # The last event may be incomplete.
                with contextlib.suppress(json.JSONDecodeError):
                    event, end = decoder.raw_decode(text)
                    events.append(event)
                    text = text[end:].strip()
                    continue
                break

    def remove(self) -> None:
        """Delete the namespace and its remaining objects, without waiting."""
        for kind in (RESOURCE, "jobs"):
            self.kubectl("delete", kind, "--all", "--wait=false", check=False)
        self.kubectl("delete", "pods", "--all", "--now", "--wait=false", check=False)
        self.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)

    def volume(self, claim: str) -> Path:
        """Return the folder on this machine with the files of a PVC.

        Volumes of the bed are local folders. Volumes of another cluster are copied.
        """
        if self.cluster.is_bed:
            bound = (
                (self.get("persistentvolumeclaims", claim) or {})
                .get("spec", {})
                .get("volumeName")
            )
            if bound is None:
                raise LookupError(f"PVC {claim} has no volume yet")
            volume = self.get("persistentvolumes", bound) or {}
            return Path(volume["spec"]["local"]["path"])
        reader = f"reader-{claim}"
        if self.get("pods", reader) is None:
            image, _ = self.cluster.product_images()
            self.kubectl("apply", "-f", "-", text=json.dumps(_reader(reader, claim, image)))
            self.kubectl("wait", "--for=condition=Ready", f"pod/{reader}", "--timeout=600s")
        folder = self.scratch / claim
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            "exec",
            reader,
            "--",
            "tar",
            "-c",
            "-f",
            "-",
            "-C",
            "/volume",
            "--ignore-failed-read",
            ".",
        ]
        done = subprocess.run(
            [*self._kubectl, *command], capture_output=True, timeout=PATIENCE, check=False
        )
        subprocess.run(
            ["tar", "-x", "-C", str(folder)],
            input=done.stdout,
            check=False,
            timeout=PATIENCE,
        )
        return folder

    @property
    def _kubectl(self) -> list[str]:
        # kubectl caches the kinds of a server for minutes, but other tests add and remove resources of the
        # same name.
        cache = ("--cache-dir", str(self.scratch / "kubectl"))
        return [
            str(self.cluster.kubectl),
            "--kubeconfig",
            str(self.cluster.kubeconfig),
            *cache,
            "--namespace",
            self.namespace,
        ]

    def describe(self) -> str:
        """Return the state of the namespace, for the log of a failed test."""
        parts = [
            self.kubectl(*what, check=False)
            for what in (
                ("get", "trun,pods,pvc", "-o", "wide"),
                ("get", "trun", "-o", "yaml"),
                ("get", "events", "--sort-by=.lastTimestamp"),
            )
        ]
        parts += [
            self.kubectl("logs", "-l", f"{GROUP}/run", "--tail=15", "--prefix", check=False)
        ]
        return "\n".join(parts)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        try:
            found: dict[str, Any] = self._read(f"{self._path(kind)}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind."""
        found: list[dict[str, Any]] = self._read(
            f"{self._path(kind)}?labelSelector={quote(selector)}"
        )["items"]
        return found

    def _path(self, kind: str) -> str:
        start = _STARTS.get(kind, "/api/v1")
        return (
            f"{start}/{kind}"
            if kind in _WITHOUT_NAMESPACE
            else f"{start}/namespaces/{self.namespace}/{kind}"
        )

    def _read(self, path: str) -> Any:
        return read_patiently(self.cluster.api, path)


RESTRICTED: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
"""Part of a pod's spec that satisfies the restricted Pod Security profile."""
CONTAINER: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of a container in such a pod."""


def _reader(name: str, claim: str, image: str) -> dict[str, Any]:
    """Return a pod that can read a volume."""
    container = {
        "name": "reader",
        "image": image,
        "command": ["sleep", "3600"],
        "securityContext": {**CONTAINER, "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "volume", "mountPath": "/volume", "readOnly": True}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            **RESTRICTED,
            "containers": [container],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


@dataclass
class Run:
    """One TrainingRun."""

    runs: Runs
    name: str

    def get(self) -> dict[str, Any]:
        """Return the object."""
        found = self.runs.get("trainingruns", self.name)
        assert found is not None, f"TrainingRun {self.name} is not there"
        return found

    def status(self) -> dict[str, Any]:
        """Return the status, or an empty mapping if there is none yet."""
        status: dict[str, Any] = self.get().get("status", {})
        return status

    def restarts(self) -> dict[str, int]:
        """Return the number of restarts by cause, from the status."""
        found: dict[str, int] = self.status().get("restarts", {}).get("byCause", {})
        return found

    def patch(self, spec: Mapping[str, Any]) -> None:
        """Change the spec as a user would."""
        self.runs.kubectl(
            "patch", RESOURCE, self.name, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition, or an empty mapping if there is none."""
        return next(
            (one for one in self.status().get("conditions", []) if one["type"] == kind), {}
        )

    def is_true(self, kind: str) -> bool:
        """Return whether a condition is True."""
        return self.condition(kind).get("status") == "True"

    def wait_for_phase(self, *phases: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the run is in one of ``phases``, and return its status.

        Fails immediately if the run is in another final phase.
        """

        def reached() -> dict[str, Any] | None:
            status = self.status()
            phase = status.get("phase")
            assert phase in phases or phase not in ("Complete", "Failed"), (
                f"{phase}: {json.dumps(status, indent=1)}"
            )
            return status if phase in phases else None

        found: dict[str, Any] = wait_for(
            reached, f"{self.name}: phase {' or '.join(phases)}", seconds=seconds
        )
        return found

    def wait_for_step(self, step: int, *, seconds: float = PATIENCE) -> None:
        """Wait until the run's records contain ``step``."""
        wait_for(
            lambda: self.newest_step() >= step, f"{self.name}: step {step}", seconds=seconds
        )

    # ---- pods ----------------------------------------------------------------------------------------------

    def pods(self, *, role: str = "node") -> list[dict[str, Any]]:
        """Return the pods, sorted by index and attempt."""
        found = self.runs.list("pods", f"{GROUP}/run={self.name},{GROUP}/role={role}")
        return sorted(
            found,
            key=lambda pod: [
                int(pod["metadata"]["labels"].get(f"{GROUP}/{key}", 0))
                for key in ("index", "attempt")
            ],
        )

    def live_pods(self, *, role: str = "node") -> dict[int, dict[str, Any]]:
        """Return the running pods that are not being deleted, by index."""
        return {
            int(pod["metadata"]["labels"].get(f"{GROUP}/index", 0)): pod
            for pod in self.pods(role=role)
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") == "Running"
        }

    def wait_for_pods(
        self, *indices: int, seconds: float = PATIENCE
    ) -> dict[int, dict[str, Any]]:
        """Wait until exactly these indices run."""
        found: dict[int, dict[str, Any]] = wait_for(
            lambda: pods if sorted(pods := self.live_pods()) == sorted(indices) else None,
            f"{self.name}: pods {indices} running",
            seconds=seconds,
        )
        return found

    def wait_for_attempt(
        self, index: int, attempt: int, *, seconds: float = PATIENCE
    ) -> dict[str, Any]:
        """Wait until this attempt of a node runs. Kubelets report an end some seconds later than peers do."""
        name = f"{self.name}-{index}-{attempt}"
        found: dict[str, Any] = wait_for(
            lambda: (
                pod
                if (pod := self.live_pods().get(index)) and pod["metadata"]["name"] == name
                else None
            ),
            f"{self.name}: pod {name} running",
            seconds=seconds,
        )
        return found

    def wait_for_world(self, size: int, *, seconds: float = PATIENCE) -> None:
        """Wait until a world of ``size`` workers has written a step."""
        wait_for(
            lambda: (self.rows() or [{}])[-1].get("world_size") == size,
            f"{self.name}: a world of {size}",
            seconds=seconds,
        )

    # ---- the volume ----------------------------------------------------------------------------------------

    def directory(self) -> Path:
        """The run directory on this machine."""
        return self.runs.volume(self.claim()) / self.path()

    def claim(self) -> str:
        """The name of the run's PVC."""
        return str(self.get()["spec"].get("storage", {}).get("claimName", self.name))

    def path(self) -> str:
        """The run's folder in the volume."""
        return str(self.get()["spec"].get("storage", {}).get("path", self.name))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        try:
            return read_rows(self.directory() / "metrics.jsonl")
        except (LookupError, OSError):
            return []

    def newest_step(self) -> int:
        """Return the last written step, or -1 before the first step."""
        return max((row["step"] for row in self.rows()), default=-1)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints."""
        return sorted(one.name for one in (self.directory() / "checkpoints").glob("step-*"))

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint."""
        return max(int(name.split("-")[1]) for name in self.checkpoints())

    # ---- invariants ---------------------------------------------------------------------------------------

    def repeated_steps(self) -> int:
        """Return the number of rows of repeated steps."""
        rows = self.rows()
        return len(rows) - len({row["step"] for row in rows})

    def expect_same_as(self, reference: Reference) -> None:
        """Check that every step has the same samples and the same loss as the undisturbed run."""
        rows = last_rows(self.rows())
        expected = reference.up_to(max(rows))
        assert sorted(rows) == sorted(step for step in expected if step <= max(rows))
        for step, row in rows.items():
            assert row["sample_hash"] == expected[step]["sample_hash"], (
                f"other samples in step {step}"
            )
            assert row["loss"] == expected[step]["loss"], f"another loss in step {step}"

    def generations(self) -> Iterator[int]:
        """Yield the generations in the order of their rows."""
        last = None
        for row in self.rows():
            if row["generation"] != last:
                last = row["generation"]
                yield last
