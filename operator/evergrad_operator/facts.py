"""Raw runs → the facts about them that are exported as metrics. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from evergrad_operator.evaluation import parse_evaluation
from evergrad_operator.names import Phase
from evergrad_operator.raw import get_float, get_map, get_natural, get_text
from evergrad_operator.times import parse_time
from evergrad_operator.usage import Usage, parse_usage

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
    evaluated_step: int | None = None
    """Newest checkpoint that a pod has evaluated."""
    evaluated: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Its results by set and metric."""
    waiting: int | None = None
    """Checkpoints that wait for a pod; None where the run asks for none."""
    usage: Usage = field(default_factory=Usage)
    """What the time of its pods went to."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """All labels of the run."""


def count_phases(runs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count the runs in each phase, however long they have been over."""
    counts = {phase.value: 0 for phase in Phase}
    for raw in runs:
        phase = _phase(raw)
        counts[phase] = counts.get(phase, 0) + 1
    return counts


def read_runs(
    runs: Mapping[tuple[str, str], Mapping[str, Any]], *, now: float
) -> tuple[RunFacts, ...]:
    """Return the facts of all runs that are not long over. ``now``: epoch seconds."""
    facts = []
    for (namespace, name), raw in runs.items():
        status = get_map(raw, "status")
        phase = _phase(raw)
        # A thousand finished runs would be ten thousand series for ever.
        is_over = phase in (Phase.COMPLETE.value, Phase.FAILED.value)
        completed_at = parse_time(status.get("completionTime")) if is_over else None
        if completed_at is not None and now - completed_at >= FINISHED_SECONDS:
            continue

        # A status may be written by anybody who may patch it, so that nothing in it is taken for granted.
        progress = get_map(status, "progress")
        step, total = progress.get("step"), progress.get("totalSteps")
        share = None
        if isinstance(step, int) and isinstance(total, int) and total > 0:
            share = step / total
        restarts = get_map(status, "restarts", "byCause")
        counted = {
            str(cause): count for cause, count in restarts.items() if isinstance(count, int)
        }
        shown = get_map(status, "evaluation")
        evaluation = parse_evaluation(shown, "")
        evaluated = {
            (name, metric): value
            for name, values in evaluation.results.items()
            for metric in values
            if (value := get_float(values, metric)) is not None
        }
        facts.append(
            RunFacts(
                namespace=namespace,
                name=name,
                phase=phase,
                restarts=counted,
                created_at=parse_time(get_map(raw, "metadata").get("creationTimestamp")),
                started_at=parse_time(status.get("startTime")),
                completed_at=completed_at,
                progress=share,
                progressed_at=parse_time(progress.get("updatedAt")),
                evaluated_step=evaluation.step,
                evaluated=evaluated,
                waiting=get_natural(shown, "waiting"),
                usage=parse_usage(get_text(get_map(status, "memory"), "usage")),
                labels={
                    str(key): str(value)
                    for key, value in get_map(raw, "metadata", "labels").items()
                },
            )
        )
    return tuple(facts)


def _phase(raw: Mapping[str, Any]) -> str:
    return str(get_map(raw, "status").get("phase") or Phase.PENDING.value)
