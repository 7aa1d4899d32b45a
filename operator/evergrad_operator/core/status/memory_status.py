"""Builds the fields of a status that store the memory, which ``parse_memory`` reads. Pure."""

from collections.abc import Mapping
from typing import Any

from evergrad_operator.core.objects.status_encoding import (
    pack_counts,
    pack_mapping,
    pack_ranges,
    without_empty,
)
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.evaluation import pack_evaluation
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.preparation import pack_preparation
from evergrad_operator.core.observe.time_accounting import pack_notes


def build_memory(memory: Memory) -> dict[str, Any]:
    """Build the parts of the status that only ``parse_memory`` needs. Defaults are left out.

    Values that are only for the operator are stored separately, as texts under ``memory``.
    """
    budget = memory.budget
    coordinator = memory.coordinator
    failure = memory.last_failure
    shown_failure: dict[str, Any] = {}
    if failure is not None:
        shown_failure = {
            "cause": failure.cause,
            "node": failure.node,
            "rank": failure.rank,
            "step": failure.step,
            "exitCode": failure.exit_code,
            "message": failure.message,
            "at": _time(failure.at),
        }
    # The memory is limited to MAX_ENDS ends, so all of them fit in the status.
    ends = [
        {
            "pod": one.pod,
            "cause": one.cause,
            "exitCode": one.exit_code,
            "at": _time(one.at),
        }
        for one in memory.ends
    ]
    found: dict[str, Any] = {
        "image": memory.image,
        "profile": memory.profile,
        "recipeHash": memory.recipe_hash,
        "attempt": memory.restart,
        "restartNonce": memory.restart_nonce,
        "startTime": _time(memory.start_time),
        "completionTime": _time(memory.finish.at) if memory.finish else None,
        "coordinator": {"attempt": coordinator.attempt}
        if coordinator.attempt >= 0
        else None,
        "lostSeconds": dict(sorted(memory.lost_seconds.items())),
        "restarts": {
            "total": sum(memory.restarts.values()),
            "byCause": dict(sorted(memory.restarts.items())),
        },
        "failures": {
            "withoutProgress": budget.failures,
            "checkpointStep": budget.checkpoint_step
            if budget.checkpoint_step >= 0
            else None,
        },
        "attempts": ends,
        "lastFailure": shown_failure,
        "memory": _build_notes(memory),
    }
    cleaned: dict[str, Any] = without_empty(found)
    return cleaned


def _build_notes(memory: Memory) -> dict[str, str | None]:
    budget = memory.budget
    coordinator = memory.coordinator
    rest = {
        "step": budget.step if budget.step >= 0 else None,
        "at": _time(budget.at),
        "shortLives": budget.short_lives or None,
        "retryAt": _time(budget.retry_at),
        "sinceAttempt": budget.since[0] if budget.since else None,
        "sinceSteps": budget.since[1] if budget.since else None,
    }
    faults = {
        "hosts": [list(one) for one in memory.faults.hosts],
        "seen": [[host, int(at)] for host, at in memory.faults.seen],
        "inARow": memory.faults.in_a_row or None,
        "at": _time(memory.faults.at),
        "retryAt": _time(memory.faults.retry_at),
    }
    return {
        "settings": memory.settings_hash,
        "toldChanges": memory.told_changes,
        "imageID": memory.image_id,
        "imagePin": memory.image_pin,
        "profile": memory.profile_note,
        "attempts": pack_counts(memory.attempts),
        "ended": pack_ranges(memory.recorded),
        "budget": _pack(rest),
        "hostFaults": _pack(faults),
        "faultyNodes": pack_ranges(memory.faults.nodes),
        "givenBack": pack_counts((memory.given_back, int(memory.come_again_at)))
        if memory.given_back
        else None,
        "inputErrors": _pack(
            {"said": [[error.node, error.host] for error in memory.input_errors]}
        ),
        "formed": "true" if memory.has_formed else None,
        "coordinatorImage": coordinator.image,
        "coordinatorEnded": "true" if coordinator.is_recorded else None,
        "coordinatorQueued": "true" if coordinator.is_queued else None,
        "coordinatorRestarts": _pack(coordinator.restarts),
        "coordinatorLostSeconds": _pack(coordinator.lost_seconds),
        "finishingTime": _time(memory.finishing_since),
        "preparation": pack_preparation(memory.preparation),
        "evaluation": pack_evaluation(memory.evaluation),
        "stopped": memory.stop_reason,
        "gang": str(memory.gang) if memory.gang >= 0 else None,
        **pack_notes(memory.usage, memory.attempts),
    }


def _pack(values: Mapping[str, Any]) -> str:
    return pack_mapping(without_empty(values))


def _time(seconds: float | None) -> str | None:
    # Omit the time 0, because it means that there is no time.
    return format_time(seconds) if seconds is not None and int(seconds) else None
