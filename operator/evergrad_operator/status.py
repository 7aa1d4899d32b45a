"""The status of a run: observation, decision and what came of it → the object on the wire, and when to write
it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from evergrad_operator import names
from evergrad_operator.conditions import build_conditions, build_refused_conditions
from evergrad_operator.decision import Action, Decision
from evergrad_operator.memory import Coordinator, Memory, Training, build_memory, without_empty
from evergrad_operator.observe import Observation
from evergrad_operator.packing import format_rate
from evergrad_operator.pods import MAX_MESSAGE
from evergrad_operator.problems import LONGEST_LIST
from evergrad_operator.raw import get_map, get_maps, get_text, keep_start
from evergrad_operator.times import format_duration, format_time, parse_time

PROGRESS_SECONDS: Final = 10.0
"""Between two writes that only tell of progress."""
COUNTS_SECONDS: Final = 1.0
"""Between two writes that only count pods: those of a run start one after the other."""
PROGRESS_TIMEOUT_SECONDS: Final = 900.0
"""Without a step for so long a training group counts as stalled."""
_PROGRESS: Final = ("progress", "checkpoint", "lostSeconds")


@dataclass(frozen=True)
class Outcome:
    """The result of a plan. ``created``: names of pods that now exist."""

    created: tuple[str, ...] = ()


@dataclass(frozen=True)
class WriteDecision:
    """Whether the status is to be written now; if not, ``after`` so many seconds (None: no need)."""

    write: bool
    after: float | None = None


def build_status(
    observation: Observation, decision: Decision, outcome: Outcome, now: float
) -> dict[str, Any]:
    """The whole ``status``, at most 16 KiB. ``now``: seconds since 1970."""
    run = observation.run
    memory = _note_created(decision, outcome, run.name)

    # The coordinator's count is as old as its last answer: pods that have ended since do not train.
    live = [pod for pod in observation.nodes if pod.is_live]
    running = sum(pod.is_running for pod in live)
    is_at_rest = decision.action in (Action.STOP, Action.CLEAN) or memory.finish is not None
    ready = 0 if is_at_rest and not running else min(memory.training.ready, running)
    memory = replace(memory, training=replace(memory.training, ready=ready))
    shown = replace(decision, memory=memory)
    built, saved_at = build_memory(memory), memory.training.checkpoint_at
    # All problems of a file are shown at once, wherever that is possible.
    is_invalid = decision.reason == names.Reason.INVALID_SPEC
    longest = LONGEST_LIST if is_invalid else MAX_MESSAGE
    # A run that is over needs no nodes: none is missing.
    summary = None if memory.finish else f"{ready}/{run.spec.nodes.largest}"
    nodes = {"summary": summary, "min": run.spec.nodes.min, "max": run.spec.nodes.largest}
    status = {
        "observedGeneration": run.generation,
        "phase": decision.phase.value,
        "reason": str(decision.reason),
        "message": keep_start(decision.message, longest),
        **built,
        "nodes": {**nodes, "ready": ready, "running": running},
        "progress": _build_progress(memory.training, is_running=not is_at_rest),
        "checkpoint": {
            "step": memory.training.checkpoint_step,
            "savedAt": None if saved_at is None else format_time(saved_at),
        },
    }
    cleaned: dict[str, Any] = without_empty(status)
    cleaned["conditions"] = build_conditions(
        observation, shown, now=now, progress_timeout=PROGRESS_TIMEOUT_SECONDS
    )
    return cleaned


def build_refused_status(raw: Mapping[str, Any], message: str, now: float) -> dict[str, Any]:
    """The status of a run whose spec cannot be read: what stands there, with the reason.

    A run that is over stays as it is.
    """
    old = get_map(raw, "status")
    if get_text(old, "phase") in (names.Phase.COMPLETE, names.Phase.FAILED):
        return dict(old)
    text = keep_start(message, LONGEST_LIST)
    conditions = build_refused_conditions(raw, text, now=now)
    return {
        **old,
        # The generation is not acted upon, so that observedGeneration stays.
        "phase": get_text(old, "phase") or names.Phase.WAITING.value,
        "reason": names.Reason.INVALID_SPEC.value,
        "message": text,
        "conditions": conditions,
    }


def _note_created(decision: Decision, outcome: Outcome, run: str) -> Memory:
    """Pods that were made a moment ago are known, so that their loss before the next look is noticed."""
    memory, created = decision.memory, frozenset(outcome.created)
    # Written in the same pass as the pods are made: an operator that dies right after it finds them in its
    # list.
    attempts, recorded = list(memory.attempts), set(memory.recorded)
    for index, number in decision.nodes_to_create:
        if names.node_pod_name(run, index, number) in created:
            attempts += [-1] * (index + 1 - len(attempts))
            attempts[index] = number
            recorded.discard(index)
    coordinator, attempt = memory.coordinator, decision.coordinator_attempt
    if attempt is not None and names.coordinator_pod_name(run, attempt) in created:
        coordinator = Coordinator(attempt, coordinator.image)
    return replace(
        memory, attempts=tuple(attempts), recorded=frozenset(recorded), coordinator=coordinator
    )


def _build_progress(training: Training, *, is_running: bool) -> dict[str, Any]:
    step, total, eta = training.step, training.total_steps, training.eta_seconds
    has_both = step is not None and total
    return {
        "generation": training.generation,
        "step": step,
        "totalSteps": total,
        "summary": f"{step}/{total}" if has_both else str(step) if step is not None else None,
        "percent": min(100, 100 * step // total) if step is not None and total else None,
        "loss": f"{training.loss:.3f}" if training.loss is not None else None,
        "tokensPerSecond": format_rate(training.tokens_per_second)
        if training.tokens_per_second is not None
        else None,
        "eta": format_duration(eta) if eta is not None and is_running else None,
        "etaSeconds": int(eta) if eta is not None and is_running else None,
        "updatedAt": format_time(training.updated_at) if training.updated_at else None,
    }


def should_write(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    now: float,
    last_progress_write: float | None,
) -> WriteDecision:
    """Whether ``new`` goes out now. Only progress differs: at most every 10 s; only counts of pods: every
    second.

    ``last_progress_write``: when a status was written last, in seconds since 1970.
    """
    if dict(old) == dict(new):
        return WriteDecision(False)
    # At 1,000 runs the API server carries a write a run every ten seconds, and not one a step.
    # Three kinds of difference: progress alone, counts of pods as well, and everything else, which is
    # written at once.
    before, after = _without_progress(old), _without_progress(new)
    pause = PROGRESS_SECONDS if before == after else COUNTS_SECONDS
    if before != after and _without_counts(before) != _without_counts(after):
        return WriteDecision(True)
    last = last_progress_write
    if last is None:
        # The operator has just started: what stands there was written at this time, or later.
        last = parse_time(get_text(get_map(old, "progress"), "updatedAt"))
    left = 0.0 if last is None else last + pause - now
    return WriteDecision(True) if left <= 0 else WriteDecision(False, min(left, pause))


def _without_counts(status: Mapping[str, Any]) -> dict[str, Any]:
    nodes = get_map(status, "nodes")
    conditions = [{**condition, "message": ""} for condition in get_maps(status, "conditions")]
    return {
        **status,
        "message": "",
        "nodes": [nodes.get("min"), nodes.get("max")],
        "conditions": conditions,
    }


def _without_progress(status: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in status.items() if key not in _PROGRESS}
    # The coordinator's own count of lost seconds runs with the time, too.
    rest["memory"] = {
        key: value
        for key, value in get_map(status, "memory").items()
        if key != "coordinatorLostSeconds"
    }
    return rest
