"""Parses the /status response of a run's coordinator into a CoordinatorStatus. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from evergrad_common.causes import Use
from evergrad_operator.core.objects.errors import ProgressError
from evergrad_operator.core.objects.raw import (
    get_float,
    get_int,
    get_map,
    get_natural,
    get_text,
)
from evergrad_operator.core.objects.status_kinds import LONGEST_CAUSE, MAX_CAUSES
from evergrad_operator.core.observe.memory import LONGEST_SAVE_MESSAGE
from evergrad_operator.core.observe.pods import MAX_MESSAGE
from evergrad_operator.core.observe.time_accounting import parse_counts

_MAX_COUNT: Final = 10**6
_MAX_SECONDS: Final = 10**9
_MAX_VALUE: Final = 1e15
"""Largest valid value. Larger values are dropped, because the API server would refuse a status with them."""


@dataclass(frozen=True)
class ReportedFailure:
    """The failure that a coordinator reports as the root cause."""

    cause: str
    node: str
    rank: int | None
    step: int | None
    exit_code: int | None
    message: str
    seconds_ago: float


@dataclass(frozen=True)
class CoordinatorStatus:
    """A coordinator's /status.

    ``attempt``: attempt of the pod that was polled. ``updated_seconds_ago``: seconds since the last report of
    a step.
    ``failed_saves``: number of consecutive failed saves; None if no save has ended yet. ``save_trouble``,
    ``save_message``: why the last save failed, as one of causes.TROUBLES and as a message. ``used``:
    node-milliseconds by use; None from an older coordinator. ``new_steps``: steps of progress since the
    coordinator started; None from an older coordinator. ``joined``: seconds since a node could first train,
    by its address.
    """

    attempt: int
    phase: str
    reason: str
    message: str
    generation: int
    min_nodes: int
    max_nodes: int
    max_failures: int | None
    ready: int
    connected: int
    world_size: int
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    checkpoint_step: int | None
    restarts: Mapping[str, int]
    lost_seconds: Mapping[str, float]
    last_failure: ReportedFailure | None
    failures_without_progress: int
    updated_seconds_ago: float | None
    failed_saves: int | None = None
    save_trouble: str = ""
    save_message: str = ""
    used: Mapping[Use, int] | None = None
    joined: Mapping[str, float] = field(default_factory=dict)
    new_steps: int | None = None


def parse_progress(raw: Mapping[str, Any], *, attempt: int) -> CoordinatorStatus:
    """Parse the response to ``GET /status`` from the coordinator pod of ``attempt``.

    Raises ProgressError if the response does not come from a coordinator.
    """
    nodes = raw.get("nodes")
    if not isinstance(nodes, Mapping) or not isinstance(raw.get("phase"), str):
        raise ProgressError(
            f"coordinator {attempt}: /status has no phase or no nodes. Is another program on its port?"
        )

    # Limit all values, because another program may use the port, and the API server refuses a status that is
    # too large.
    failure = get_map(raw, "lastFailure")
    last_failure = None
    if isinstance(raw.get("lastFailure"), Mapping):
        last_failure = ReportedFailure(
            cause=get_text(failure, "cause")[:64],
            node=get_text(failure, "node")[:128],
            rank=get_natural(failure, "rank", most=_MAX_COUNT),
            step=get_natural(failure, "step"),
            exit_code=get_int(failure, "exitCode", most=2**31 - 1),
            message=get_text(failure, "message")[: 4 * MAX_MESSAGE],
            seconds_ago=get_float(failure, "secondsAgo", least=0, most=_MAX_SECONDS) or 0.0,
        )
    restarts = _counters(raw, "restarts")
    ago = get_map(raw, "usage", "joinedSecondsAgo")
    saves = get_map(raw, "saves")
    return CoordinatorStatus(
        attempt=attempt,
        phase=raw["phase"][:64],
        reason=get_text(raw, "reason")[:128],
        message=get_text(raw, "message")[: 4 * MAX_MESSAGE],
        generation=get_natural(raw, "generation") or 0,
        min_nodes=get_natural(nodes, "min", most=_MAX_COUNT) or 0,
        max_nodes=get_natural(nodes, "max", most=_MAX_COUNT) or 0,
        max_failures=get_natural(raw, "maxFailures"),
        ready=get_natural(nodes, "ready", most=_MAX_COUNT) or 0,
        connected=get_natural(nodes, "connected", most=_MAX_COUNT) or 0,
        world_size=get_natural(raw, "worldSize") or 0,
        step=get_natural(raw, "step"),
        total_steps=get_natural(raw, "totalSteps"),
        loss=get_float(raw, "loss", least=-_MAX_VALUE, most=_MAX_VALUE),
        tokens_per_second=get_float(raw, "tokensPerSecond", least=0, most=_MAX_VALUE),
        eta_seconds=get_float(raw, "etaSeconds", least=0, most=_MAX_SECONDS),
        checkpoint_step=get_natural(raw, "checkpointStep"),
        restarts={key: int(value) for key, value in restarts.items()},
        lost_seconds=_counters(raw, "lostSeconds"),
        last_failure=last_failure,
        failures_without_progress=get_natural(failure, "withoutProgress") or 0,
        updated_seconds_ago=get_float(raw, "updatedSecondsAgo", least=0, most=_MAX_SECONDS),
        failed_saves=get_natural(saves, "failed", most=_MAX_COUNT),
        save_trouble=get_text(saves, "trouble")[:64],
        save_message=get_text(saves, "message")[:LONGEST_SAVE_MESSAGE],
        used=parse_counts(get_map(raw, "usage", "milliseconds"))
        if raw.get("usage")
        else None,
        new_steps=get_natural(raw, "newSteps"),
        joined={
            str(address)[:64]: seconds
            for address in ago
            if (seconds := get_float(ago, address, least=0, most=_MAX_SECONDS)) is not None
        },
    )


def _counters(raw: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return counters by cause, limited in number and size to the limits of a status."""
    values = get_map(raw, key)
    pairs = [(str(cause)[:LONGEST_CAUSE], get_float(values, cause)) for cause in values]
    return {
        cause: value
        for cause, value in pairs[:MAX_CAUSES]
        if value is not None and 0 <= value <= _MAX_SECONDS
    }
