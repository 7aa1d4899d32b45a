"""Events of a run, on transitions only. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.names import Condition, EvaluationState, Phase, Reason
from evergrad_operator.core.objects.raw import NOTHING, get_int, get_map, get_maps, get_text
from evergrad_operator.core.observe.memory import REMEMBERED_SECONDS, parse_hosts
from evergrad_operator.core.observe.observe import Observation

_MOST_ENDS: Final = 3
"""Ends of pods that get an event each; more at once share one."""
_MOST_CHANGES: Final = 8
"""Changed fields that one event names."""
_WARNINGS: Final = frozenset(
    {
        Reason.BACKING_OFF,
        Reason.HOST_FAULTS,
        Reason.VOLUME_RECORD_REFUSED,
        Reason.COORDINATOR_LOST,
        Reason.IMAGE_PULL_FAILED,
        Reason.UNSCHEDULABLE,
        Reason.QUOTA_EXCEEDED,
        Reason.ADMISSION_REFUSED,
        Reason.INVALID_OBJECT,
        Reason.NAME_TAKEN,
        Reason.WEBHOOK_FAILED,
        Reason.API_UNAVAILABLE,
        Reason.CREATE_FAILED,
        Reason.VOLUME_MISSING,
        Reason.VOLUME_PENDING,
        Reason.VOLUME_LOST,
        Reason.START_ERROR,
        Reason.INVALID_SPEC,
        Reason.NON_FINITE,
    }
)
_QUIET_CAUSES: Final = frozenset({PodCause.DONE, PodCause.RELEASED})


@dataclass(frozen=True)
class KubernetesEvent:
    """One event. ``type``: Normal or Warning. ``reason``: CamelCase.

    ``once``: a key under which the event is posted once, also by an operator that has started again; empty
    for an event that follows a status write.
    """

    type: str
    reason: str
    message: str
    once: str = ""


def derive_events(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[KubernetesEvent, ...]:
    """Derive the events of a change from the status ``old`` to ``new``.

    None repeats what an earlier event has reported.
    """
    events = [*_derive_ends(old, new)]

    # A host that the run keeps away from from now on.
    avoided, already = (
        parse_hosts(get_text(get_map(one, "memory"), "hostFaults")) for one in (new, old)
    )
    if fresh_hosts := [host for host in avoided if host not in already]:
        hours = round(REMEMBERED_SECONDS / 3600)
        text = f"{', '.join(fresh_hosts)}: new pods keep away for {hours} hours, if there are other hosts"
        events.append(KubernetesEvent("Normal", "HostAvoided", text))

    before, after = get_map(old, "nodes"), get_map(new, "nodes")
    least, most = get_int(after, "min"), get_int(after, "max")
    if before and (get_int(before, "min"), get_int(before, "max")) != (least, most):
        events.append(
            KubernetesEvent("Normal", "NodesChanged", f"nodes: min {least}, max {most}")
        )

    # The first checkpoint only: the others are in the run's own events.
    step = get_int(get_map(new, "checkpoint"), "step")
    if step is not None and get_int(get_map(old, "checkpoint"), "step") is None:
        text = f"the first checkpoint is of step {step}"
        events.append(KubernetesEvent("Normal", Reason.CHECKPOINT_SAVED, text))

    # A run whose state is not saved loses work at its next failure, however well it trains.
    failed, before_failed = (
        get_int(get_map(one, "checkpoint"), "failedSaves") for one in (new, old)
    )
    if failed and not before_failed:
        healthy = _find_condition(new, Condition.CHECKPOINT_HEALTHY)
        reason, text = get_text(healthy, "reason"), get_text(healthy, "message")
        events.append(KubernetesEvent("Warning", reason, text))

    # Results of each checkpoint are in the status: only what is missing is an event.
    before, after = get_map(old, "evaluation"), get_map(new, "evaluation")
    passed_over, state = get_text(after, "passedOver"), get_text(after, "state")
    if passed_over and passed_over != get_text(before, "passedOver"):
        text = f"a checkpoint was not evaluated: {passed_over}"
        events.append(KubernetesEvent("Warning", "CheckpointPassedOver", text))
    if state == EvaluationState.FAILED and state != get_text(before, "state"):
        events.append(
            KubernetesEvent("Warning", "EvaluationFailed", get_text(after, "message"))
        )

    # The transition comes last: the ends of pods explain it. A run that was made a moment ago starts, as is
    # to be expected.
    phase, reason = get_text(new, "phase"), get_text(new, "reason")
    has_moved = (get_text(old, "phase"), get_text(old, "reason")) != (phase, reason)
    is_first_start = not old and phase == Phase.STARTING
    if has_moved and not is_first_start:
        # Warnings are for what a person may have to act upon; everything else is Normal.
        is_bad = phase == Phase.FAILED or reason in _WARNINGS
        text = get_text(new, "message") or phase
        events.append(
            KubernetesEvent("Warning" if is_bad else "Normal", reason or phase, text)
        )
    return tuple(events)


def _find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = (one for one in get_maps(status, "conditions") if one.get("type") == kind)
    return next(found, NOTHING)


def _derive_ends(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[KubernetesEvent]:
    # Each pod that has ended since. A large run may lose all its pods at once: one event each would push
    # others' events out of etcd.
    known = {
        (get_text(one, "pod"), get_text(one, "cause")) for one in get_maps(old, "attempts")
    }
    ends = [
        (get_text(one, "pod"), get_text(one, "cause"), get_int(one, "exitCode"))
        for one in get_maps(new, "attempts")
    ]
    fresh = [
        (pod, cause, code)
        for pod, cause, code in ends
        if (pod, cause) not in known and cause not in _QUIET_CAUSES
    ]
    if len(fresh) > _MOST_ENDS:
        causes = ", ".join(sorted({cause for _, cause, _ in fresh}))
        text = f"{len(fresh)} pods and more ended: {causes}"
        yield KubernetesEvent("Warning", "PodsEnded", text)
    else:
        for pod, cause, code in fresh:
            how = "" if code is None else f" with exit code {code}"
            yield KubernetesEvent("Warning", cause, f"pod {pod} ended{how}")


def describe_edit(observation: Observation) -> KubernetesEvent | None:
    """Return the event that names the edited fields of a run; None where there are none, or one has named
    them.

    It is to be posted before the ConfigMap is applied: afterwards nothing shows any more what the pods had.
    """
    applied, known = observation.applied, observation.status
    # A run without pods keeps the manifest of its last ones: each later edit finds these fields again.
    if applied is None or not applied.changes or applied.changes_hash == known.told_changes:
        return None
    shown = "; ".join(applied.changes[:_MOST_CHANGES])
    more = len(applied.changes) - _MOST_CHANGES
    text = f"{shown}; and {more} more" if more > 0 else shown

    # Until a status is written, each pass finds the edit again. Its key holds the generation of the last
    # status: the same fields, changed back and changed again, are another edit.
    status = get_map(observation.run.raw, "status")
    once = f"{get_int(status, 'observedGeneration')}/{applied.changes_hash}"
    return KubernetesEvent("Normal", "SettingsChanged", text, once)
