"""Parses and builds the state of a run's checkpoint evaluation, from reports and for the run's status.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
    get_hosts,
    get_map,
    get_maps,
    get_natural,
    get_text,
    keep_start,
    to_int,
)
from evergrad_operator.core.objects.status_encoding import pack_mapping, unpack_mapping
from evergrad_operator.core.objects.times import LATEST

_LONGEST_MESSAGE: Final = 1024
_LONGEST_VALUE: Final = 32
_MAX_HOSTS: Final = 8


@dataclass(frozen=True)
class Tries:
    """Consecutive failures of evaluation pods, separate from failures of nodes. Times are in seconds since
    1970.

    ``failures``: failures that use up the budget. ``short_lives``, ``faults``: ends that only delay the next
    pod.
    ``hosts``: number of faults of each host. ``seen``: time of each host's last fault. ``at``: creation time
    of the pod that was counted last. ``retry_at``: no pod is created before this time.
    """

    failures: int = 0
    short_lives: int = 0
    faults: int = 0
    hosts: tuple[tuple[str, int], ...] = ()
    at: float = 0.0
    retry_at: float = 0.0
    seen: tuple[tuple[str, float], ...] = ()

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

    attempt: int = -1
    is_recorded: bool = False
    seen: int = -1
    pending: tuple[int, ...] = ()
    tries: Tries = Tries()
    failed: int = 0
    failure: str = ""
    step: int | None = None
    evaluated: int = 0
    results: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    passed_over: str = ""
    state: str = ""
    message: str = ""

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


def parse_evaluation(shown: Mapping[str, Any], notes: str) -> EvaluationProgress:
    """Return the evaluation in a status. ``notes``: the text from ``pack_evaluation``."""
    raw = unpack_mapping(notes)
    attempt = get_natural(raw, "attempt", most=MAX_ATTEMPT)
    seen = get_natural(raw, "seen")
    # Limit every list and text, because any client with access to the status can write them.
    steps = raw.get("pending")
    listed = steps if isinstance(steps, list) else []
    pending = [one for one in listed if to_int(one, most=2**53) is not None and one >= 0]
    hosts = tuple(get_hosts(raw, "hosts", most=2**31)[-_MAX_HOSTS:])
    times = dict(get_hosts(raw, "hostsSeen", most=LATEST))
    results = {
        get_text(one, "name")[:LONGEST_NAME]: {
            key[:LONGEST_NAME]: value[:_LONGEST_VALUE]
            for key, value in list(get_map(one, "values").items())[:MOST_VALUES]
            if isinstance(value, str)
        }
        for one in get_maps(shown, "results")[:MOST_SETS]
    }
    return EvaluationProgress(
        attempt=-1 if attempt is None else attempt,
        is_recorded=raw.get("ended") is True,
        seen=-1 if seen is None else seen,
        pending=tuple(sorted(set(pending))[-MOST_WAITING:]),
        tries=Tries(
            failures=get_natural(raw, "failures") or 0,
            short_lives=get_natural(raw, "shortLives") or 0,
            faults=get_natural(raw, "faults") or 0,
            hosts=hosts,
            at=get_float(raw, "at", least=0, most=LATEST) or 0.0,
            retry_at=get_float(raw, "retryAt", least=0, most=LATEST) or 0.0,
            seen=tuple((host, float(times[host])) for host, _ in hosts if host in times),
        ),
        failed=get_natural(raw, "failed") or 0,
        failure=keep_start(get_text(raw, "failure"), _LONGEST_MESSAGE),
        step=get_natural(shown, "step"),
        evaluated=get_natural(shown, "evaluated") or 0,
        results=results,
        passed_over=keep_start(get_text(shown, "passedOver"), _LONGEST_MESSAGE),
        state=get_text(shown, "state"),
        message=get_text(shown, "message"),
    )


def pack_evaluation(known: EvaluationProgress) -> str:
    """Encode the fields that are only for the operator; empty if no checkpoint was queued."""
    if known.attempt < 0 and known.seen < 0 and not known.failed:
        return ""
    tries = known.tries
    notes = {
        "attempt": known.attempt,
        "ended": known.is_recorded,
        "seen": known.seen,
        "pending": list(known.pending),
        "failures": tries.failures,
        "shortLives": tries.short_lives,
        "faults": tries.faults,
        "hosts": [list(one) for one in tries.hosts],
        "hostsSeen": [[host, int(at)] for host, at in tries.seen],
        "at": tries.at,
        "retryAt": tries.retry_at,
        "failed": known.failed,
        "failure": keep_start(known.failure, _LONGEST_MESSAGE),
    }
    # Leave out zeros and empty values, because they are the defaults of missing keys.
    kept = {
        key: value for key, value in notes.items() if value or key in ("attempt", "seen")
    }
    return pack_mapping(kept)


def show_evaluation(known: EvaluationProgress) -> dict[str, Any]:
    """Build the part of the status for users; empty if the run has never requested an evaluation."""
    if not known.state:
        return {}
    return {
        "state": known.state,
        "message": keep_start(known.message, _LONGEST_MESSAGE),
        "step": known.step,
        "evaluated": known.evaluated,
        "waiting": len(known.pending),
        "passedOver": keep_start(known.passed_over, _LONGEST_MESSAGE),
        "results": [
            {"name": name, "values": dict(values)} for name, values in known.results.items()
        ],
    }
