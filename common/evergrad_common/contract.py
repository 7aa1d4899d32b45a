"""Published names, exit codes and the layout of a run directory: what operator and trainer agree on."""

import json
from enum import IntEnum, StrEnum
from typing import Any, Final

API_GROUP = "evergrad.dev"
API_VERSION = f"{API_GROUP}/v1alpha1"
KIND = "TrainingRun"
LABEL_PREFIX = f"{API_GROUP}/"
MANAGER = f"{API_GROUP}/operator"
"""Value of a run's ``spec.managedBy`` that means the operator, as its absence does."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's label with the name of a queue."""

# Bounds of a run's pod template: the trainer's loader, the CRD made from it and the operator refuse the
# same.
VOLUME_KINDS: Final = (
    "configMap",
    "secret",
    "emptyDir",
    "persistentVolumeClaim",
    "projected",
    "downwardAPI",
    "ephemeral",
)
"""Kinds that Pod Security's restricted level admits, less ``csi``, whose drivers can do anything."""
PROJECTED_KINDS: Final = (
    "configMap",
    "secret",
    "downwardAPI",
    "clusterTrustBundle",
    "serviceAccountToken",
)
"""Sources of a ``projected`` volume; the last one only beside a service account that the installation
allows."""
TRAINER_CONTAINER: Final = "trainer"
"""Name of the container that trains, prepares or evaluates, in the pods of a run."""
VOLUME_PATH: Final = "/volume"
"""Where the pods of a run have the volume that holds its run directory."""
CONFIG_PATH: Final = "/etc/evergrad/run"
TOKEN_PATH: Final = "/etc/evergrad/token"
INSTANCE_HEADER: Final = "Evergrad-Instance"
"""Header of a coordinator's /healthz with its random name, which its file of addresses has, too."""
PREPARED_FOLDER: Final = ".prepared"
"""Folder beside the run directory with prepared data, which the runs beside it share by content."""
PREPARING: Final = "Preparing"
"""Phase of a run whose data are prepared, in its status and in that of the pod that prepares them."""
OUR_MOUNTS: Final = (VOLUME_PATH, CONFIG_PATH, TOKEN_PATH, "/tmp", "/dev/shm")
"""Paths that the operator mounts: volume, manifest, the run's token, scratch space and shared memory."""
OUR_VOLUME_PREFIX: Final = "evergrad-"


def hides_ours(path: str) -> bool:
    """Whether a mount at this absolute path would lie over, or inside, one of ours; scratch space may have
    mounts inside."""
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
"""Sections of ``spec.training`` that do not decide the result, so that they may change from one start to the
next."""
SOFT_LIMIT_SECONDS: Final = 120
"""Default time, in seconds, that a coordinator waits for a group to stop at its next step boundary."""
SEE_LOGS: Final = "See that rank's log in logs/."
"""Last sentence of a coordinator about a worker that failed; the operator, which knows more, replaces it."""
UNDISTURBED_SECONDS: Final = 600.0
"""Time between two failures, in seconds, that counts as progress of a script which reports none."""


def build_soft_limit(seconds: int) -> tuple[str, ...]:
    """Build the coordinator's arguments where a node may take that long to leave; none where the default is
    enough."""
    return ("--soft-limit", str(seconds)) if seconds > SOFT_LIMIT_SECONDS else ()


class ExitCode(IntEnum):
    """How a trainer process ends. An operator decides by these whether it retries."""

    DONE = 0
    USER_ERROR = 64
    """Wrong configuration or data: a retry cannot cure it."""
    INTERNAL = 70
    STOPPED_SAVED = 75
    """Stopped on request, state saved."""
    STOPPED_UNSAVED = 76
    """Stopped on request, state not saved."""


class ErrorKind(StrEnum):
    """Kind of trouble that ended a process, decided where it arises.

    Only ``INPUT`` can end a run for good.
    """

    INPUT = "input"
    """Something that a person wrote is wrong: configuration, data, a script. A retry cannot cure it."""
    ENVIRONMENT = "environment"
    """Trouble of one host or one moment: a mount, a device, memory, a refusal.

    Retried in place, then on another host.
    """
    NUMERIC = "numeric"
    """A loss, a gradient or a replica's state is not what it should be. The run stops and can go on."""
    PEER = "peer"
    """A consequence: another process of the group is gone."""
    INTERNAL = "internal"
    """Anything else, such as a process that was killed or an error in a script."""


MAX_TERMINATION_BYTES: Final = 4096
"""Length of a container's termination message that Kubernetes keeps, in bytes."""


def encode_termination(kind: ErrorKind, text: str, trouble: str = "") -> bytes:
    """A container's termination message: one JSON object whose ``message`` keeps its beginning
    and its end. ``trouble``: one of causes.TROUBLES, empty for none."""
    head = {"kind": str(kind)} | ({"trouble": trouble} if trouble else {})
    text = text.strip()
    data = json.dumps({**head, "message": text}).encode("ascii")
    while len(data) > MAX_TERMINATION_BYTES:
        # The end is cut least: a traceback has its cause there, and its place at the beginning.
        text = (
            text[: len(text) // 4].rstrip() + "\n...\n" + text[-(len(text) // 2) :].lstrip()
        )
        data = json.dumps({**head, "message": text}).encode("ascii")
    return data


def decode_termination(message: str) -> tuple[ErrorKind | None, str]:
    """Kind and text of a termination message; kind None and the message as it is where no trainer of ours
    wrote it."""
    # Any image may run in a pod, so that anything may stand there.
    try:
        found: Any = json.loads(message)
        return ErrorKind(found["kind"]), str(found["message"])
    except (ValueError, TypeError, KeyError):
        return None, message


def decode_trouble(message: str) -> str:
    """The ``trouble`` of a termination message; empty where it has none."""
    try:
        found: Any = json.loads(message)
        return str(found["trouble"])[:64]
    except (ValueError, TypeError, KeyError):
        return ""


class CheckpointFile:
    """Names inside the folder ``checkpoints`` of a run directory, and what its manifests say."""

    ATTEMPTS = ".tmp"
    TRASH = ".trash"
    LEASES = "leases"
    BEST = "best.json"
    MANIFEST = "manifest.json"
    FORMAT = 1
    """Newest format of a manifest."""
    PERMANENT = "permanent"
    """Key of a manifest's ``extra``: retention leaves the checkpoint for ever."""


def step_of_checkpoint(name: str) -> int | None:
    """Return the step in the name of a published checkpoint, or in its path; None for any other name."""
    # ``step-1200``, or ``step-1200.g7`` where that was taken.
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
