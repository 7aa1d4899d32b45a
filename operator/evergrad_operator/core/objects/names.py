"""Defines names that other components use: labels, annotations, children, ports, paths, conditions, reasons,
phases.

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
"""Role in the labels of the operator's own pod, set by the chart."""
CONTAINERS: Final = {
    ROLE_NODE: contract.TRAINER_CONTAINER,
    ROLE_COORDINATOR: "coordinator",
    ROLE_PREPARATION: contract.TRAINER_CONTAINER,
    ROLE_EVALUATION: contract.TRAINER_CONTAINER,
}
"""Name of our container in a pod, by the pod's role. Other containers were injected."""

ANNOTATION_HASH: Final = f"{LABEL_PREFIX}applied-hash"
"""Hash of the last applied object. An object with the same hash is not applied again."""
ANNOTATION_RESTART: Final = f"{LABEL_PREFIX}restart"
"""On pods: the restart to which the pod belongs. Pods of an older restart are replaced."""
ANNOTATION_HOST: Final = f"{LABEL_PREFIX}host"
"""The only host on which the pod may run, because its volume is mounted there."""
ANNOTATION_GROUP_PRIORITY: Final = f"{LABEL_PREFIX}priority-class"
"""On PodGroups of Kubernetes: the priority class with which the group was created. It cannot change."""
ANNOTATION_DELETED_WITH: Final = f"{LABEL_PREFIX}deleted-with"
"""On a PVC: uid of the run with which the PVC is deleted, by ``spec.storage.whenDeleted``."""
ANNOTATION_MADE_FOR: Final = f"{LABEL_PREFIX}made-for"
"""On a PVC: uid of the run for which the operator created the PVC.

It is written when the PVC is created. The chart's policy prevents the operator's account from writing it
later, and from setting another run as the owner of the PVC.
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
"""On runs: the WorkloadPriorityClass of nodes above ``nodes.min``, instead of the run's own class."""
LABEL_GANG: Final = "scheduling.x-k8s.io/pod-group"
"""On pods: the PodGroup of scheduler-plugins. A PodGroup of Kubernetes is named in the pod's spec."""
PROPAGATED_LABELS: Final = (LABEL_QUEUE, LABEL_QUEUE_PRIORITY)
"""Labels of a run that are copied to its nodes and its preparation and evaluation pods. They are copied to
the coordinator only if Kueue admits no pods without them."""

# ---- places ------------------------------------------------------------------------------------------------

JOIN_PORT: Final = 29400
STATUS_PORT: Final = 29401
METRICS_PORT: Final = 29402
"""Port of a training pod's metrics if the run does not set one."""
CONFIG_FILE: Final = "trainingrun.json"
STATE_PATH: Final = "/state"
TOKEN_KEY: Final = "token"
TOKEN_VOLUME: Final = "evergrad-token"
TERMINATION_LOG: Final = "/dev/termination-log"
LONGEST_RUN_NAME: Final = 45
FIELD_MANAGER: Final = "evergrad-operator"

# ---- bounds ------------------------------------------------------------------------------------------------

MAX_NODES: Final = 4096
"""Largest valid number of nodes. A run has at most 1,024 nodes."""
MAX_ATTEMPT: Final = 10**8
"""Largest attempt that is accepted from labels, which a user may have edited. Labels are parsed up to nine
digits, so that later attempts can be parsed, too: pods with unparsable labels would be created again without
end."""
MAX_EPOCH: Final = 500_000
"""Largest valid attempt of a coordinator, which accepts no epoch above 2**19."""


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
    """Name a group of pods that a queue admits together. ``number``: from 0.

    The uid distinguishes the group from groups of an earlier run with the same name that Kueue still stores.
    """
    return f"{run}-{uid[:5]}-{number}"


def coordinator_service_name(run: str) -> str:
    """Name the Service by which nodes find their coordinator."""
    return f"{run}-coordinator"


def coordinator_budget_name(run: str) -> str:
    """Name the coordinator's PodDisruptionBudget. No run has this name, because names of runs contain no
    dot."""
    return f"{run}.coordinator"


def config_name(run: str) -> str:
    """Name the ConfigMap with the run's manifest, which its nodes read."""
    return f"{run}-config"


def token_secret_name(run: str, token: str) -> str:
    """Name the Secret with a run's token.

    The name depends on the token, so that it differs from the Secret of another run with the same name.
    """
    return f"{run}-token-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def claim_annotation(run: str) -> str:
    """Name the annotation of a PVC with the record of ``run``."""
    return f"{CLAIM_ANNOTATION_PREFIX}{run}"


def claim_field_manager(run: str) -> str:
    """Name the field manager that applies a run's record. Runs may share a PVC, and each run owns its
    record."""
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
    """Summary of a run's state for users. Decisions use it only if no coordinator has answered."""

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
    """The evaluation has failed and waits until the run is edited."""


class Reason(StrEnum):
    """Reasons of conditions and of the run as a whole."""

    # On its way.
    ACCEPTED = "Accepted"
    """The run was observed and has no problems."""
    PREPARING = contract.PREPARING
    """The data are being prepared; no node has been created yet."""
    STARTING = "Starting"
    """Pods are on their way, or the group is forming."""
    TRAINING = "Training"
    """The group trains."""
    FINISHING = "Finishing"
    """All steps are done; the last pods write the report and end."""
    RESTARTING = "Restarting"
    """``restartNonce`` or a setting has changed: all pods leave and are created again."""
    BACKING_OFF = "BackingOff"
    """A replacement waits after failures."""
    HOST_FAULTS = "HostFaults"
    """Several host faults in a row: pods are created again on other hosts, with a growing delay."""
    GIVEN_BACK = "PodsGivenBack"
    """Fewer pods than ``nodes.min`` found a host for too long: all pods were deleted and are requested again
    later."""
    WAITING_FOR_NODES = "WaitingForNodes"
    """Fewer nodes than ``nodes.min`` have joined."""
    COORDINATOR_LOST = "CoordinatorLost"
    """The coordinator is being replaced; training continues."""
    # Obstacles: the run continues without action as soon as they are gone.
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
    """The API server refuses an object as invalid."""
    NAME_TAKEN = "NameTaken"
    """An object with a name that the run needs belongs to another owner."""
    WEBHOOK_FAILED = "WebhookFailed"
    """An admission webhook does not answer."""
    API_UNAVAILABLE = "ApiUnavailable"
    """The API server does not answer, or is overloaded."""
    COORDINATOR_UNREACHABLE = "CoordinatorUnreachable"
    """The coordinator does not answer the operator."""
    COORDINATOR_UNAUTHORIZED = "CoordinatorUnauthorized"
    """The coordinator does not accept the operator's token."""
    BOUNDS_NOT_TAKEN = "BoundsNotTaken"
    """The coordinator has not accepted a new number of nodes or failures."""
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
    """The API server has no PodGroup kind, which this installation uses to place runs."""
    INVALID_SPEC = "InvalidSpec"
    """The run has a value that the operator does not allow."""
    OUTDATED_SPEC = "OutdatedSpec"
    """Used only for an event: the run contains a spelling that only earlier versions accept."""
    DELETING = "Deleting"
    """The run itself is being deleted."""
    # The end.
    COMPLETE = "Complete"
    """All steps are done."""
    ALREADY_COMPLETE = "AlreadyComplete"
    """The record on the volume shows that this run was complete before."""
    USER_ERROR = "UserError"
    """Wrong configuration or data."""
    WORKER_CRASH = "WorkerCrash"
    """Workers failed too often without progress."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Workers ran out of memory too often without progress."""
    VOLUME_FULL = "VolumeFull"
    """The volume is full: the last save failed, or the run failed after too many such failures without
    progress."""
    SAVE_FAILED = "SaveFailed"
    """The last save failed for another reason than a full volume."""
    OUT_OF_EPHEMERAL_STORAGE = "OutOfEphemeralStorage"
    """Pods exceeded their limit on their hosts' disks too many times without progress."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """``activeDeadlineSeconds`` has passed."""
    OUTPUT_CONFLICT = "OutputConflict"
    """Another run or another recipe uses this folder of the volume."""
    # Suspended.
    SUSPENDING = "Suspending"
    """Pods save and leave."""
    SUSPENDED = "Suspended"
    """``suspend`` is set and no pod is left."""
    STOPPED = "StoppedOnRequest"
    """The recipe or its stop file requested a stop; the state is saved."""
    NON_FINITE = "NonFinite"
    """A loss or a gradient was not finite. The state before that step is saved, and a person decides how to
    continue."""
    # Reasons of single conditions.
    NOT_COMPLETE = "NotComplete"
    """The run has not ended."""
    NOT_FAILED = "NotFailed"
    """No failure ended the run."""
    NOT_SUSPENDED = "NotSuspended"
    """``suspend`` is not set."""
    ALL_READY = "AllReady"
    """Every requested node is part of the group."""
    SOME_READY = "SomeReady"
    """Enough nodes train; other nodes are starting."""
    NO_PODS = "NoPods"
    """The run needs no pods now."""
    STEPS_ADVANCE = "StepsAdvance"
    """Steps are reported."""
    NO_STEP_YET = "NoStepYet"
    """No step has been reported so far."""
    NO_STEPS = "NoSteps"
    """No step has been reported within the progress timeout."""
    CHECKPOINT_SAVED = "CheckpointSaved"
    """There is a checkpoint."""
    NO_CHECKPOINT_YET = "NoCheckpointYet"
    """No checkpoint has been reported so far."""
    UP_TO_DATE = "UpToDate"
    """The newest generation of the run is being acted upon."""
    NOTHING_IN_THE_WAY = "NothingInTheWay"
    """No user action is required."""
