"""A raw pod → the facts that policies need, and the cause of its end. Pure."""

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
"""Longest text taken from a pod, in bytes."""

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
"""Reasons, of the kubelet and of the container runtime, of an end that was not seen, as after a host's
reboot."""
_NO_SPACE: Final = re.compile(
    r"no space (?:is )?left|disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|\d [KMGTP]?i?B are free and",
    re.IGNORECASE,
)
_OVER_LIMIT: Final = re.compile(
    r"Usage of EmptyDir volume|ephemeral local storage usage exceeds|exceeded its local ephemeral storage"
)
"""The kubelet's words for a pod that it evicts since it wrote more on its host's disk than it may."""
_LIMIT_RANGER: Final = "kubernetes.io/limit-ranger"
"""Annotation in which the API server notes what it has set by the namespace's LimitRange."""
_INITIALIZING: Final = "PodInitializing"
"""Reason for which a container waits that comes after others."""
_BY_SIGNAL: Final = (137, 143)
"""Exit codes of a process that was killed or terminated."""
_STOPPED: Final = frozenset({ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED})
_BY_ITSELF: Final = frozenset({ExitCode.USER_ERROR, ExitCode.INTERNAL})
"""Exit codes of a node that ended by itself, which names the kind of trouble itself."""


@dataclass(frozen=True)
class PodEnd:
    """The end of a pod's container. ``exit_code``: None where the end was not seen.

    ``at``: seconds since 1970, if known.
    """

    cause: PodCause
    exit_code: int | None
    message: str
    at: float | None


@dataclass(frozen=True)
class _LastWords:
    """A container's own account of its end. ``kind``: as the trainer reported it; None for no report.

    ``trouble``: of a volume, one of causes.TROUBLES. ``is_init``: of an init container, which is no program
    of ours.
    """

    exit_code: int | None
    kind: ErrorKind | None
    text: str
    reason: str
    is_init: bool
    trouble: str = ""


@dataclass(frozen=True)
class PodState:
    """One pod of a run. Times in seconds since 1970.

    ``started_at``: the start of its own container; None where it does not run. ``gone_by``: the end of its
    grace, for a pod that is being deleted. ``end`` is set once its own container has ended for good, whatever
    the pod's phase. ``has_sidecar``: a container still runs in a pod that is over: one that somebody
    has injected, or one of a wrong image. ``waiting_reason`` and ``waiting_message``: why its container does
    not run, as the kubelet or the scheduler says; ``waiting_image``: the image of the container that waits,
    which may be an init container. ``image``: what was asked for; ``image_id``: what its
    container runs, as the kubelet names it. ``place``: its place in a queue of Kueue. ``gang``: the kind
    of gang that it was made for, empty for none. ``has_token``: whether it was given the run's.
    ``asked_host``: the one host that it may come to, empty for any. ``leave_seconds``: the grace that its
    deletion gives it.
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
        """Whether it trains or may still come to train."""
        return self.end is None and not self.is_deleting

    @property
    def is_over(self) -> bool:
        """Whether its end can be recorded: it has ended, or it is being deleted."""
        return not self.is_live

    @property
    def is_image_missing(self) -> bool:
        """Whether it waits for an image that its host cannot get."""
        return self.waiting_reason in _PULL

    @property
    def is_leaving(self) -> bool:
        """Whether it is being deleted and its container may still run."""
        return self.is_deleting and self.end is None and not self.place.is_gated


def parse_pod(raw: Mapping[str, Any]) -> PodState | None:
    """Parse a pod; None where its labels are not those of a run's pod."""
    metadata, status = get_map(raw, "metadata"), get_map(raw, "status")
    labels, annotations = get_map(metadata, "labels"), get_map(metadata, "annotations")
    role = get_text(labels, names.LABEL_ROLE)
    attempt = _number(labels.get(names.LABEL_ATTEMPT))
    index = _number(labels.get(names.LABEL_INDEX)) if role == names.ROLE_NODE else 0
    if role not in names.CONTAINERS or attempt is None or index is None:
        return None
    # A list of all nodes up to this one is made of it.
    if index >= names.MAX_NODES:
        return None

    conditions = get_maps(status, "conditions")
    disruption = _find_disruption(conditions)

    # Our own container is found by its name: a mesh or an agent may have injected others, and the kubelet
    # sorts them by name.
    ours = names.CONTAINERS[role]
    statuses = get_maps(status, "containerStatuses")
    container = next((one for one in statuses if one.get("name") == ours), NOTHING)
    others = [one for one in statuses if one.get("name") != ours]
    image = _find_image(raw, "containers", ours)

    deleting = metadata.get("deletionTimestamp")
    end = _find_end(status, container, disruption, is_deleting=deleting is not None)
    if end is not None and end.cause == PodCause.OUT_OF_MEMORY:
        end = replace(end, message=_add_memory_limit(end.message, raw, ours))
    # An error's text is cut, a report is read whole.
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
    """Find what Kubernetes notes that will end a pod, before it does so."""
    marks = [one for one in conditions if _is_true(one, "DisruptionTarget")]
    if marks:
        return _BY_DISRUPTION.get(str(marks[0].get("reason")), PodCause.EVICTED)
    if any(_is_true(one, "TerminationTarget") for one in conditions):
        # Kueue's mark: the queue needs the quota for another, or does not admit the pod any more.
        return PodCause.PREEMPTED
    return None


def judge_image(pod: PodState, image_id: str, *, restart: int) -> PodState:
    """Return the pod; one that runs another image than the others of its ``restart`` counts as over.

    ``image_id``: the image of the first of them, empty where it is not known. A group of two images would
    train two programs.
    """
    # A pod that asked for a digest runs it. Its host may name the image by another: one image can have
    # several manifests.
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
    # A pod that is being deleted without a mark of Kubernetes was deleted by a person or a tool.
    return pod.disruption or PodCause.DELETED


def _find_image(raw: Mapping[str, Any], kind: str, name: str) -> str:
    """Return the image that was asked for a container of this ``kind``; empty where there is none."""
    asked = get_maps(get_map(raw, "spec"), kind)
    return next((get_text(one, "image") for one in asked if one.get("name") == name), "")


def _add_memory_limit(text: str, raw: Mapping[str, Any], name: str) -> str:
    """Return the last words of a container that was killed at its memory limit, with that limit and where it
    comes from."""
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
    """Whether the last words of a program that reports no trouble of its own are about a full volume."""
    return _NO_SPACE.search(text) is not None


def _find_failed(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the init container whose failure ended the pod; empty where there is none."""
    failed = []
    for one in get_maps(status, "initContainerStatuses"):
        end = get_map(one, "state", "terminated")
        if code := end.get("exitCode"):
            failed.append((get_text(end, "finishedAt"), code in _BY_SIGNAL, one))
    # The first of them: sidecars that a mesh has injected are killed after it, perhaps in the same second.
    return min(failed, key=lambda found: found[:2])[2] if failed else NOTHING


def _find_end(
    status: Mapping[str, Any],
    container: Mapping[str, Any],
    disruption: PodCause | None,
    *,
    is_deleting: bool,
) -> PodEnd | None:
    """Return how the pod's own container ended; None while it may run."""
    phase = status.get("phase")
    terminated = get_map(container, "state", "terminated")
    code = terminated.get("exitCode")
    # A coordinator's container that fails is started again by the kubelet; a node's never is. The phase does
    # not show the end of ours where a sidecar was injected: the pod is Running for as long as that one runs.
    is_for_good = bool(terminated) and (
        container.get("name") != names.CONTAINERS[names.ROLE_COORDINATOR] or code == 0
    )
    if phase not in ("Succeeded", "Failed") and not is_for_good:
        return None

    # Where ours has not begun, an init container may have failed: the pod ends with it, never to start again.
    failed = NOTHING if terminated or phase == "Succeeded" else _find_failed(status)
    if failed:
        terminated = get_map(failed, "state", "terminated")
        code = terminated.get("exitCode")

    # The process's last words, or the end of the log that the kubelet took in their place.
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
    # An evicted pod is explained by the kubelet, and not by the log that it had until then.
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
    """Find the cause: the process's own words count most, then the sign of what ended it, then the bare exit
    code."""
    pod_reason, exit_code = str(status.get("reason") or ""), words.exit_code
    is_environment = words.kind is ErrorKind.ENVIRONMENT and exit_code in _BY_ITSELF
    if exit_code == ExitCode.DONE:
        return PodCause.DONE
    if exit_code == ExitCode.USER_ERROR and not is_environment:
        return PodCause.USER_ERROR

    # From here on the most certain sign comes first: the kernel's, Kubernetes' mark, the kubelet's reason.
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
    # Only our own program has such an exit code when it was asked to stop.
    if exit_code in _STOPPED and not words.is_init:
        return PodCause.STOPPED
    if words.reason in _NOT_STARTED:
        return PodCause.START_ERROR

    # The end of the process was not seen: its host is taken to be lost.
    if exit_code is None or words.reason in _NOT_WITNESSED:
        return PodCause.NODE_LOST
    # The words are all that a script of the user's own leaves.
    if words.trouble == "no_space" or says_no_space(words.text):
        return PodCause.VOLUME_FULL
    return PodCause.HOST_FAULT if is_environment else PodCause.WORKER_CRASH


def _why_waiting(
    status: Mapping[str, Any], container: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return reason, message and init container: the kubelet's for the container, else the scheduler's for
    the pod.

    The third is the name of the init container that the others wait for, empty for none.
    """
    # Init containers come first: while one of them waits, ours only says that it does.
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
    """Read a label's number; None for any other text. Bounded, because anybody may set a label."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 10
    return int(value) if is_number else None
