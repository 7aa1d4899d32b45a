"""Parses and builds the state of a run's checkpoint evaluation, from reports and for the run's status.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

from evergrad_common.evaluation_report import (
    LONGEST_NAME,
    MOST_SETS,
    MOST_VALUES,
    MOST_WAITING,
    Evaluated,
)
from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import (
    get_float,
    get_map,
    get_maps,
    get_text,
    to_int,
)
from evergrad_operator.core.objects.status_codec import At, Kind, Layout
from evergrad_operator.core.objects.status_kinds import (
    FLAG,
    HOST_TIMES,
    HOSTS,
    NATURAL,
    TEXT,
    TIME_NUMBER,
    message,
    natural,
)

_MESSAGE: Final = message(1024)
_LONGEST_VALUE: Final = 32


def _read_steps(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    steps = raw.get(key)
    listed = steps if isinstance(steps, list) else []
    found = {one for one in listed if to_int(one, most=2**53) is not None and one >= 0}
    return tuple(sorted(found)[-MOST_WAITING:])


def _read_results(raw: Mapping[str, Any], key: str) -> dict[str, dict[str, str]]:
    return {
        get_text(one, "name")[:LONGEST_NAME]: {
            key[:LONGEST_NAME]: value[:_LONGEST_VALUE]
            for key, value in list(get_map(one, "values").items())[:MOST_VALUES]
            if isinstance(value, str)
        }
        for one in get_maps(raw, key)[:MOST_SETS]
    }


_STEPS: Final = Kind(_read_steps, list)
_RESULTS: Final = Kind(
    _read_results,
    lambda results: [
        {"name": name, "values": dict(values)} for name, values in results.items()
    ],
)


@dataclass(frozen=True)
class Tries:
    """Consecutive failures of evaluation pods, separate from failures of nodes. Times are in seconds since
    1970.

    ``failures``: failures that use up the budget. ``short_lives``, ``faults``: ends that only delay the next
    pod.
    ``hosts``: number of faults of each host. ``seen``: time of each host's last fault. ``at``: creation time
    of the pod that was counted last. ``retry_at``: no pod is created before this time.
    """

    failures: Annotated[int, At("memory.evaluation.failures", NATURAL)] = 0
    short_lives: Annotated[int, At("memory.evaluation.shortLives", NATURAL)] = 0
    faults: Annotated[int, At("memory.evaluation.faults", NATURAL)] = 0
    hosts: Annotated[tuple[tuple[str, int], ...], At("memory.evaluation.hosts", HOSTS)] = ()
    at: Annotated[float, At("memory.evaluation.at", TIME_NUMBER)] = 0.0
    retry_at: Annotated[float, At("memory.evaluation.retryAt", TIME_NUMBER)] = 0.0
    seen: Annotated[
        tuple[tuple[str, float], ...], At("memory.evaluation.hostsSeen", HOST_TIMES)
    ] = ()

    def begin_anew(self) -> "Tries":
        """Return the tries without failures, but with the hosts to avoid."""
        return Tries(hosts=self.hosts, seen=self.seen)


@dataclass(frozen=True)
class EvaluationProgress:
    """The state of a run's evaluation.

    ``attempt``: serial number of the newest pod of any step, or -1. ``is_recorded``: the pod's end is
    counted. ``seen``: step of the checkpoint that was queued last. ``pending``: steps that wait, ascending.
    ``failed``: generation of the run at which the evaluation gave up; 0 if it did not. ``failure``: message
    of the newest failure. ``step``: newest evaluated checkpoint. ``evaluated``: number of evaluated
    checkpoints. ``passed_over``: newest checkpoint without results, and the reason. ``state``, ``message``:
    as shown.
    """

    LAYOUT: ClassVar[Layout] = Layout(
        needs={
            "memory.evaluation": ("attempt", "seen", "failed"),
            "evaluation": ("state",),
        },
        derived={"evaluation.waiting": "waiting"},
    )
    attempt: Annotated[
        int, At("memory.evaluation.attempt", natural(MAX_ATTEMPT), always=True)
    ] = -1
    is_recorded: Annotated[bool, At("memory.evaluation.ended", FLAG)] = False
    seen: Annotated[int, At("memory.evaluation.seen", NATURAL, always=True)] = -1
    pending: Annotated[tuple[int, ...], At("memory.evaluation.pending", _STEPS)] = ()
    tries: Tries = Tries()
    failed: Annotated[int, At("memory.evaluation.failed", NATURAL)] = 0
    failure: Annotated[str, At("memory.evaluation.failure", _MESSAGE)] = ""
    step: Annotated[int | None, At("evaluation.step", NATURAL)] = None
    evaluated: Annotated[int, At("evaluation.evaluated", NATURAL, always=True)] = 0
    results: Annotated[
        Mapping[str, Mapping[str, str]], At("evaluation.results", _RESULTS)
    ] = field(default_factory=dict)
    passed_over: Annotated[str, At("evaluation.passedOver", _MESSAGE)] = ""
    state: Annotated[str, At("evaluation.state", TEXT)] = ""
    message: Annotated[str, At("evaluation.message", _MESSAGE)] = ""

    @property
    def waiting(self) -> int:
        """Number of checkpoints that wait."""
        return len(self.pending)

    @property
    def numbers(self) -> dict[tuple[str, str], float]:
        """Results that are numbers, by set and metric."""
        return {
            (name, metric): value
            for name, values in self.results.items()
            for metric in values
            if (value := get_float(values, metric)) is not None
        }


def take_up(known: EvaluationProgress, checkpoint_step: int | None) -> EvaluationProgress:
    """Return the evaluation with the newest checkpoint queued, if it was not queued before.

    At most ``MOST_WAITING`` checkpoints wait. The oldest are dropped, because retention has already removed
    them.
    """
    if checkpoint_step is None or checkpoint_step == known.seen:
        return known
    pending = sorted({*known.pending, checkpoint_step})[-MOST_WAITING:]
    return replace(known, seen=checkpoint_step, pending=tuple(pending))


def take_report(known: EvaluationProgress, report: Evaluated) -> EvaluationProgress:
    """Return the evaluation with a pod's report.

    The report also lists the checkpoints that wait on the volume. Some of them may have been published
    between two polls of the coordinator.
    """
    pending = sorted({*known.pending, *report.waiting} - {report.step})[-MOST_WAITING:]
    known = replace(known, pending=tuple(pending), tries=known.tries.begin_anew())
    if report.passed_over:
        return replace(known, passed_over=f"step {report.step}: {report.passed_over}")
    known = replace(known, evaluated=known.evaluated + 1)
    # Keep the results of the newest checkpoint if an older checkpoint is evaluated later.
    if known.step is not None and report.step < known.step:
        return known
    return replace(known, step=report.step, results=report.results)
