"""Names, exit codes and the layout of a run directory on which operator, trainer and CLI agree."""

import json
from enum import IntEnum, StrEnum
from typing import Any, Final

API_GROUP = "evergrad.dev"
API_VERSION = f"{API_GROUP}/v1alpha1"
KIND = "TrainingRun"
LABEL_PREFIX = f"{API_GROUP}/"
MANAGER = f"{API_GROUP}/operator"
"""Value of a run's ``spec.managedBy`` that selects the operator; it is also the default."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's label with the name of a queue."""

# Bounds of a run's pod template: the trainer's loader, the CRD that is generated from it and the operator
# refuse the same templates.
VOLUME_KINDS: Final = (
    "configMap",
    "secret",
    "emptyDir",
    "persistentVolumeClaim",
    "projected",
    "downwardAPI",
    "ephemeral",
)
"""Kinds that Pod Security's restricted level admits, without ``csi``, whose drivers can do anything."""
PROJECTED_KINDS: Final = (
    "configMap",
    "secret",
    "downwardAPI",
    "clusterTrustBundle",
    "serviceAccountToken",
)
"""Sources of a ``projected`` volume. ``serviceAccountToken`` is valid only together with a service account
that the installation allows."""
TRAINER_CONTAINER: Final = "trainer"
"""Name of the container that trains, prepares or evaluates, in the pods of a run."""
VOLUME_PATH: Final = "/volume"
"""Mount path of the volume that holds the run directory, in each pod of a run."""
CONFIG_PATH: Final = "/etc/evergrad/run"
TOKEN_PATH: Final = "/etc/evergrad/token"
INSTANCE_HEADER: Final = "Evergrad-Instance"
"""Header of a coordinator's /healthz with its random name. The file with its addresses contains the name,
too."""
PREPARED_FOLDER: Final = ".prepared"
"""Folder next to the run directory with prepared data, which runs with the same data share."""
PREPARING: Final = "Preparing"
"""Phase while a run's data are being prepared, in the status of the run and of the pod that prepares them."""
OUR_MOUNTS: Final = (VOLUME_PATH, CONFIG_PATH, TOKEN_PATH, "/tmp", "/dev/shm")
"""Paths that the operator mounts: volume, manifest, the run's token, scratch space and shared memory."""
OUR_VOLUME_PREFIX: Final = "evergrad-"


def hides_ours(path: str) -> bool:
    """Return whether a mount at this absolute path would cover one of our mounts, or lie inside one.

    Scratch space may contain mounts. For example, ``/volume/data`` hides ours and ``/tmp/data`` does not.
    """
    # Compared without ``.`` and repeated slashes, which the kubelet would drop, too.
    plain = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
    is_over = any(
        ours == plain or ours.startswith(f"{plain.rstrip('/')}/") for ours in OUR_MOUNTS
    )
    return is_over or plain.startswith(
        (f"{VOLUME_PATH}/", f"{CONFIG_PATH}/", f"{TOKEN_PATH}/")
    )


OUR_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
OUR_VARIABLE_PREFIXES: Final = ("EVERGRAD_", "TORCHELASTIC_")
OPERATIONAL_SECTIONS: Final = (
    "files",
    "stop",
    "onNonFinite",
    "skipSteps",
    "overrides",
    "checkpoint",
    "evaluation",
    "initFrom",
    "runtime",
    "logging",
    "monitors",
    "metrics",
)
"""Sections of ``spec.training`` that do not change the result, so you may change them between two starts."""
SOFT_LIMIT_SECONDS: Final = 120
"""Default time, in seconds, that a coordinator waits for a group to stop at its next step boundary."""
SEE_LOGS: Final = "See that rank's log in logs/."
"""Last sentence of the coordinator's message about a failed worker; the operator replaces it with details."""
UNDISTURBED_SECONDS: Final = 600.0
"""Time between two failures, in seconds, that counts as progress of a script which reports none."""


def build_soft_limit(seconds: int) -> tuple[str, ...]:
    """Build the coordinator's arguments if a node may take ``seconds`` to leave.

    Empty if the default is enough. For example, ``build_soft_limit(300)`` is ``("--soft-limit", "300")``.
    """
    return ("--soft-limit", str(seconds)) if seconds > SOFT_LIMIT_SECONDS else ()


class ExitCode(IntEnum):
    """Exit codes of a trainer process. The operator uses them to decide whether it retries."""

    DONE = 0
    USER_ERROR = 64
    """Wrong configuration or data: a retry cannot fix it."""
    INTERNAL = 70
    STOPPED_SAVED = 75
    """Stopped on request, state saved."""
    STOPPED_UNSAVED = 76
    """Stopped on request, state not saved."""


class ErrorKind(StrEnum):
    """Kind of the error that ended a process, chosen by the code that meets the error.

    Only ``INPUT`` can end a run for good.
    """

    INPUT = "input"
    """The user's input is wrong: configuration, data, or a script. A retry cannot fix it."""
    ENVIRONMENT = "environment"
    """A problem of one host or a temporary problem: a mount, a device, memory, a refusal.

    The node retries in place, then on another host.
    """
    NUMERIC = "numeric"
    """A loss, a gradient or a replica's state is invalid. The run stops; you can resume it."""
    PEER = "peer"
    """A consequence: another process of the group is gone."""
    INTERNAL = "internal"
    """Anything else, such as a process that was killed or an error in a script."""


MAX_TERMINATION_BYTES: Final = 4096
"""Length of a container's termination message that Kubernetes keeps, in bytes."""


def encode_termination(kind: ErrorKind, text: str, trouble: str = "") -> bytes:
    """Return a container's termination message: one JSON object of at most ``MAX_TERMINATION_BYTES``.

    A long ``text`` keeps its beginning and its end. ``trouble``: one of causes.TROUBLES, empty for none.
    """
    head = {"kind": str(kind)} | ({"trouble": trouble} if trouble else {})
    text = text.strip()
    data = json.dumps({**head, "message": text}).encode("ascii")
    while len(data) > MAX_TERMINATION_BYTES:
        # Cut the end least: a traceback has its cause at the end, and its place at the beginning.
        text = (
            text[: len(text) // 4].rstrip() + "\n...\n" + text[-(len(text) // 2) :].lstrip()
        )
        data = json.dumps({**head, "message": text}).encode("ascii")
    return data


def decode_termination(message: str) -> tuple[ErrorKind | None, str]:
    """Return kind and text of a termination message.

    If our trainer did not write it, the kind is None and the text is the message. For example, ``"OOM"``
    gives ``(None, "OOM")``.
    """
    # A pod may run any image, so the message may be any text.
    try:
        found: Any = json.loads(message)
        return ErrorKind(found["kind"]), str(found["message"])
    except (ValueError, TypeError, KeyError):
        return None, message


def decode_trouble(message: str) -> str:
    """Return the ``trouble`` of a termination message; empty if it has none."""
    try:
        found: Any = json.loads(message)
        return str(found["trouble"])[:64]
    except (ValueError, TypeError, KeyError):
        return ""


class CheckpointFile:
    """Names inside the folder ``checkpoints`` of a run directory, and keys of its manifests."""

    ATTEMPTS = ".tmp"
    TRASH = ".trash"
    LEASES = "leases"
    BEST = "best.json"
    MANIFEST = "manifest.json"
    FORMAT = 1
    """Newest format of a manifest."""
    PERMANENT = "permanent"
    """Key of a manifest's ``extra``: retention never deletes the checkpoint."""


def step_of_checkpoint(name: str) -> int | None:
    """Return the step in the name of a published checkpoint, or in its path; None for any other name."""
    # ``step-1200``, or ``step-1200.g7`` if the plain name was taken.
    number = name.rstrip("/").rpartition("/")[2].removeprefix("step-").split(".")[0]
    return int(number) if number.isdecimal() else None


SOME_FINISHED: Final = "SomeWorkersFinished"
"""Reason in a coordinator's /status: some workers of a script have ended with 0, and others still run."""


class RunFile:
    """Names inside a run directory (the volume on a cluster, ``runs/<name>`` locally)."""

    RESOLVED = "run.json"
    PROVENANCE = "provenance.json"
    REQUESTED = "requested.json"
    PREFLIGHT = "preflight.json"
    METRICS = "metrics.jsonl"
    EVENTS = "events.jsonl"
    EVALUATION = "evaluation.jsonl"
    EVALUATIONS = "evaluations"
    """Results of ``evergrad evaluate``, one file for each checkpoint and set."""
    CHECKPOINTS = "checkpoints"
    EXPORTS = "exports"
    LOGS = "logs"
    COORDINATOR = "coordinator"
    """Folder of a local coordinator's files."""
    COORDINATOR_ADDRESS = "coordinator/address.json"
    """Ports of a local coordinator, and its ``instance``, while it runs."""
    OWNER = "owner.json"
    """The process of ``evergrad run`` that trains in the directory, while it runs."""
    COMPILED = "compiled"
    """Kernels that were compiled for the run, one file for each kind of device."""
    PROFILES = "profiles"
    """Traces of some steps."""
    TRACKERS = "trackers"
    """Files of trackers of experiments, and a note of what each shows."""
    REPORT_HTML = "report.html"
    REPORT_MARKDOWN = "report.md"
    SUMMARY = "summary.json"
    COMPLETE = "complete.json"
    STOP = "stop"
    """A user creates this file to stop the run at the next step boundary; the run removes it."""
