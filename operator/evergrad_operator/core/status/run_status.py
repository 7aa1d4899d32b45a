"""Builds the status of a run from an observation, a decision and its outcome, and decides when to write it.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from evergrad_manifest.model.claims import mounted_claims
from evergrad_operator.core.decision import Action, Decision
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.problems import LONGEST_LIST
from evergrad_operator.core.objects.raw import (
    get_int,
    get_map,
    get_maps,
    get_text,
    keep_start,
)
from evergrad_operator.core.objects.status_encoding import without_empty
from evergrad_operator.core.objects.times import parse_time
from evergrad_operator.core.observe.memory import Coordinator, Memory, build_memory
from evergrad_operator.core.observe.observe import Observation, is_deleted_with
from evergrad_operator.core.observe.pods import MAX_MESSAGE
from evergrad_operator.core.observe.time_accounting import NO_PRICE, Price, show_usage
from evergrad_operator.core.status.conditions import (
    build_conditions,
    build_refused_conditions,
)

PROGRESS_SECONDS: Final = 10.0
"""Minimum seconds between two writes if only the progress differs."""
COUNTS_SECONDS: Final = 1.0
"""Minimum seconds between two writes if only counts of pods differ, because a run's pods start one after
another."""
PROGRESS_TIMEOUT_SECONDS: Final = 900.0
"""Time without a step after which a training group counts as stalled."""
_PROGRESS: Final = ("progress", "preparation", "checkpoint", "lostSeconds", "usage")


@dataclass(frozen=True)
class ApplyOutcome:
    """The result of a plan. ``created``: names of pods that now exist."""

    created: tuple[str, ...] = ()


@dataclass(frozen=True)
class WriteDecision:
    """Whether to write the status now. ``after``: seconds until a later write; None if no write is needed."""

    write: bool
    after: float | None = None


def build_status(
    observation: Observation,
    decision: Decision,
    outcome: ApplyOutcome,
    now: float,
    price: Price = NO_PRICE,
) -> dict[str, Any]:
    """Build the complete ``status`` as a JSON object of at most 16 KiB. ``now``: seconds since 1970."""
    run = observation.run
    memory = _note_created(decision, outcome, run.name)

    # The coordinator's count may be outdated, so limit it to the number of pods that still run.
    live = [pod for pod in observation.nodes if pod.is_live]
    running = sum(pod.is_running for pod in live)
    is_at_rest = decision.action in (Action.STOP, Action.CLEAN) or memory.finish is not None
    ready = min(memory.training.ready, running)
    if is_at_rest and not running:
        ready = 0
    # A run that is suspended or over has no estimated end.
    eta = None if is_at_rest else memory.training.eta_seconds
    training = replace(memory.training, ready=ready, eta_seconds=eta)
    memory = replace(memory, training=training)

    # Allow a longer message for an invalid spec, so that it lists all problems of the file if possible.
    is_invalid = decision.reason == names.Reason.INVALID_SPEC
    longest = LONGEST_LIST if is_invalid else MAX_MESSAGE
    # Show no summary of nodes for a run that is over, because it needs no nodes.
    summary = None if memory.finish else f"{ready}/{run.spec.nodes.largest}"
    nodes = {
        "summary": summary,
        "min": run.spec.nodes.min,
        "max": run.spec.nodes.largest,
    }
    status = {
        "observedGeneration": run.generation,
        "phase": decision.phase.value,
        "reason": str(decision.reason),
        "message": keep_start(decision.message, longest),
        **build_memory(memory),
        "nodes": {**nodes, "ready": ready, "running": running},
        "volume": _build_volume(observation),
        "usage": show_usage(memory.usage, price),
    }
    cleaned: dict[str, Any] = without_empty(status)
    # Build the conditions from the same memory as the other fields, so that they are consistent.
    cleaned["conditions"] = build_conditions(
        observation,
        replace(decision, memory=memory),
        now=now,
        progress_timeout=PROGRESS_TIMEOUT_SECONDS,
    )
    return cleaned


def build_refused_status(
    raw: Mapping[str, Any],
    message: str,
    now: float,
) -> dict[str, Any]:
    """Build the status of a run whose spec cannot be read: its present status with the reason.

    The status of a run that is over does not change.
    """
    old = get_map(raw, "status")
    if get_text(old, "phase") in (names.Phase.COMPLETE, names.Phase.FAILED):
        return dict(old)

    text = keep_start(message, LONGEST_LIST)
    generation = get_int(get_map(raw, "metadata"), "generation") or 0
    conditions = build_refused_conditions(raw, text, now=now)
    return {
        **old,
        # Set the generation. Otherwise tools would wait for this generation and not report that a person must
        # act.
        "observedGeneration": generation,
        "phase": get_text(old, "phase") or names.Phase.WAITING.value,
        "reason": names.Reason.INVALID_SPEC.value,
        "message": text,
        "conditions": conditions,
    }


def _note_created(decision: Decision, outcome: ApplyOutcome, run: str) -> Memory:
    """Return the memory with the pods created in this pass, so that the next pass detects their loss."""
    memory = decision.memory
    created = frozenset(outcome.created)

    # Record only pods that were created. The number of a refused pod is used again.
    attempts = list(memory.attempts)
    recorded = set(memory.recorded)
    for index, number in decision.nodes_to_create:
        if names.node_pod_name(run, index, number) in created:
            attempts += [-1] * (index + 1 - len(attempts))
            attempts[index] = number
            recorded.discard(index)
            # The number of a group counts as used after a pod of the group exists.
            if decision.gang is not None and index in decision.gang.members:
                memory = replace(memory, gang=decision.gang.number)

    # Start the counters of a new coordinator at 0. The run's counters already include the earlier
    # coordinators.
    coordinator = memory.coordinator
    attempt = decision.coordinator_attempt
    if attempt is not None and names.coordinator_pod_name(run, attempt) in created:
        coordinator = Coordinator(
            attempt, coordinator.image, is_queued=coordinator.is_queued
        )
    preparation = memory.preparation
    attempt = decision.preparation_attempt
    if attempt is not None and names.preparation_pod_name(run, attempt) in created:
        preparation = replace(preparation, attempt=attempt, is_recorded=False)
    evaluation, made = memory.evaluation, decision.evaluation
    if (
        made is not None
        and names.evaluation_pod_name(run, made.step, made.attempt) in created
    ):
        evaluation = replace(evaluation, attempt=made.attempt, is_recorded=False)
    return replace(
        memory,
        attempts=tuple(attempts),
        recorded=frozenset(recorded),
        coordinator=coordinator,
        preparation=preparation,
        evaluation=evaluation,
    )


def _build_volume(observation: Observation) -> dict[str, Any]:
    """Build the status of a run's volumes: claims from its profile, and whether its own claim is deleted with
    it."""
    run, claim = observation.run, observation.claim
    shown: dict[str, Any] = {
        "profileClaims": list(mounted_claims(run.profile.defaults.get("template")))
    }
    # Also check the claim's annotation: until the claim is updated, it is still deleted with the run.
    goes = is_deleted_with(run, claim, observation.claim_users)
    mark = (
        claim.annotations.get(names.ANNOTATION_DELETED_WITH) if claim is not None else None
    )
    if goes or mark == run.uid or run.spec.storage.when_deleted == "Delete":
        shown["goesWithRun"] = goes or mark == run.uid
    return shown


def should_write(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    now: float,
    last_progress_write: float | None,
) -> WriteDecision:
    """Decide whether to write ``new`` now.

    If only the progress differs, the status is written at most every 10 s. If only counts of pods differ, it
    is written at most every second. Other changes are written immediately. ``last_progress_write``: time of
    the last write in seconds since 1970; None if this process has not written it yet.
    """
    # Do not write if only the usage differs. Otherwise the status of every waiting run would be written
    # forever.
    if without_usage(old) == without_usage(new):
        return WriteDecision(False)

    # The API server can handle one write every 10 s for each of 1,000 runs, but not one write per step.
    pause = PROGRESS_SECONDS
    before = _without_progress(old)
    after = _without_progress(new)
    if before != after:
        pause = COUNTS_SECONDS
        if _without_counts(before) != _without_counts(after):
            return WriteDecision(True)

    last = last_progress_write
    if last is None:
        # If the operator has just started, the present status was written at this time or later.
        last = parse_time(get_text(get_map(old, "progress"), "updatedAt"))
    left = 0.0 if last is None else last + pause - now
    if left <= 0:
        return WriteDecision(True)
    # If the clock was set back, delay the write by at most one pause.
    return WriteDecision(False, min(left, pause))


def without_usage(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without the usage of its pods, which grows all the time."""
    rest = {key: value for key, value in status.items() if key != "usage"}
    notes = {
        key: value for key, value in get_map(status, "memory").items() if key != "usage"
    }
    return {**rest, "memory": notes}


def _without_counts(status: Mapping[str, Any]) -> dict[str, Any]:
    nodes = get_map(status, "nodes")
    # Leave out messages, because they also contain counts. Reasons contain no counts.
    conditions = [
        {**condition, "message": ""} for condition in get_maps(status, "conditions")
    ]
    notes = {
        key: value for key, value in get_map(status, "memory").items() if key != "usagePods"
    }
    return {
        **status,
        "memory": notes,
        "message": "",
        "evaluation": {**get_map(status, "evaluation"), "message": ""},
        "nodes": [nodes.get("min"), nodes.get("max")],
        "conditions": conditions,
    }


def _without_progress(status: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in status.items() if key not in _PROGRESS}
    # Leave out the coordinator's count of lost seconds, because it also grows over time.
    rest["memory"] = {
        key: value
        for key, value in get_map(status, "memory").items()
        if key not in ("coordinatorLostSeconds", "usage")
    }
    return rest
