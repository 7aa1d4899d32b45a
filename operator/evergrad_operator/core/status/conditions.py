"""Builds the conditions of a run. The list always contains all conditions, each with a reason. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.decision import Decision
from evergrad_operator.core.objects.names import Condition, Phase, Reason
from evergrad_operator.core.objects.raw import (
    get_int,
    get_map,
    get_maps,
    get_text,
    keep_start,
)
from evergrad_operator.core.objects.times import format_time, parse_time
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pod_messages import describe_volume_remedy, quote, stop
from evergrad_operator.core.observe.pods import MAX_MESSAGE

_SHORT: Final = 256
"""Maximum length of the message of a condition that repeats another message, in bytes."""
_ON_ITS_WAY: Final = frozenset(
    {
        Phase.PENDING,
        Phase.PREPARING,
        Phase.STARTING,
        Phase.RESTARTING,
        Phase.SUSPENDING,
        Phase.WAITING,
    }
)
_WITHOUT_PODS: Final = frozenset({Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED})


@dataclass(frozen=True)
class _Said:
    """One condition without its times. ``status``: None for Unknown."""

    status: bool | None
    reason: str
    message: str = ""


def build_conditions(
    observation: Observation, decision: Decision, *, now: float, progress_timeout: float
) -> list[dict[str, Any]]:
    """Build the list of conditions as JSON objects.

    A condition's transition time changes only if its status changes. ``now``: seconds since 1970.
    ``progress_timeout``: seconds without a step after which Progressing is False.
    """
    old = {get_text(one, "type"): one for one in observation.status.conditions}
    phase, is_blocked = decision.phase, decision.is_blocked
    short = keep_start(decision.message, _SHORT)

    # A run that a person suspended, or that stopped on request of its recipe, is Ready. Otherwise tools that
    # wait for Ready, such as Flux, would wait forever.
    is_as_asked = phase == Phase.SUSPENDED and not is_blocked
    is_ready = phase in (Phase.RUNNING, Phase.COMPLETE) or is_as_asked
    silence = observation.unreachable
    if phase in _WITHOUT_PODS:
        unreachable = _Said(False, Reason.NO_PODS)
    elif silence is None:
        unreachable = _Said(False, Reason.NOTHING_IN_THE_WAY)
    else:
        unreachable = _Said(True, silence.reason, silence.text)

    not_suspended = Reason.SUSPENDING if phase == Phase.SUSPENDING else Reason.NOT_SUSPENDED
    was_ready = old.get(Condition.READY, {})
    said = {
        Condition.READY: _Said(is_ready, decision.reason, short),
        Condition.COMPLETE: _say_end(decision, Phase.COMPLETE, Reason.NOT_COMPLETE),
        Condition.FAILED: _say_end(decision, Phase.FAILED, Reason.NOT_FAILED),
        Condition.SUSPENDED: _Said(True, decision.reason, decision.message)
        if phase == Phase.SUSPENDED
        else _Said(False, not_suspended),
        Condition.PODS_READY: _say_pods(observation, decision),
        Condition.PROGRESSING: _say_progressing(
            decision, was_ready, now=now, timeout=progress_timeout
        ),
        Condition.CHECKPOINT_HEALTHY: _say_checkpoint(observation, decision),
        Condition.COORDINATOR_UNREACHABLE: unreachable,
        # Set Stalled only if a person has to act, because tools report Stalled as a failure.
        Condition.STALLED: _Said(True, decision.reason, short)
        if is_blocked or phase == Phase.FAILED
        else _Said(False, Reason.NOTHING_IN_THE_WAY),
        Condition.RECONCILING: _Said(True, decision.reason, short)
        if phase in _ON_ITS_WAY and not is_blocked
        else _Said(False, Reason.UP_TO_DATE),
    }
    return [
        _build(kind, one, old.get(kind, {}), generation=observation.run.generation, now=now)
        for kind, one in said.items()
    ]


def build_refused_conditions(
    raw: Mapping[str, Any], message: str, *, now: float
) -> list[dict[str, Any]]:
    """Build the conditions of a run whose spec cannot be read.

    The run is not Ready and not Reconciling, and it is Stalled because a person must act. Other conditions
    stay.
    """
    generation = get_int(get_map(raw, "metadata"), "generation") or 0
    said = {
        Condition.READY: _Said(
            False,
            Reason.INVALID_SPEC,
            keep_start(message, _SHORT),
        ),
        Condition.STALLED: _Said(True, Reason.INVALID_SPEC, message),
        Condition.RECONCILING: _Said(False, Reason.INVALID_SPEC),
    }
    old = {
        get_text(one, "type"): one for one in get_maps(get_map(raw, "status"), "conditions")
    }
    new = {
        kind.value: _build(
            kind,
            one,
            old.get(kind, {}),
            generation=generation,
            now=now,
        )
        for kind, one in said.items()
    }
    # Keep the order of the list, because another order would cause a write of the status.
    kept = [new.pop(kind, dict(one)) for kind, one in old.items()]
    return [*kept, *new.values()]


def _build(
    kind: Condition,
    said: _Said,
    old: Mapping[str, Any],
    *,
    generation: int,
    now: float,
) -> dict[str, Any]:
    status = "Unknown" if said.status is None else str(said.status)
    since = get_text(old, "lastTransitionTime") if old.get("status") == status else ""
    return {
        "type": kind.value,
        "status": status,
        "reason": str(said.reason),
        "message": keep_start(said.message, MAX_MESSAGE),
        "observedGeneration": generation,
        "lastTransitionTime": since if parse_time(since) is not None else format_time(now),
    }


def _say_end(decision: Decision, phase: Phase, otherwise: Reason) -> _Said:
    """Return the condition that shows whether the run is over with this phase."""
    if decision.phase != phase:
        return _Said(False, otherwise)
    # Use the message of the end. Hints that are added later appear only in ``status.message``.
    finish = decision.memory.finish
    return _Said(
        True,
        decision.reason,
        finish.message if finish else decision.message,
    )


def _say_checkpoint(observation: Observation, decision: Decision) -> _Said:
    """Return the condition that shows whether the newest save succeeded.

    It is False from the first failed save until the next successful save.
    """
    run, training = observation.run, decision.memory.training
    is_over = decision.phase == Phase.FAILED
    remedy = describe_volume_remedy(run, training.checkpoint_step, is_over=is_over)
    if training.failed_saves:
        times = "The last save failed"
        if training.failed_saves > 1:
            times = f"The last {training.failed_saves} saves failed"
        text = f"{times}: {stop(quote(training.save_message) or training.save_trouble)}"
        if training.save_trouble == "no_space":
            return _Said(False, Reason.VOLUME_FULL, f"The volume is full. {text} {remedy}")
        newest = training.checkpoint_step
        kept = "There is no checkpoint yet."
        if newest is not None:
            kept = f"The newest valid checkpoint is of step {newest}."
        return _Said(False, Reason.SAVE_FAILED, f"{text} {kept} Check the volume.")

    # A pod may fail because of a full volume outside a save. Then only a later checkpoint shows that there is
    # room again, or progress if the run reports no checkpoints.
    failure, saved_at = decision.memory.last_failure, training.checkpoint_at
    is_full = (
        failure is not None
        and failure.cause == PodCause.VOLUME_FULL
        and decision.phase != Phase.COMPLETE
        and (
            decision.memory.budget.failures > 0
            if saved_at is None
            else failure.at > saved_at
        )
    )
    if is_full:
        return _Said(False, Reason.VOLUME_FULL, f"The volume is full. {remedy}")
    if training.checkpoint_step is None:
        return _Said(None, Reason.NO_CHECKPOINT_YET)
    return _Said(True, Reason.CHECKPOINT_SAVED)


def _say_pods(observation: Observation, decision: Decision) -> _Said:
    """Return the condition that shows how many nodes train."""
    if decision.phase in _WITHOUT_PODS:
        return _Said(False, Reason.NO_PODS)
    ready, nodes = decision.memory.training.ready, observation.run.spec.nodes
    if decision.phase != Phase.RUNNING:
        return _Said(
            False,
            decision.reason,
            keep_start(decision.message, _SHORT),
        )
    if ready >= nodes.largest:
        return _Said(
            True,
            Reason.ALL_READY,
            f"{ready} of {nodes.largest} nodes train",
        )
    return _Said(
        False,
        Reason.SOME_READY,
        keep_start(decision.message, _SHORT),
    )


def _say_progressing(
    decision: Decision,
    was_ready: Mapping[str, Any],
    *,
    now: float,
    timeout: float,
) -> _Said:
    """Return the condition that shows whether steps advance. ``was_ready``: condition Ready in the last
    status."""
    training = decision.memory.training
    if decision.phase != Phase.RUNNING:
        return _Said(False, decision.reason)
    if training.step is None or training.updated_at is None:
        return _Said(None, Reason.NO_STEP_YET)

    # Do not count time in which there was no group as time without a step.
    ready_since = None
    if was_ready.get("status") == "True":
        ready_since = parse_time(was_ready.get("lastTransitionTime"))
    since = max(training.updated_at, now if ready_since is None else ready_since)
    if now - since > timeout:
        at = format_time(training.updated_at)
        text = f"no step since {at}. See the logs of node 0, and kubectl top pods"
        return _Said(False, Reason.NO_STEPS, text)
    return _Said(True, Reason.STEPS_ADVANCE)
