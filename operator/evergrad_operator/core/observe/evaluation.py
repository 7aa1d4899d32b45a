"""The evaluation of a run's checkpoints, as its pods report it and as the run's status keeps it. Pure."""

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
    """Failures of evaluating pods in a row, apart from those of the run's nodes. Times in seconds since 1970.

    ``failures`` use up a budget, ``short_lives`` and ``faults`` (of ``hosts``, with their number) only pause
    the next pod. ``seen``: when each of the hosts failed last. ``at``: creation time of the pod that was
    counted last. No pod is made before ``retry_at``.
    """

    failures: int = 0
    short_lives: int = 0
    faults: int = 0
    hosts: tuple[tuple[str, int], ...] = ()
    at: float = 0.0
    retry_at: float = 0.0
    seen: tuple[tuple[str, float], ...] = ()

    def begin_anew(self) -> "Tries":
        """Forget failures, and keep away from the same hosts."""
        return Tries(hosts=self.hosts, seen=self.seen)


@dataclass(frozen=True)
class EvaluationProgress:
    """The state of a run's evaluation.

    ``attempt``: serial of the newest pod (-1: none so far), whatever its step; ``is_recorded``: its end is
    counted. ``seen``: the checkpoint that was taken up last. ``pending``: steps that wait, ascending.
    ``failed``: generation of the run at which it was given up, until the next one; 0 for not. ``failure``:
    the newest one in words. ``step``: the newest checkpoint that was evaluated; ``evaluated``: how many were.
    ``passed_over``: the newest checkpoint without results, and why. ``state`` and ``message``: as shown.
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
    """Return the evaluation with the newest checkpoint waiting, if it was not taken up before.

    The oldest beyond the bound are dropped: retention has removed them long before.
    """
    if checkpoint_step is None or checkpoint_step == known.seen:
        return known
    pending = sorted({*known.pending, checkpoint_step})[-MOST_WAITING:]
    return replace(known, seen=checkpoint_step, pending=tuple(pending))


def take_report(known: EvaluationProgress, report: Evaluated) -> EvaluationProgress:
    """Return the evaluation with a pod's report.

    Checkpoints that were published between two answers of the coordinator are known to the volume alone: the
    report lists what waits there.
    """
    pending = sorted({*known.pending, *report.waiting} - {report.step})[-MOST_WAITING:]
    known = replace(known, pending=tuple(pending), tries=known.tries.begin_anew())
    if report.passed_over:
        return replace(known, passed_over=f"step {report.step}: {report.passed_over}")
    known = replace(known, evaluated=known.evaluated + 1)
    # An older checkpoint that was found later does not hide the newest.
    if known.step is not None and report.step < known.step:
        return known
    return replace(known, step=report.step, results=report.results)


def parse_evaluation(shown: Mapping[str, Any], notes: str) -> EvaluationProgress:
    """Return the evaluation that a status has. ``notes``: what ``pack_evaluation`` wrote."""
    raw = unpack_mapping(notes)
    attempt = get_natural(raw, "attempt", most=MAX_ATTEMPT)
    seen = get_natural(raw, "seen")
    # Anybody who may patch the status can write these: every list and text is bounded.
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
    """Pack the parts that mean nothing to people; empty where nothing was taken up."""
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
    # Zero and nothing are what is read where a key is missing.
    kept = {
        key: value for key, value in notes.items() if value or key in ("attempt", "seen")
    }
    return pack_mapping(kept)


def show_evaluation(known: EvaluationProgress) -> dict[str, Any]:
    """Build the part of the status that people read; empty where a run asks for no pods and had none."""
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
