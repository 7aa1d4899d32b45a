"""Parses a raw pod into the facts that policies need, and determines the cause of its end. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from evergrad_common.causes import PodCause
from evergrad_common.contract import (
    MAX_TERMINATION_BYTES,
    ErrorKind,
    ExitCode,
    decode_termination,
    decode_trouble,
)
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.images import is_same_image
from evergrad_operator.core.objects.raw import (
    NOTHING,
    get_float,
    get_map,
    get_maps,
    get_text,
    keep_end,
    keep_start,
)
from evergrad_operator.core.objects.times import parse_time
from evergrad_operator.core.observe.kueue import QueuePlace, parse_place

MAX_MESSAGE: Final = 1024
"""Maximum length of a text that is read from a pod, in bytes."""

_BY_DISRUPTION: Final[Mapping[str, PodCause]] = {
    "PreemptionByScheduler": PodCause.PREEMPTED,
    "DeletionByTaintManager": PodCause.NODE_LOST,
    "DeletionByPodGC": PodCause.NODE_LOST,
    "EvictionByEvictionAPI": PodCause.EVICTED,
    "TerminationByKubelet": PodCause.EVICTED,
}
_BY_POD_REASON: Final[Mapping[str, PodCause]] = {
    "NodeLost": PodCause.NODE_LOST,
    "Evicted": PodCause.EVICTED,
    "NodeShutdown": PodCause.EVICTED,
    "Shutdown": PodCause.EVICTED,
    "Terminated": PodCause.EVICTED,
    "Preempting": PodCause.PREEMPTED,
    "DeadlineExceeded": PodCause.EVICTED,
    "NodeAffinity": PodCause.REFUSED_BY_NODE,
    "NodePorts": PodCause.REFUSED_BY_NODE,
    "NodeName": PodCause.REFUSED_BY_NODE,
    "UnexpectedAdmissionError": PodCause.REFUSED_BY_NODE,
    "TopologyAffinityError": PodCause.REFUSED_BY_NODE,
    "ResourceAllocationError": PodCause.REFUSED_BY_NODE,
    "PodLevelResourcesNotAdmitted": PodCause.REFUSED_BY_NODE,
}
_PULL: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_NOT_STARTED: Final = frozenset(
    {
        "StartError",
        "ContainerCannotRun",
        "RunContainerError",
        "CreateContainerError",
    }
)
_NOT_WITNESSED: Final = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of the kubelet and the container runtime for an end that was not observed, for example after a
reboot of the host."""
_NO_SPACE: Final = re.compile(
    r"no space (?:is )?left|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|\d [KMGTP]?i?B are free and",
    re.IGNORECASE,
)
_OVER_LIMIT: Final = re.compile(
    r"Usage of EmptyDir volume|ephemeral local storage usage exceeds|exceeded its local ephemeral storage"
)
"""Matches the kubelet's message about a pod that it evicts for writing more than its limit to the host's
disk."""
_LIMIT_RANGER: Final = "kubernetes.io/limit-ranger"
"""Annotation in which the API server lists the resources that it set from the namespace's LimitRange."""
_INITIALIZING: Final = "PodInitializing"
"""Waiting reason of a container that starts after other containers."""
_BY_SIGNAL: Final = (137, 143)
"""Exit codes of a process that ended by SIGKILL or SIGTERM."""
_STOPPED: Final = frozenset({ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED})
_BY_ITSELF: Final = frozenset({ExitCode.USER_ERROR, ExitCode.INTERNAL})
"""Exit codes of a node that ended on its own and reported the kind of error."""


@dataclass(frozen=True)
class PodEnd:
    """The end of a pod's container.

    ``exit_code``: None if the end was not observed. ``at``: seconds since 1970, None if unknown.
    """

    cause: PodCause
    exit_code: int | None
    message: str
    at: float | None


@dataclass(frozen=True)
class _LastWords:
    """A container's last messages before its end.

    ``kind``: the kind of error that the trainer reported, or None. ``trouble``: the problem with a volume,
    one of causes.TROUBLES. ``is_init``: True for an init container, which is not our program.
    """

    exit_code: int | None
    kind: ErrorKind | None
    text: str
    reason: str
    is_init: bool
    trouble: str = ""


@dataclass(frozen=True)
class PodState:
    """One pod of a run. Times are in seconds since 1970.

    ``started_at``: start of our container; None if it does not run. ``gone_by``: end of the grace period of a
    pod that is being deleted. ``end``: set after our container has ended and will not restart, whatever the
    pod's phase is. ``has_sidecar``: whether another container, for example an injected sidecar, still runs,
    or our container runs a wrong image. ``waiting_reason``, ``waiting_message``: why the container does
    not run, from the kubelet or the scheduler. ``waiting_image``: image of the container that waits, which
    may be an init container. ``image``: the image in the pod's spec. ``image_id``: the image that the
    container runs, as reported by the kubelet. ``place``: place in a queue of Kueue. ``gang``: kind of gang
    for which the pod was created; empty if none. ``has_token``: whether the run's token is mounted.
    ``asked_host``: the only host on which the pod may run; empty for any host. ``leave_seconds``: grace
    period of the pod's deletion, in seconds.
    """

    name: str
    uid: str
    role: str
    index: int
    attempt: int
    restart: int
    created_at: float
    started_at: float | None
    is_deleting: bool
    gone_by: float | None
    is_running: bool
    is_ready: bool
    end: PodEnd | None
    has_sidecar: bool
    disruption: PodCause | None
    waiting_reason: str
    waiting_message: str
    waiting_image: str
    node_name: str
    ip: str
    image: str
    image_id: str
    place: QueuePlace
    gang: str = ""
    has_token: bool = True
    asked_host: str = ""
    leave_seconds: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the pod runs or may still start."""
        return self.end is None and not self.is_deleting

    @property
    def is_over(self) -> bool:
        """Whether the pod's end can be recorded: it has ended, or it is being deleted."""
        return not self.is_live

    @property
    def is_image_missing(self) -> bool:
        """Whether the pod waits for an image that its host cannot pull."""
        return self.waiting_reason in _PULL

    @property
    def is_leaving(self) -> bool:
        """Whether the pod is being deleted and its container may still run."""
        return self.is_deleting and self.end is None and not self.place.is_gated


def parse_pod(raw: Mapping[str, Any]) -> PodState | None:
    """Parse a pod; return None if its labels are not valid labels of a run's pod."""
    metadata, status = get_map(raw, "metadata"), get_map(raw, "status")
    labels, annotations = get_map(metadata, "labels"), get_map(metadata, "annotations")
    role = get_text(labels, names.LABEL_ROLE)
    attempt = _number(labels.get(names.LABEL_ATTEMPT))
    index = _number(labels.get(names.LABEL_INDEX)) if role == names.ROLE_NODE else 0
    if role not in names.CONTAINERS or attempt is None or index is None:
        return None
    # Limit the index, because the operator builds lists of all nodes up to the highest index.
    if index >= names.MAX_NODES:
        return None

    conditions = get_maps(status, "conditions")
    disruption = _find_disruption(conditions)

    # Find our container by name. A mesh or an agent may have injected other containers, and the kubelet sorts
    # the containers by name.
    ours = names.CONTAINERS[role]
    statuses = get_maps(status, "containerStatuses")
    container = next((one for one in statuses if one.get("name") == ours), NOTHING)
    others = [one for one in statuses if one.get("name") != ours]
    image = _find_image(raw, "containers", ours)

    deleting = metadata.get("deletionTimestamp")
    end = _find_end(status, container, disruption, is_deleting=deleting is not None)
    if end is not None and end.cause == PodCause.OUT_OF_MEMORY:
        end = replace(end, message=_add_memory_limit(end.message, raw, ours))
    # Shorten the text of an error. Keep the whole report of an evaluation, because it is parsed later.
    if end and not (role == names.ROLE_EVALUATION and end.cause == PodCause.DONE):
        end = replace(end, message=keep_end(end.message, MAX_MESSAGE))
    reason, message, blocking = ("", "", "") if end else _why_waiting(status, container)
    volumes = {one.get("name") for one in get_maps(get_map(raw, "spec"), "volumes")}
    return PodState(
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        role=role,
        index=index,
        attempt=attempt,
        restart=_number(annotations.get(names.ANNOTATION_RESTART)) or 0,
        created_at=parse_time(metadata.get("creationTimestamp")) or 0.0,
        started_at=parse_time(get_map(container, "state", "running").get("startedAt")),
        is_deleting=deleting is not None,
        gone_by=parse_time(deleting),
        is_running=end is None and "running" in get_map(container, "state"),
        is_ready=end is None and any(_is_true(one, "Ready") for one in conditions),
        end=end,
        has_sidecar=any("running" in get_map(one, "state") for one in others),
        disruption=disruption,
        waiting_reason=reason,
        waiting_message=message,
        waiting_image=_find_image(raw, "initContainers", blocking) or image,
        node_name=str(get_map(raw, "spec").get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        image=image,
        image_id=get_text(container, "imageID"),
        place=parse_place(raw),
        gang=_find_gang(raw, labels),
        has_token=names.TOKEN_VOLUME in volumes,
        asked_host=get_text(annotations, names.ANNOTATION_HOST),
        leave_seconds=get_float(metadata, "deletionGracePeriodSeconds", least=0) or 0.0,
    )


def _find_gang(raw: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    if get_map(raw, "spec", "schedulingGroup"):
        return "podGroup"
    return "coscheduling" if names.LABEL_GANG in labels else ""


def _find_disruption(conditions: Sequence[Mapping[str, Any]]) -> PodCause | None:
    """Return the cause of a disruption that Kubernetes or Kueue has announced in the pod's conditions."""
    marks = [one for one in conditions if _is_true(one, "DisruptionTarget")]
    if marks:
        return _BY_DISRUPTION.get(str(marks[0].get("reason")), PodCause.EVICTED)
    if any(_is_true(one, "TerminationTarget") for one in conditions):
        # Kueue sets this condition if the queue needs the quota for another workload or no longer admits the
        # pod.
        return PodCause.PREEMPTED
    return None


def judge_image(pod: PodState, image_id: str, *, restart: int) -> PodState:
    """Return the pod, marked as ended if it runs another image than the first pod of its ``restart``.

    ``image_id``: image of the first pod; empty if unknown. A group with two images would run two different
    programs.
    """
    # A pod whose image has a digest runs that image. The host may report another digest, because one image
    # can have several manifests.
    is_by_digest = "@" in pod.image
    is_compared = pod.is_running and pod.restart == restart and not is_by_digest
    if not image_id or not is_compared or is_same_image(image_id, pod.image_id):
        return pod
    text = (
        f"on host {pod.node_name} {pod.image} is {pod.image_id}, where the run's first pod ran {image_id}. "
        "Bring the same image to all hosts, or name it by digest"
    )
    return replace(
        pod,
        is_running=False,
        is_ready=False,
        end=PodEnd(PodCause.HOST_FAULT, None, text, None),
        has_sidecar=True,
    )


def describe_cause(pod: PodState) -> PodCause:
    """Return why a pod that is over ended."""
    if pod.end is not None:
        return pod.end.cause
    # A pod that is being deleted without a disruption condition was deleted by a person or a tool.
    return pod.disruption or PodCause.DELETED


def _find_image(raw: Mapping[str, Any], kind: str, name: str) -> str:
    """Return the image in the spec of a container of this ``kind``; empty if there is no such container."""
    asked = get_maps(get_map(raw, "spec"), kind)
    return next((get_text(one, "image") for one in asked if one.get("name") == name), "")


def _add_memory_limit(text: str, raw: Mapping[str, Any], name: str) -> str:
    """Return the message of a container that was killed at its memory limit, with the limit and its
    source."""
    containers = get_maps(get_map(raw, "spec"), "containers")
    ours = next((one for one in containers if one.get("name") == name), NOTHING)
    limit = get_text(get_map(ours, "resources", "limits"), "memory")
    if not limit:
        return text
    said = f"its memory limit was {limit}"
    notes = get_text(get_map(raw, "metadata", "annotations"), _LIMIT_RANGER)
    if re.search(rf"memory limit for container {re.escape(name)}\b", notes):
        said += ", from a LimitRange of the namespace, since the run sets none"
    elif (
        re.search(rf"limit for container {re.escape(name)}\b", notes) and "memory" in notes
    ):
        said += ", from a LimitRange of the namespace"
    return f"{text.strip()} {said}".strip()


def says_no_space(text: str) -> bool:
    """Return whether the last message of a program is about a full volume.

    For example, "OSError: [Errno 28] No space left on device" is. Use this for programs that do not report
    the kind of error.
    """
    return _NO_SPACE.search(text) is not None


def _find_failed(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the init container whose failure ended the pod (may be empty)."""
    failed = []
    for one in get_maps(status, "initContainerStatuses"):
        end = get_map(one, "state", "terminated")
        if code := end.get("exitCode"):
            failed.append((get_text(end, "finishedAt"), code in _BY_SIGNAL, one))
    # Choose the first failure. Sidecars that a mesh has injected are killed after it, possibly in the same
    # second, so a container that ended by a signal comes last.
    return min(failed, key=lambda found: found[:2])[2] if failed else NOTHING


def _find_end(
    status: Mapping[str, Any],
    container: Mapping[str, Any],
    disruption: PodCause | None,
    *,
    is_deleting: bool,
) -> PodEnd | None:
    """Return how our container ended; None if it may still run."""
    phase = status.get("phase")
    terminated = get_map(container, "state", "terminated")
    code = terminated.get("exitCode")
    # The kubelet restarts a coordinator's container that fails, but never a node's container. The pod's phase
    # may not show the end of our container: the pod is Running as long as an injected sidecar runs.
    is_for_good = bool(terminated) and (
        container.get("name") != names.CONTAINERS[names.ROLE_COORDINATOR] or code == 0
    )
    if phase not in ("Succeeded", "Failed") and not is_for_good:
        return None

    # If our container has not started, an init container may have failed, which ends the pod for good.
    failed = NOTHING if terminated or phase == "Succeeded" else _find_failed(status)
    if failed:
        terminated = get_map(failed, "state", "terminated")
        code = terminated.get("exitCode")

    # Read the termination message, or the end of the log that the kubelet uses if there is no message.
    message = str(terminated.get("message") or status.get("message") or "")
    kind, text = decode_termination(message)
    if failed:
        said = text.strip() or "it left no message; see kubectl logs -c"
        text = f"init container {get_text(failed, 'name')}: {said}"
    exit_code = code if isinstance(code, int) and not isinstance(code, bool) else None
    words = _LastWords(
        exit_code,
        kind,
        text.strip(),
        str(terminated.get("reason") or ""),
        is_init=bool(failed),
        trouble=decode_trouble(message),
    )
    if phase == "Succeeded" and exit_code is None:
        cause = PodCause.DONE
    else:
        cause = _find_cause(
            words,
            status,
            disruption,
            is_deleting=is_deleting,
        )
    # For an evicted pod, use the kubelet's message instead of the container's log.
    text = words.text
    if cause in (PodCause.EVICTED, PodCause.OUT_OF_EPHEMERAL_STORAGE):
        text = str(status.get("message") or text).strip()
    return PodEnd(
        cause,
        exit_code,
        keep_end(text, MAX_TERMINATION_BYTES),
        parse_time(terminated.get("finishedAt")),
    )


def _find_cause(
    words: _LastWords,
    status: Mapping[str, Any],
    disruption: PodCause | None,
    *,
    is_deleting: bool,
) -> PodCause:
    """Return the cause of the end.

    The error that the process reported takes precedence, then signs from the kernel, Kubernetes and the
    kubelet, then the exit code.
    """
    pod_reason, exit_code = str(status.get("reason") or ""), words.exit_code
    is_environment = words.kind is ErrorKind.ENVIRONMENT and exit_code in _BY_ITSELF
    if exit_code == ExitCode.DONE:
        return PodCause.DONE
    if exit_code == ExitCode.USER_ERROR and not is_environment:
        return PodCause.USER_ERROR

    # Check the most reliable sign first: the kernel's, then the disruption condition, then the kubelet's
    # reason.
    if words.reason == "OOMKilled":
        return PodCause.OUT_OF_MEMORY
    if pod_reason == "Evicted" and _OVER_LIMIT.search(str(status.get("message") or "")):
        return PodCause.OUT_OF_EPHEMERAL_STORAGE
    if disruption is not None:
        return disruption
    if pod_reason.startswith("OutOf"):
        return PodCause.REFUSED_BY_NODE
    if pod_reason:
        return _BY_POD_REASON.get(pod_reason, PodCause.EVICTED)
    if is_deleting:
        return PodCause.DELETED
    # Only our program uses these exit codes for a requested stop; an init container may use them otherwise.
    if exit_code in _STOPPED and not words.is_init:
        return PodCause.STOPPED
    if words.reason in _NOT_STARTED:
        return PodCause.START_ERROR

    # If the end of the process was not observed, assume that the host is lost.
    if exit_code is None or words.reason in _NOT_WITNESSED:
        return PodCause.NODE_LOST
    # A user's script reports no kind of error, so match its last message.
    if words.trouble == "no_space" or says_no_space(words.text):
        return PodCause.VOLUME_FULL
    return PodCause.HOST_FAULT if is_environment else PodCause.WORKER_CRASH


def _why_waiting(
    status: Mapping[str, Any], container: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return the reason, the message and the init container for which the pod waits.

    Reason and message come from the kubelet for a container, or else from the scheduler for the pod. The
    third value is the name of the init container that the other containers wait for (may be empty).
    """
    # Check init containers first: while an init container waits, our container only has PodInitializing.
    for one in get_maps(status, "initContainerStatuses"):
        waiting = get_map(one, "state", "waiting")
        reason, name = waiting.get("reason"), get_text(one, "name")
        if reason and reason != _INITIALIZING:
            message = f"init container {name}: {waiting.get('message') or ''}".rstrip(": ")
            return str(reason), keep_start(message, MAX_MESSAGE), name
    waiting = get_map(container, "state", "waiting")
    running = [
        get_text(one, "name")
        for one in get_maps(status, "initContainerStatuses")
        if "running" in get_map(one, "state")
    ]
    if waiting.get("reason") == _INITIALIZING and running:
        return _INITIALIZING, f"init container {running[-1]} runs", ""
    if waiting.get("reason"):
        message = str(waiting.get("message") or "")
        return str(waiting["reason"]), keep_start(message, MAX_MESSAGE), ""
    for condition in get_maps(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason, message = condition.get("reason"), str(condition.get("message") or "")
            return str(reason or "Unschedulable"), keep_start(message, MAX_MESSAGE), ""
    return "", "", ""


def _is_true(condition: Mapping[str, Any], kind: str) -> bool:
    return condition.get("type") == kind and condition.get("status") == "True"


def _number(value: Any) -> int | None:
    """Return the number in a label; None for any other text.

    The length is limited, because any client may set a label.
    """
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 10
    return int(value) if is_number else None
