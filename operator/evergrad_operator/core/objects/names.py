"""Names that others rely on: labels, annotations, children, ports, paths, conditions, reasons and phases.

Pure.
"""

import hashlib
from enum import StrEnum
from typing import Final

from evergrad_common import contract
from evergrad_common.contract import (
    API_VERSION,
    KIND,
    LABEL_PREFIX,
    LABEL_QUEUE,
    TOKEN_PATH,
)
from evergrad_manifest.model.claims import RECORD_PREFIX

__all__ = ["API_VERSION", "KIND", "LABEL_QUEUE", "TOKEN_PATH"]
Key = tuple[str, str]
"""Namespace and name of a run (or of a claim)."""

# ---- labels and annotations --------------------------------------------------------------------------------

LABEL_RUN: Final = f"{LABEL_PREFIX}run"
LABEL_INDEX: Final = f"{LABEL_PREFIX}index"
LABEL_ATTEMPT: Final = f"{LABEL_PREFIX}attempt"
LABEL_ROLE: Final = f"{LABEL_PREFIX}role"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "evergrad"
ROLE_NODE: Final = "node"
ROLE_COORDINATOR: Final = "coordinator"
ROLE_PREPARATION: Final = "preparation"
ROLE_EVALUATION: Final = "evaluation"
ROLE_OPERATOR: Final = "operator"
"""Role of the operator's own pod, as the chart labels it."""
CONTAINERS: Final = {
    ROLE_NODE: contract.TRAINER_CONTAINER,
    ROLE_COORDINATOR: "coordinator",
    ROLE_PREPARATION: contract.TRAINER_CONTAINER,
    ROLE_EVALUATION: contract.TRAINER_CONTAINER,
}
"""Our container in a pod, by the pod's role. Others in it are not ours."""

ANNOTATION_HASH: Final = f"{LABEL_PREFIX}applied-hash"
"""Hash of what was applied last: an equal one need not be applied again."""
ANNOTATION_RESTART: Final = f"{LABEL_PREFIX}restart"
"""On pods: the restart they belong to. Pods of an older one are replaced."""
ANNOTATION_HOST: Final = f"{LABEL_PREFIX}host"
"""The one host that a pod may come to, since its volume is mounted there."""
ANNOTATION_GROUP_PRIORITY: Final = f"{LABEL_PREFIX}priority-class"
"""On PodGroups of Kubernetes: the priority class that the group was made with, and keeps."""
ANNOTATION_DELETED_WITH: Final = f"{LABEL_PREFIX}deleted-with"
"""On a PVC: uid of the run that it is deleted with, by ``spec.storage.whenDeleted``."""
ANNOTATION_MADE_FOR: Final = f"{LABEL_PREFIX}made-for"
"""On a PVC: uid of the run that the operator made it for.

It is written when the PVC is created. The chart's policy keeps the operator's account from writing it later,
and from making any other run the owner of the PVC.
"""
CLAIM_ANNOTATION_PREFIX: Final = RECORD_PREFIX

LABEL_QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
LABEL_QUEUE_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
ANNOTATION_QUEUE_GROUP_SIZE: Final = "kueue.x-k8s.io/pod-group-total-count"
ANNOTATION_QUEUE_GROUP_RETRIABLE: Final = "kueue.x-k8s.io/retriable-in-group"
ANNOTATION_QUEUE_ROLE: Final = "kueue.x-k8s.io/role-hash"
ANNOTATION_QUEUE_INDEX: Final = "kueue.x-k8s.io/pod-group-pod-index-label"
ANNOTATION_QUEUE_FORCED: Final = "kueue.x-k8s.io/safe-to-forcefully-delete"
QUEUE_GATE: Final = "kueue.x-k8s.io/admission"
QUEUE_FINALIZER: Final = "kueue.x-k8s.io/managed"
ANNOTATION_ELASTIC_PRIORITY: Final = f"{LABEL_PREFIX}elastic-priority-class"
"""On runs: the WorkloadPriorityClass of the nodes above ``nodes.min``, in the place of the run's own."""
LABEL_GANG: Final = "scheduling.x-k8s.io/pod-group"
"""On pods: their PodGroup of scheduler-plugins. Kubernetes' own is named in the pod's spec."""
PROPAGATED_LABELS: Final = (LABEL_QUEUE, LABEL_QUEUE_PRIORITY)
"""Labels of a run that its node pods get, the pod that prepares its data, and its coordinator where Kueue
admits nothing without them."""

# ---- places ------------------------------------------------------------------------------------------------

JOIN_PORT: Final = 29400
STATUS_PORT: Final = 29401
METRICS_PORT: Final = 29402
"""Port of a training pod's metrics, where its run names none."""
CONFIG_FILE: Final = "trainingrun.json"
STATE_PATH: Final = "/state"
TOKEN_KEY: Final = "token"
TOKEN_VOLUME: Final = "evergrad-token"
TERMINATION_LOG: Final = "/dev/termination-log"
LONGEST_RUN_NAME: Final = 45
FIELD_MANAGER: Final = "evergrad-operator"

# ---- bounds ------------------------------------------------------------------------------------------------

MAX_NODES: Final = 4096
"""Numbers of nodes that are believed: a run has 1,024 at most."""
MAX_ATTEMPT: Final = 10**8
"""Largest attempt that is believed of what somebody may have edited. A pod's label is read up to nine digits,
so that the attempts after it can be read, too: pods that are not recognized would be made without end."""
MAX_EPOCH: Final = 500_000
"""The same of a coordinator, which takes no epoch above 2**19."""


def node_pod_name(run: str, index: int, attempt: int) -> str:
    """Name the pod of a node, from 0, in one of its attempts, from 0."""
    return f"{run}-{index}-{attempt}"


def coordinator_pod_name(run: str, attempt: int) -> str:
    """Name the pod of the coordinator in one of its attempts, from 0."""
    return f"{run}-coordinator-{attempt}"


def preparation_pod_name(run: str, attempt: int) -> str:
    """Name the pod that prepares the data in one of its attempts, from 0."""
    return f"{run}-prepare-{attempt}"


def evaluation_pod_name(run: str, step: int, attempt: int) -> str:
    """Name the pod that evaluates the checkpoint of a step.

    ``attempt``: its serial among all such pods of the run, from 0.
    """
    return f"{run}-evaluate-{step}-{attempt}"


def queue_group_name(run: str, uid: str, number: int) -> str:
    """Name the group of pods that a queue admits together, from 0.

    The uid keeps a run out of what Kueue still has of an earlier run of the name.
    """
    return f"{run}-{uid[:5]}-{number}"


def coordinator_service_name(run: str) -> str:
    """Name the Service by which nodes find their coordinator."""
    return f"{run}-coordinator"


def coordinator_budget_name(run: str) -> str:
    """Name the coordinator's PodDisruptionBudget, which no run can have: names of runs have no dot."""
    return f"{run}.coordinator"


def config_name(run: str) -> str:
    """Name the ConfigMap with the run as its nodes read it."""
    return f"{run}-config"


def token_secret_name(run: str, token: str) -> str:
    """Name the Secret with a run's token.

    The name follows the token, so that a namesake's Secret is never taken for this one.
    """
    return f"{run}-token-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def claim_annotation(run: str) -> str:
    """Name the annotation of a PVC with the record of ``run``."""
    return f"{CLAIM_ANNOTATION_PREFIX}{run}"


def claim_field_manager(run: str) -> str:
    """Name the field manager that applies a run's record: runs may share a PVC, and each owns its own."""
    return f"{FIELD_MANAGER}-{run}"


# ---- status ------------------------------------------------------------------------------------------------


class Condition(StrEnum):
    """Types of conditions, in the order they are listed."""

    READY = "Ready"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    PODS_READY = "PodsReady"
    PROGRESSING = "Progressing"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable"
    STALLED = "Stalled"
    RECONCILING = "Reconciling"


class Phase(StrEnum):
    """A run in one word, for people. Derived; decisions rest on it only where no coordinator has answered."""

    PENDING = "Pending"
    PREPARING = contract.PREPARING
    STARTING = "Starting"
    RUNNING = "Running"
    WAITING = "Waiting"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class EvaluationState(StrEnum):
    """States of the evaluation of a run's checkpoints in pods."""

    UP_TO_DATE = "UpToDate"
    """No checkpoint waits."""
    WAITING = "Waiting"
    """A checkpoint waits for its pod."""
    EVALUATING = "Evaluating"
    """A pod evaluates a checkpoint."""
    FAILED = "Failed"
    """It was given up until the run is edited."""


class Reason(StrEnum):
    """Reasons of conditions and of the run as a whole."""

    # On its way.
    ACCEPTED = "Accepted"
    """Seen, and nothing is wrong with it."""
    PREPARING = contract.PREPARING
    """The data are prepared; no node has been asked for."""
    STARTING = "Starting"
    """Pods are on their way, or the group is forming."""
    TRAINING = "Training"
    """The group is up."""
    FINISHING = "Finishing"
    """All steps are done; the last pods write the report and end."""
    RESTARTING = "Restarting"
    """``restartNonce`` or a setting has changed: all pods leave, then come again."""
    BACKING_OFF = "BackingOff"
    """A replacement waits after failures."""
    HOST_FAULTS = "HostFaults"
    """Hosts fail the pods one after the other; these come again elsewhere, later each time."""
    GIVEN_BACK = "PodsGivenBack"
    """Fewer pods than ``nodes.min`` found a host for long: all have left, and come again later."""
    WAITING_FOR_NODES = "WaitingForNodes"
    """Fewer nodes than ``nodes.min`` are there."""
    COORDINATOR_LOST = "CoordinatorLost"
    """The coordinator is being replaced; training goes on meanwhile."""
    # Obstacles: the run goes on by itself once they are gone.
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """An image cannot be pulled."""
    UNSCHEDULABLE = "Unschedulable"
    """No node fits."""
    QUEUED = "Queued"
    """A scheduling gate holds the pods, as a queue does."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota is used up."""
    ADMISSION_REFUSED = "AdmissionRefused"
    """A policy, LimitRange or webhook refuses an object."""
    INVALID_OBJECT = "InvalidObject"
    """The API server calls an object invalid."""
    NAME_TAKEN = "NameTaken"
    """An object of a name that the run needs belongs to somebody else."""
    WEBHOOK_FAILED = "WebhookFailed"
    """An admission webhook does not answer."""
    API_UNAVAILABLE = "ApiUnavailable"
    """The API server does not answer, or not now."""
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable"
    """The coordinator does not answer the operator."""
    COORDINATOR_UNAUTHORIZED = "CoordinatorUnauthorized"
    """The coordinator does not take the operator's token."""
    BOUNDS_NOT_TAKEN = "BoundsNotTaken"
    """The coordinator has not taken a new number of nodes or failures."""
    CREATE_FAILED = "CreateFailed"
    """The API server refuses an object for another reason."""
    VOLUME_MISSING = "VolumeMissing"
    """The PVC does not exist."""
    VOLUME_PENDING = "VolumePending"
    """The PVC has no volume yet."""
    VOLUME_LOST = "VolumeLost"
    """The PVC's volume is gone."""
    VOLUME_RECORD_REFUSED = "VolumeRecordRefused"
    """The run's record on its PVC cannot be written, so that no pod is made."""
    START_ERROR = "StartError"
    """A container cannot be created or started."""
    GANG_UNAVAILABLE = "GangUnavailable"
    """The API server has no PodGroup, by which this installation places runs."""
    INVALID_SPEC = "InvalidSpec"
    """The run has a value that the operator does not allow."""
    OUTDATED_SPEC = "OutdatedSpec"
    """An event alone: the run is spelled as only an earlier version accepts."""
    DELETING = "Deleting"
    """The run itself is being deleted."""
    # The end.
    COMPLETE = "Complete"
    """All steps are done."""
    ALREADY_COMPLETE = "AlreadyComplete"
    """This run was complete before, by its record on the volume."""
    USER_ERROR = "UserError"
    """Wrong configuration or data."""
    WORKER_CRASH = "WorkerCrash"
    """Workers failed too often without progress."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Workers ran out of memory too often without progress."""
    VOLUME_FULL = "VolumeFull"
    """The volume is full: the last save failed, or, for a run that has failed, too many without progress."""
    SAVE_FAILED = "SaveFailed"
    """The last save failed for another reason than a full volume."""
    OUT_OF_EPHEMERAL_STORAGE = "OutOfEphemeralStorage"
    """Pods wrote more on their hosts' disks than they may, too often without progress."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """``activeDeadlineSeconds`` is over."""
    OUTPUT_CONFLICT = "OutputConflict"
    """Another run, or another recipe, has this folder of the volume."""
    # Suspended.
    SUSPENDING = "Suspending"
    """Pods save and leave."""
    SUSPENDED = "Suspended"
    """``suspend`` is set and no pod is left."""
    STOPPED = "StoppedOnRequest"
    """The recipe or its stop file asked for a stop; state is saved."""
    NON_FINITE = "NonFinite"
    """A loss or a gradient was not finite; the state before that step is saved, and a person decides how to
    go on."""
    # Reasons of single conditions.
    NOT_COMPLETE = "NotComplete"
    """The run has not come to its end."""
    NOT_FAILED = "NotFailed"
    """No failure ended the run."""
    NOT_SUSPENDED = "NotSuspended"
    """``suspend`` is not set."""
    ALL_READY = "AllReady"
    """Every node that was asked for is part of the group."""
    SOME_READY = "SomeReady"
    """Enough nodes train; others are on their way."""
    NO_PODS = "NoPods"
    """The run needs no pods now."""
    STEPS_ADVANCE = "StepsAdvance"
    """Steps are reported."""
    NO_STEP_YET = "NoStepYet"
    """No step has been reported so far."""
    NO_STEPS = "NoSteps"
    """No step has been reported for long."""
    CHECKPOINT_SAVED = "CheckpointSaved"
    """There is a checkpoint."""
    NO_CHECKPOINT_YET = "NoCheckpointYet"
    """No checkpoint has been reported so far."""
    UP_TO_DATE = "UpToDate"
    """The newest generation of the run is being acted upon."""
    NOTHING_IN_THE_WAY = "NothingInTheWay"
    """No user action is required."""
