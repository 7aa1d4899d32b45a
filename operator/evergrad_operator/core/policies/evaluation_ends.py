"""Counts the ends of pods that evaluate checkpoints, each end once. No such end ends the run. Pure.

| end of the evaluation pod | result |
|---|---|
| exit code 0 with a report | the results are in the status; the next waiting checkpoint follows |
| exit code 0 without a report, exit code 64 | no checkpoint is evaluated until the run is edited |
| crash, out of memory, volume full, not started | one failure of a separate budget; another pod continues |
| host fault | another pod continues with a growing delay, on another host if possible |
| any other | another pod continues; it costs no failure |
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from evergrad_common.causes import PodCause
from evergrad_common.evaluation_report import decode_evaluated
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.names import Reason
from evergrad_operator.core.observe.evaluation import (
    EvaluationProgress,
    Tries,
    take_report,
    take_up,
)
from evergrad_operator.core.observe.memory import Budget, HostFaults, LastFailure, Memory
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pod_messages import (
    describe_disk_remedy,
    describe_end,
    quote,
    stop,
)
from evergrad_operator.core.observe.pods import PodState, describe_cause
from evergrad_operator.core.policies.budget import count_failures
from evergrad_operator.core.policies.host_faults import forget_hosts, note_host_faults
from evergrad_operator.core.policies.pod_ends import find_new_ends

NONE_AFTER: Final = (Reason.DEADLINE_EXCEEDED, Reason.OUTPUT_CONFLICT)
"""Ends of a run after which no pod of the run may continue."""
_OF_HOST: Final = (PodCause.HOST_FAULT, PodCause.REFUSED_BY_NODE)
_REMEDIES: Final = {
    PodCause.OUT_OF_MEMORY: "Raise spec.evaluation.resources.limits.memory",
    PodCause.OUT_OF_EPHEMERAL_STORAGE: describe_disk_remedy(
        "spec.evaluation.resources", then="edit spec.evaluation"
    ),
    PodCause.VOLUME_FULL: "Enlarge the PersistentVolumeClaim, then edit spec.evaluation",
}
_REMEDY: Final = "Read that pod's log (kubectl logs); to try again, edit spec.evaluation"


def note_evaluation(
    memory: Memory, observation: Observation, config: Config, now: float
) -> Memory:
    """Return the memory with every end of an evaluation pod that was not counted before."""
    known, run = _forget_hosts(memory.evaluation, now), observation.run
    # A recorded pod that no longer exists has ended unobserved. Its results are on the volume.
    pods = observation.evaluations
    is_gone = known.attempt >= 0 and all(pod.attempt != known.attempt for pod in pods)
    ends = find_new_ends(pods, known.attempt, is_counted=known.is_recorded or is_gone)
    known = replace(known, attempt=ends.attempt, is_recorded=ends.is_counted)

    # An edit of the run makes a failed evaluation start again.
    if known.failed and known.failed != run.generation:
        known = replace(known, failed=0, failure="", tries=known.tries.begin_anew())
    ended = [pod for pod in ends.ended if pod.restart == memory.restart]
    for pod in ended:
        known = _take_result(known, pod, run.generation)
    is_sent_away = run.spec.suspend or memory.is_stopped or run.spec.evaluation is None
    if ended and not is_sent_away:
        known = _count(memory, known, ended, observation, config, now)
    return replace(memory, evaluation=known)


def _forget_hosts(known: EvaluationProgress, now: float) -> EvaluationProgress:
    """Forget hosts whose last fault is old enough."""
    # Older releases stored no times for hosts. Use the time of the last fault, or the current time.
    tries, times = known.tries, dict(known.tries.seen)
    timed = ((host, times.get(host, tries.at or now)) for host, _ in tries.hosts)
    faults = forget_hosts(_read_faults(replace(tries, seen=tuple(timed))), now)
    return replace(known, tries=replace(tries, hosts=faults.hosts, seen=faults.seen))


def _take_result(
    known: EvaluationProgress, pod: PodState, generation: int
) -> EvaluationProgress:
    """Add the results of an ended pod, or the failure for which no retry helps.

    ``generation``: the run's generation. After such a failure, no checkpoint is evaluated until an edit.
    """
    cause, message = describe_cause(pod), pod.end.message if pod.end else ""
    report = decode_evaluated(message) if cause == PodCause.DONE else None
    if report is not None:
        return take_report(known, report)
    if cause == PodCause.DONE:
        failure = (
            f"pod {pod.name} ended with exit code 0 and left no results. Does its image have this "
            "version of Evergrad? Correct spec.image or edit spec.evaluation"
        )
    elif cause == PodCause.USER_ERROR:
        said = stop(quote(message) or "it left no message")
        failure = (
            f"pod {pod.name} ended with exit code 64: {said} "
            "Correct it, then edit spec.evaluation"
        )
    else:
        return known
    # A retry or the next checkpoint would end in the same way.
    return replace(known, failed=generation, failure=failure)


def _read_faults(tries: Tries) -> HostFaults:
    """Return the host faults in the form that is used for nodes, so that the same rules apply."""
    return HostFaults(
        tries.hosts,
        in_a_row=tries.faults,
        at=tries.at,
        retry_at=tries.retry_at,
        seen=tries.seen,
    )


def is_evaluation_due(memory: Memory, observation: Observation) -> bool:
    """Return whether checkpoints of the run wait for an evaluation and a pod may still be created for
    them."""
    run, finish = observation.run, memory.finish
    if run.spec.evaluation is None or not run.parsed.is_typed:
        return False
    if finish is not None and finish.reason in NONE_AFTER:
        return False
    known = take_up(memory.evaluation, memory.training.checkpoint_step)
    return bool(known.pending) and known.failed != run.generation


def _count(
    memory: Memory,
    known: EvaluationProgress,
    ended: Sequence[PodState],
    observation: Observation,
    config: Config,
    now: float,
) -> EvaluationProgress:
    """Count failures and host faults by the rules for nodes, in a separate budget."""
    tries = known.tries
    scratch = Memory(
        has_formed=True,
        budget=Budget(
            tries.failures,
            at=tries.at,
            short_lives=tries.short_lives,
            retry_at=tries.retry_at,
        ),
        faults=_read_faults(tries),
    )
    newest = max(pod.created_at for pod in observation.evaluations)
    # A long life does not count as progress, because each pod might fail at the same batch forever.
    by_progress = replace(config, undisturbed_seconds=math.inf)
    scratch = count_failures(scratch, ended, newest=newest, config=by_progress, now=now)
    faulty = [pod for pod in ended if describe_cause(pod) in _OF_HOST]
    scratch = note_host_faults(scratch, faulty, newest=newest, config=config, now=now)
    budget, faults = scratch.budget, scratch.faults
    known = replace(
        known,
        tries=Tries(
            failures=budget.failures,
            short_lives=budget.short_lives,
            faults=faults.in_a_row,
            hosts=faults.hosts,
            seen=faults.seen,
            at=max(budget.at, faults.at),
            retry_at=max(budget.retry_at, faults.retry_at),
        ),
    )
    last = ended[-1]
    cause = describe_cause(last)
    if cause in (PodCause.DONE, PodCause.USER_ERROR):
        return known
    code, message = (last.end.exit_code, last.end.message) if last.end else (None, "")
    said = describe_end(LastFailure(cause, None, message, now, exit_code=code))
    most = observation.run.spec.failure_policy.max_failures_without_progress
    if budget.failures <= most:
        return replace(known, failure=said)
    text = stop(
        f"pods failed {budget.failures} times without a result; {most} such failures are allowed. "
        f"Last: {said}"
    )
    return replace(
        known,
        failed=observation.run.generation,
        failure=f"{text} {_REMEDIES.get(cause, _REMEDY)}",
    )
