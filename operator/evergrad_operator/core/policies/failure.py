"""Decides whether a failure ends the run, and builds the message with the root cause and the remedy."""

from typing import Final

from evergrad_common.causes import PodCause
from evergrad_common.contract import SEE_LOGS
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.status_encoding import pack_ranges
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.memory import LastFailure
from evergrad_operator.core.observe.pod_messages import (
    describe_disk_remedy,
    describe_end,
    describe_volume_remedy,
    quote,
    stop,
)
from evergrad_operator.core.observe.pods import says_no_space
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.host_faults import is_input_error_confirmed

_REASONS: Final = {
    PodCause.USER_ERROR: Reason.USER_ERROR,
    PodCause.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    PodCause.VOLUME_FULL: Reason.VOLUME_FULL,
    PodCause.OUT_OF_EPHEMERAL_STORAGE: Reason.OUT_OF_EPHEMERAL_STORAGE,
    PodCause.START_ERROR: Reason.START_ERROR,
}
_THEN: Final = "set spec.restartNonce to a new text"
_REMEDIES: Final = {
    Reason.USER_ERROR: (
        f"Correct a recipe in a new TrainingRun; after a change of files or volumes alone, {_THEN}."
    ),
    Reason.OUT_OF_MEMORY: (
        f"Raise spec.resources.limits.memory and {_THEN}, or lower the micro-batch in a new TrainingRun."
    ),
    Reason.OUT_OF_EPHEMERAL_STORAGE: stop(
        describe_disk_remedy("spec.resources", then=_THEN)
    ),
    Reason.START_ERROR: f"Check spec.image, spec.template and the node's runtime; then {_THEN}.",
    Reason.WORKER_CRASH: (
        f"Read that node's logs (kubectl logs, or logs/ in the run directory); to try again, {_THEN}."
    ),
}


def _read_failure(progress: CoordinatorStatus) -> tuple[Reason, str]:
    """Return the reason and the message of a run's failure from its coordinator's status."""
    failure = progress.last_failure
    said = progress.message or (failure.message if failure else "")
    # Remove the hint about logs, because the remedy explains how to read logs on a cluster.
    said = said.removesuffix(SEE_LOGS).rstrip()
    cause = failure.cause if failure else ""
    if progress.reason == "UserError" or cause == "user_error":
        reason = Reason.USER_ERROR
    elif cause == "out_of_memory":
        reason = Reason.OUT_OF_MEMORY
    elif cause == "volume_full" or says_no_space(said):
        reason = Reason.VOLUME_FULL
    else:
        reason = Reason.WORKER_CRASH
    # Add the node only if the coordinator's message does not name it.
    where = ""
    if failure is not None and f"node {failure.node}" not in said:
        where = f"node {failure.node}, rank {failure.rank}, exit code {failure.exit_code}: "
    return reason, stop(where + (quote(said) or progress.reason))


def fail_if_due(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run failed; None if no failure ends the run."""
    # Check the nodes first. Exit code 64 ends the run after it is confirmed.
    memory, ended = context.memory, []
    if is_input_error_confirmed(memory, context.observation):
        ended = [
            (pod.end.at or float("inf"), pod.index, pod.name, pod.end.message)
            for pod in context.nodes
            if pod.restart == memory.restart
            and pod.end is not None
            and pod.end.cause == PodCause.USER_ERROR
        ]
    if ended:
        # Report the node that ended first, because the other errors may be consequences.
        _, index, name, message = min(ended)
        said = quote(message)
        text = f"node {index} (pod {name}) ended with exit code 64: {said or 'it left no message'}"
        # A volume that is too small also ends with exit code 64 before the first step. The recipe is not the
        # cause.
        reason = Reason.VOLUME_FULL if says_no_space(said) else Reason.USER_ERROR
        return context.finished(
            Phase.FAILED, reason, f"{stop(text)} {_describe_remedy(context, reason)}"
        )

    # Then check the coordinator's outcome, because it counts workers that fail inside the pods.
    progress = context.progress
    if progress is not None and progress.phase == "Failed":
        reason, text = _read_failure(progress)
        return context.finished(
            Phase.FAILED, reason, f"{text} {_describe_remedy(context, reason)}"
        )

    # Check the budget last. The status of another version may contain a cause that this version does not
    # have.
    budget, last = memory.budget, memory.last_failure
    most = context.run.spec.failure_policy.max_failures_without_progress
    if budget.failures <= most:
        return None
    known = next((one for one in PodCause if last is not None and one == last.cause), None)
    reason = _REASONS.get(known or PodCause.WORKER_CRASH, Reason.WORKER_CRASH)
    text = (
        f"pods failed {budget.failures} times without progress; {most} such failures are allowed. "
        f"Last: {describe_failure(last)}"
    )
    limit = context.run.spec.resources.limits.get("memory")
    bound = (
        f" The memory limit is {limit}." if reason == Reason.OUT_OF_MEMORY and limit else ""
    )
    return context.finished(
        Phase.FAILED, reason, f"{stop(text)}{bound} {_describe_remedy(context, reason)}"
    )


def _describe_remedy(context: ReconcileContext, reason: Reason) -> str:
    if reason == Reason.VOLUME_FULL:
        newest = context.memory.training.checkpoint_step
        return describe_volume_remedy(context.run, newest, is_over=True)
    return _REMEDIES[reason]


def describe_failure(failure: LastFailure | None) -> str:
    """Return a failure as one line: cause, node, exit code and the process's message."""
    if failure is None:
        return "unknown"
    where = "an unknown node" if failure.node is None else f"node {failure.node}"
    return describe_end(failure, where=where)


def describe_host_faults(context: ReconcileContext) -> str:
    """Return a message about the nodes that wait, the time of the retry, and the hosts to inspect."""
    faults, last = context.memory.faults, context.memory.last_failure
    noun = "nodes" if len(faults.nodes) > 1 else "node"
    text = f"host faults, {faults.in_a_row} in a row, of {noun} {pack_ranges(faults.nodes)}"
    # List the host of the newest fault first.
    hosts = ", ".join(f"{host} ({count})" for host, count in reversed(faults.hosts))
    if hosts:
        text += f"; by host: {hosts}"
    text += "; it is tried again"
    if context.now < faults.retry_at:
        text += f" at {format_time(faults.retry_at)}"
    text += ", elsewhere if there is room, and costs no failure"
    return f"{text}. Last: {describe_failure(last)}" if last else text


def is_backing_off(context: ReconcileContext) -> bool:
    """Return whether replacements of pods have to wait."""
    return context.now < context.memory.budget.retry_at
