"""Raw runs → what is exported of them as metrics. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_operator.names import Phase
from evergrad_operator.times import parse_time

FINISHED_SECONDS: Final = 86400.0
"""Time, in seconds, for which a run that is over is still exported."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about one run. Times are epoch seconds, None where it has not happened."""

    namespace: str
    name: str
    phase: str
    restarts: Mapping[str, int]
    created_at: float | None
    started_at: float | None
    completed_at: float | None
    progress: float | None
    """Share of the steps that are done, 0 to 1."""
    progressed_at: float | None


def count_phases(runs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many runs there are in each phase, however long they have been over."""
    counts = {phase.value: 0 for phase in Phase}
    for raw in runs:
        phase = _phase(raw)
        counts[phase] = counts.get(phase, 0) + 1
    return counts


def read_runs(
    runs: Mapping[tuple[str, str], Mapping[str, Any]], *, now: float
) -> tuple[RunFacts, ...]:
    """Facts of all runs that are not long over. ``now``: epoch seconds."""
    # A thousand finished runs would be ten thousand series for ever.
    facts = (_read_run(key, raw) for key, raw in runs.items())
    return tuple(
        fact
        for fact in facts
        if fact.completed_at is None or now - fact.completed_at < FINISHED_SECONDS
    )


def _read_run(key: tuple[str, str], raw: Mapping[str, Any]) -> RunFacts:
    status = _mapping(raw, "status")
    progress, restarts = (
        _mapping(status, "progress"),
        _mapping(_mapping(status, "restarts"), "byCause"),
    )
    step, total = progress.get("step"), progress.get("totalSteps")
    phase = _phase(raw)
    is_over = phase in (Phase.COMPLETE.value, Phase.FAILED.value)
    return RunFacts(
        namespace=key[0],
        name=key[1],
        phase=phase,
        restarts={
            str(cause): count for cause, count in restarts.items() if isinstance(count, int)
        },
        created_at=parse_time(_mapping(raw, "metadata").get("creationTimestamp")),
        started_at=parse_time(status.get("startTime")),
        completed_at=parse_time(status.get("completionTime")) if is_over else None,
        progress=step / total
        if isinstance(step, int) and isinstance(total, int) and total > 0
        else None,
        progressed_at=parse_time(progress.get("updatedAt")),
    )


def _phase(raw: Mapping[str, Any]) -> str:
    return str(_mapping(raw, "status").get("phase") or Phase.PENDING.value)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}
