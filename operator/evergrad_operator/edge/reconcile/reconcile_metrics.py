"""Counts and logs the results of a pass over a run."""

import logging
from collections.abc import Sequence

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.errors import ApiError, LeaseLostError, OperatorError
from evergrad_operator.core.objects.kinds import POD
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.observe import ApplyFailure, Observation
from evergrad_operator.core.plan import ObjectPlan
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics
from evergrad_operator.edge.reconcile.apply import ApplyResult

log = logging.getLogger(__name__)
_NEW_POD = ("create", POD.kind)


def list_created(results: Sequence[ApplyResult]) -> tuple[str, ...]:
    """Return the names of the pods that this pass has created."""
    done = [result.step for result in results if result.failure is None]
    return tuple(name for verb, kind, name in done if (verb, kind) == _NEW_POD)


def note_results(
    metrics: OperatorMetrics,
    key: Key,
    seen: Observation,
    *,
    plan: ObjectPlan,
    results: Sequence[ApplyResult],
    now: float,
) -> None:
    """Count refused steps, and measure how long new nodes have waited for their pods, in seconds.

    A replacement has waited since the end of the previous pod. A run's first pod has waited since the
    creation of the run.
    """
    # A step that waits for its retry was counted when it was refused.
    for result in results:
        if result.is_tried and result.failure is not None:
            note_failure(metrics, key, result.failure)

    created = frozenset(list_created(results))
    for body in plan.create:
        labels = body["metadata"].get("labels") or {}
        is_node = labels.get(names.LABEL_ROLE) == names.ROLE_NODE
        if not is_node or body["metadata"]["name"] not in created:
            continue

        index = int(labels[names.LABEL_INDEX])
        ends = [
            pod.end.at
            for pod in seen.nodes
            if pod.index == index and pod.end is not None and pod.end.at is not None
        ]
        if ends:
            metrics.recovery_seconds.observe(max(0.0, now - max(ends)))
            continue
        # Measure one node per run, and only its first attempt, because later attempts wait for other reasons.
        is_first = index == 0 and labels.get(names.LABEL_ATTEMPT) == "0"
        if is_first and not seen.nodes:
            metrics.queue_seconds.observe(max(0.0, now - seen.run.created_at))


def note_failure(metrics: OperatorMetrics, key: Key, failure: ApplyFailure) -> None:
    """Count and log a step that was refused or not answered."""
    metrics.reconcile_errors.labels(failure.reason or "Unreachable").inc()
    log.warning(
        "%s/%s: %s %s %s: %s %s: %s",
        *key,
        failure.verb,
        failure.kind,
        failure.name,
        failure.status or "no answer",
        failure.reason,
        failure.message,
    )


def note_error(metrics: OperatorMetrics, key: Key, error: Exception) -> None:
    """Count and log an error that has ended a pass."""
    # The reason is a label of a metric, so it must have few values.
    if isinstance(error, ApiError):
        reason = error.reason if error.status else "Unreachable"
    elif isinstance(error, LeaseLostError):
        reason = "LeaseLost"
    elif isinstance(error, TimeoutError):
        reason = "Timeout"
    else:
        reason = "OperatorError" if isinstance(error, OperatorError) else "Defect"
    metrics.reconcile_errors.labels(reason).inc()
    if reason == "Defect":
        log.error(
            "%s/%s: a defect of the operator; please report it",
            *key,
            exc_info=error,
        )
    else:
        log.warning("%s/%s: %s", *key, str(error) or "took too long")
