"""An Indexed Job with stock torchrun and ``recovery_stock.py``: the alternative on Kubernetes without an
operator."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_runs import Runs, read_rows

NODES = 2
"""One for each core of the bed's machine, so that a starting process does not wait for training processes."""
SLOTS = 6
INDEX = "batch.kubernetes.io/job-completion-index"
SCRIPT = "/script/recovery_stock.py"
SCRIPT_VOLUMES = [{"name": "script", "configMap": {"name": "script"}}]
SCRIPT_MOUNTS = [{"name": "script", "mountPath": "/script"}]
_NAME = "stock"
_PORT = 29400


@dataclass(frozen=True)
class Settings:
    """Torchrun's timers (``--rdzv-conf``), and the restart policy of a killed container."""

    timers: str
    restart_policy: str


DEFAULT = Settings("", "Never")
"""The defaults. The Job controller replaces the pod, the first time after a back-off of 10 s."""
TUNED = Settings(
    ",keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2", "OnFailure"
)
"""The shortest timers that do not split a group under load (README.md). The kubelet restarts the container in
place."""


def arguments(output: str) -> list[str]:
    """Return the arguments of the script, except for its model."""
    return [
        "--output",
        output,
        "--slots",
        str(SLOTS),
        "--length",
        "64",
        "--save-every",
        "5",
    ]


def create_script(runs: Runs) -> None:
    """Create the ConfigMap that contains the script."""
    text = Path(__file__).with_name("recovery_stock.py").read_text(encoding="utf-8")
    runs.kubectl(
        "create",
        "configmap",
        "script",
        f"--from-literal=recovery_stock.py={text}",
    )


def create_job(
    runs: Runs,
    settings: Settings,
    *,
    image: str,
    resources: Mapping[str, Any],
    model: Mapping[str, Any],
) -> None:
    """Create the Job, the headless Service that gives its pods names, and a volume that all pods share."""
    create_script(runs)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": _NAME},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": _NAME},
            "ports": [{"port": _PORT}],
        },
    }
    for document in (claim, service, _job(settings, image, resources, model)):
        runs.kubectl("apply", "-f", "-", text=json.dumps(document))


def read_steps(runs: Runs) -> list[dict[str, Any]]:
    """Return the rows that the script has written."""
    try:
        return read_rows(runs.volume(_NAME) / "steps.jsonl")
    except (LookupError, OSError):
        return []


def _job(
    settings: Settings, image: str, resources: Mapping[str, Any], model: Mapping[str, Any]
) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "sh",
            "-c",
            _shell(settings),
            "torchrun",
            *arguments("/output"),
            "--model",
            json.dumps(model),
        ],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            # Without this variable, no group survives the loss of the node whose agent holds the workers'
            # store.
            {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"},
        ],
        "resources": resources,
        "volumeMounts": [*SCRIPT_MOUNTS, {"name": "output", "mountPath": "/output"}],
    }
    pod = {
        "subdomain": _NAME,
        "restartPolicy": settings.restart_policy,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
        },
        "containers": [container],
        "volumes": [
            *SCRIPT_VOLUMES,
            {"name": "output", "persistentVolumeClaim": {"claimName": _NAME}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {
            "completionMode": "Indexed",
            "completions": NODES,
            "parallelism": NODES,
            "backoffLimit": 100,
            "template": {"metadata": {"labels": {"app": _NAME}}, "spec": pod},
        },
    }


def _shell(settings: Settings) -> str:
    """Start torchrun as in its documentation, when the first pod's name resolves."""
    host = f"{_NAME}-0.{_NAME}"
    words: Sequence[str] = (
        "exec python -m torch.distributed.run",
        f"--nnodes=1:{NODES} --nproc-per-node=1 --max-restarts=100",
        f"--rdzv-backend=c10d --rdzv-id={_NAME} --rdzv-endpoint={host}:{_PORT}",
        f'--rdzv-conf="is_host=$host{settings.timers}"',
        f'{SCRIPT} "$@"',
    )
    wait = f"until getent hosts {host} >/dev/null; do sleep 0.2; done"
    host_test = '[ "$JOB_COMPLETION_INDEX" = 0 ] && host=true || host=false'
    return f"{wait}; {host_test}; {' '.join(words)}"
