"""Derives the events of a run from changes of its status. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.names import Condition, EvaluationState, Phase, Reason
from evergrad_operator.core.objects.raw import NOTHING, get_int, get_map, get_maps, get_text
from evergrad_operator.core.observe.memory import REMEMBERED_SECONDS, parse_hosts
from evergrad_operator.core.observe.observe import Observation

_MOST_ENDS: Final = 3
"""Maximum number of ends of pods with an event each. If more pods end in one pass, they share one event."""
_MOST_CHANGES: Final = 8
"""Maximum number of changed fields that one event lists."""
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

    ``once``: a key that prevents the event from being posted twice, even after a restart of the operator;
    empty for an event that follows a write of the status.
    """

    type: str
    reason: str
    message: str
    once: str = ""


def derive_events(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[KubernetesEvent, ...]:
    """Return the events of a change from the status ``old`` to the status ``new``.

    No event repeats an earlier event.
    """
    events = [*_derive_ends(old, new)]

    # Report hosts that the run avoids from now on.
    avoided, already = (
        parse_hosts(get_text(get_map(one, "memory"), "hostFaults")) for one in (new, old)
    )
    if fresh_hosts := [host for host in avoided if host not in already]:
        hours = round(REMEMBERED_SECONDS / 3600)
        text = f"{', '.join(fresh_hosts)}: new pods avoid them for {hours} hours, if there are other hosts"
        events.append(KubernetesEvent("Normal", "HostAvoided", text))

    before, after = get_map(old, "nodes"), get_map(new, "nodes")
    least, most = get_int(after, "min"), get_int(after, "max")
    if before and (get_int(before, "min"), get_int(before, "max")) != (least, most):
        events.append(
            KubernetesEvent("Normal", "NodesChanged", f"nodes: min {least}, max {most}")
        )

    # Report only the first checkpoint. Later checkpoints are in the run's own log of events.
    step = get_int(get_map(new, "checkpoint"), "step")
    if step is not None and get_int(get_map(old, "checkpoint"), "step") is None:
        text = f"the first checkpoint is of step {step}"
        events.append(KubernetesEvent("Normal", Reason.CHECKPOINT_SAVED, text))

    # Report a failed save, because the run would lose work at its next failure.
    failed, before_failed = (
        get_int(get_map(one, "checkpoint"), "failedSaves") for one in (new, old)
    )
    if failed and not before_failed:
        healthy = _find_condition(new, Condition.CHECKPOINT_HEALTHY)
        reason, text = get_text(healthy, "reason"), get_text(healthy, "message")
        events.append(KubernetesEvent("Warning", reason, text))

    # Report only checkpoints without results. The results of each checkpoint are in the status.
    before, after = get_map(old, "evaluation"), get_map(new, "evaluation")
    passed_over, state = get_text(after, "passedOver"), get_text(after, "state")
    if passed_over and passed_over != get_text(before, "passedOver"):
        text = f"a checkpoint was not evaluated: {passed_over}"
        events.append(KubernetesEvent("Warning", "CheckpointPassedOver", text))
    if state == EvaluationState.FAILED and state != get_text(before, "state"):
        events.append(
            KubernetesEvent("Warning", "EvaluationFailed", get_text(after, "message"))
        )

    # Report the transition last, because the ends of pods explain it. The first start of a new run is no
    # event.
    phase, reason = get_text(new, "phase"), get_text(new, "reason")
    has_moved = (get_text(old, "phase"), get_text(old, "reason")) != (phase, reason)
    is_first_start = not old and phase == Phase.STARTING
    if has_moved and not is_first_start:
        # Use Warning if a person may have to act, and Normal otherwise.
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
    # Report each pod that has ended since the old status. If a large run loses all its pods, use one event
    # for all, so that the events do not displace events of other objects.
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
    """Return the event that lists the edited fields of a run.

    Returns None if no field was edited or an event has listed the fields already. Post the event before the
    ConfigMap is applied, because the apply overwrites the old values.
    """
    applied, known = observation.applied, observation.status
    # A run without pods keeps the ConfigMap of its last pods, so later passes find the same fields again.
    if applied is None or not applied.changes or applied.changes_hash == known.told_changes:
        return None
    shown = "; ".join(applied.changes[:_MOST_CHANGES])
    more = len(applied.changes) - _MOST_CHANGES
    text = f"{shown}; and {more} more" if more > 0 else shown

    # Until the status is written, each pass finds the edit again, so give the event a key. The key contains
    # the generation of the last status, because the same fields may be changed back and changed again.
    status = get_map(observation.run.raw, "status")
    once = f"{get_int(status, 'observedGeneration')}/{applied.changes_hash}"
    return KubernetesEvent("Normal", "SettingsChanged", text, once)
