"""Determines the newest failure and its root cause from the reports of pods and of the coordinator. Pure.

| reported by | after | result |
|---|---|---|
| a pod with exit code 64 or 70 | its coordinator reported a rank in the last minute | the rank stays |
| any pod that failed | | the pod, its exit code and its message |
| a pod with a host fault | a failure that counts, in the same pass | the failure stays |
| the coordinator | a pod with exit code 64 or 70 in the last minute | the coordinator's report, which has the
rank | | the coordinator | the same failure again, with a time within two seconds | no change |
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
"""Maps the coordinator's causes to causes of pods. Any other cause counts as a crash."""
_EPHEMERAL_STORAGE = "ephemeral-storage"
_NODE_DIGITS = 7
_REPEAT_SECONDS = 60.0
"""Maximum time between the coordinator's report of a failed rank and the end of the node."""
_WAVER_SECONDS = 2.0
_SAID_BEFORE = (ExitCode.USER_ERROR, ExitCode.INTERNAL)
"""Exit codes of a node that ends on its own after it has reported the reason to its coordinator."""


def note_pods(memory: Memory, ended: Sequence[PodState], now: float) -> Memory:
    """Return the memory with the last failure among the pods in ``ended``."""
    failure = memory.last_failure
    failed = [
        pod for pod in ended if describe_cause(pod) in (*COUNTED, PodCause.USER_ERROR)
    ]
    # Report host faults only if no pod with a failure that counts has ended in the same pass.
    if not failed:
        failed = [pod for pod in ended if describe_cause(pod) == PodCause.HOST_FAULT]
    # An eviction costs no failure. Report it if the disk was full, because a person can prevent that.
    if not failed:
        failed = [pod for pod in ended if is_short_of_disk(pod)]
    for pod in failed:
        end = pod.end
        message = end.message if end else ""
        # Add a remedy, because the kubelet's message has none.
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
        # A failure with a rank comes from the coordinator. Keep it, because a pod's end does not contain the
        # rank.
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
    """Return whether a pod was evicted because its host's disk was full, and not for its own disk usage."""
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
    # The pod and the coordinator report the same failure in either order, with slightly different times.
    at, known = now - failure.seconds_ago, memory.last_failure
    is_repeat = (
        known is not None
        and known.rank is None
        and known.exit_code in _SAID_BEFORE
        and at > known.at - _REPEAT_SECONDS
    )
    if known is not None and at <= known.at + _WAVER_SECONDS and not is_repeat:
        return memory

    # A node's id is a text. Only a small number can be the index of a pod.
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
