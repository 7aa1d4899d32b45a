"""Events of a run, on transitions only. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_coordinator.causes import PodCause
from evergrad_operator.names import Phase, Reason
from evergrad_operator.observe import Observation
from evergrad_operator.raw import get_int, get_map, get_maps, get_text

_MOST_ENDS: Final = 3
"""Ends of pods that are told one by one; more at once are told together."""
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
class Event:
    """One event. ``type``: Normal or Warning. ``reason``: CamelCase.

    ``once``: a key under which the event is posted once, also by an operator that has started again; empty
    for an event that follows a status write.
    """

    type: str
    reason: str
    message: str
    once: str = ""


def derive_events(
    old_status: Mapping[str, Any], new_status: Mapping[str, Any]
) -> tuple[Event, ...]:
    """Derive the events of a change of status; none for what an event has said before."""
    return (
        *_tell_ends(old_status, new_status),
        *_tell_bounds_and_checkpoint(old_status, new_status),
        *_tell_transition(old_status, new_status),
    )


def describe_edit(observation: Observation) -> Event | None:
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
    return Event("Normal", "SettingsChanged", text, once)


def _tell_transition(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    phase, reason = get_text(new, "phase"), get_text(new, "reason")
    if (get_text(old, "phase"), get_text(old, "reason")) == (phase, reason):
        return
    if not old and phase == Phase.STARTING:
        return  # a run that was made a moment ago starts, as everybody expects
    # Warnings are for what a person may have to act upon; everything else is Normal.
    is_bad = phase == Phase.FAILED or reason in _WARNINGS
    yield Event(
        "Warning" if is_bad else "Normal", reason or phase, get_text(new, "message") or phase
    )


def _tell_ends(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    known = {
        (get_text(one, "pod"), get_text(one, "cause")) for one in get_maps(old, "attempts")
    }
    fresh = [
        one
        for one in get_maps(new, "attempts")
        if (get_text(one, "pod"), get_text(one, "cause")) not in known
    ]
    told = [one for one in fresh if get_text(one, "cause") not in _QUIET_CAUSES]
    if len(told) > _MOST_ENDS:
        causes = sorted({get_text(one, "cause") for one in told})
        yield Event(
            "Warning", "PodsEnded", f"{len(told)} pods and more ended: {', '.join(causes)}"
        )
        return
    for one in told:
        code = get_int(one, "exitCode")
        how = "" if code is None else f" with exit code {code}"
        yield Event("Warning", get_text(one, "cause"), f"pod {get_text(one, 'pod')} ended{how}")


def _tell_bounds_and_checkpoint(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Event]:
    before, after = get_map(old, "nodes"), get_map(new, "nodes")
    pairs = [(get_int(one, "min"), get_int(one, "max")) for one in (before, after)]
    if before and pairs[0] != pairs[1]:
        yield Event("Normal", "NodesChanged", f"nodes: min {pairs[1][0]}, max {pairs[1][1]}")

    # The first checkpoint only: the others are in the run's own events.
    step = get_int(get_map(new, "checkpoint"), "step")
    if step is not None and get_int(get_map(old, "checkpoint"), "step") is None:
        yield Event(
            "Normal", Reason.CHECKPOINT_SAVED, f"the first checkpoint is of step {step}"
        )
