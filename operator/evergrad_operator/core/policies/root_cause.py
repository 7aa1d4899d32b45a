"""The newest failure and its root cause, from the reports of pods and of the coordinator. Pure.

| reported by | after | result |
|---|---|---|
| a pod that ended by itself, exit code 64 or 70 | its coordinator named a rank just before | the rank stays |
| any pod that failed | | the pod, its exit code and last words |
| a pod with a host fault | a failure that counts, in the same look | the failure stays |
| the coordinator | a pod ended by itself in the last minute | the coordinator's: it names the rank |
| the coordinator | the same failure once more: its time wavers by two seconds | nothing new |
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from evergrad_common.causes import CHANGES, COUNTED, PodCause
from evergrad_common.contract import ExitCode
from evergrad_operator.core.objects.raw import keep_end
from evergrad_operator.core.observe.coordinator_status import ReportedFailure
from evergrad_operator.core.observe.memory import LastFailure, Memory
from evergrad_operator.core.observe.pods import MAX_MESSAGE, PodState, describe_cause

CAUSES: Mapping[str, PodCause] = {name: one.pod for name, one in CHANGES.items() if one.pod}
"""The coordinator's word for a cause → ours; any other is a crash."""
_EPHEMERAL_STORAGE = "ephemeral-storage"
_NODE_DIGITS = 7
_REPEAT_SECONDS = 60.0
"""Time within which a node ends after its coordinator has named the rank that failed."""
_WAVER_SECONDS = 2.0
_SAID_BEFORE = (ExitCode.USER_ERROR, ExitCode.INTERNAL)
"""Exit codes of a node that ends by itself, after it has reported the reason to its coordinator."""


def note_pods(memory: Memory, ended: Sequence[PodState], now: float) -> Memory:
    """Return the memory with the last failure among pods that have just ended."""
    failure = memory.last_failure
    failed = [
        pod for pod in ended if describe_cause(pod) in (*COUNTED, PodCause.USER_ERROR)
    ]
    # Host faults are reported only where nothing that counts has ended in the same look.
    if not failed:
        failed = [pod for pod in ended if describe_cause(pod) == PodCause.HOST_FAULT]
    # An eviction is free, and for once a person can do something about it.
    if not failed:
        failed = [pod for pod in ended if is_short_of_disk(pod)]
    for pod in failed:
        end = pod.end
        message = end.message if end else ""
        # An eviction's words have no remedy.
        if is_short_of_disk(pod):
            disk = f"spec.resources.requests.{_EPHEMERAL_STORAGE}"
            remedy = f"Set {disk}: a host with room is chosen then"
            message = f"{keep_end(message, MAX_MESSAGE - len(remedy) - 1)} {remedy}"
        described = LastFailure(
            cause=describe_cause(pod),
            node=pod.index,
            message=message,
            at=(end and end.at) or now,
            step=memory.training.step,
            exit_code=end.exit_code if end else None,
        )
        # A failure that has a rank is the coordinator's, which names the rank that the pod cannot name.
        is_repeated = (
            failure is not None
            and failure.rank is not None
            and described.at - failure.at < _REPEAT_SECONDS
            and described.exit_code in _SAID_BEFORE
        )
        if not is_repeated:
            failure = described
    return replace(memory, last_failure=failure)


def is_short_of_disk(pod: PodState) -> bool:
    """Whether a pod was evicted since its host had too little disk left, and not for what it wrote itself."""
    end = pod.end
    return (
        end is not None
        and end.cause == PodCause.EVICTED
        and f"low on resource: {_EPHEMERAL_STORAGE}" in end.message
    )


def note_outcome(memory: Memory, failure: ReportedFailure | None, now: float) -> Memory:
    """Return the memory with the last failure as the coordinator reports it."""
    if failure is None or failure.cause == "peer_lost":
        return memory
    # The same failure is reported by the pod and by the coordinator, in either order and at slightly
    # different times.
    at, known = now - failure.seconds_ago, memory.last_failure
    is_repeat = (
        known is not None
        and known.rank is None
        and known.exit_code in _SAID_BEFORE
        and at > known.at - _REPEAT_SECONDS
    )
    if known is not None and at <= known.at + _WAVER_SECONDS and not is_repeat:
        return memory

    # A node's id is a text, and only a small number can be the index of a pod.
    is_number = failure.node.isdecimal() and len(failure.node) < _NODE_DIGITS
    described = LastFailure(
        cause=CAUSES.get(failure.cause, PodCause.WORKER_CRASH),
        node=int(failure.node) if is_number else None,
        message=keep_end(failure.message, MAX_MESSAGE),
        at=at,
        rank=failure.rank,
        step=failure.step,
        exit_code=failure.exit_code,
    )
    return replace(memory, last_failure=described)
