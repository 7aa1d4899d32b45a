"""The report's tables, as text cells for both renderers. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evergrad_common.causes import CHANGES, LOSSES, describe_ending
from evergrad_common.text import count, duration, real, size, utc
from evergrad_trainer.base.records import TOKENS, EvaluationRecord, Event, EventType
from evergrad_trainer.observers.events import changes_of, saved_step, seconds_of
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import History, StepTable

_FIRST_ROWS, _LAST_ROWS = 10, 40
_MOST_WARNINGS = 100

CAUSE_TEXTS: Mapping[str, str] = {"productive": "Training steps that were kept", **LOSSES}


@dataclass(frozen=True)
class Table:
    """Table of text cells.

    ``numeric``: titles of right-aligned columns. ``gap``: after which row ``left_out`` rows are missing.
    """

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str]
    gap: int = 0
    left_out: int = 0


def build_table(
    titles: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    *,
    numeric: Sequence[str],
) -> Table:
    """Build a table; if there are too many rows, only with the first and the last rows."""
    left_out = len(rows) - _FIRST_ROWS - _LAST_ROWS
    # A gap of one row would take as much space as the row.
    if left_out < 2:
        return Table(tuple(titles), tuple(rows), frozenset(numeric))
    # Show the begin and the current state. The files contain the rows between them.
    shown = (*rows[:_FIRST_ROWS], *rows[-_LAST_ROWS:])
    return Table(
        tuple(titles),
        shown,
        frozenset(numeric),
        gap=_FIRST_ROWS,
        left_out=left_out,
    )


def checkpoint_table(events: Sequence[Event]) -> Table:
    """List published checkpoints and failed saves, in order."""
    # List failed saves among the others, because they explain gaps between checkpoints.
    saves = [
        event for event in events if event.type in (EventType.SAVE, EventType.SAVE_FAILED)
    ]
    titles = ("Step", "Published (UTC)", "Size", "Took", "Training waited", "")
    rows = []
    for event in saves:
        num_bytes, took = (
            size(seconds_of(event, "bytes")),
            duration(seconds_of(event, "seconds")),
        )
        step, note = saved_step(event), ""
        if event.type == EventType.SAVE_FAILED:
            num_bytes, took, step = "–", "–", event.step
            note = f"failed: {event.fields.get('reason', 'unknown')}"
        elif event.fields.get("best") is True:
            note = "best so far"
        waited = duration(seconds_of(event, "blocking_seconds"))
        rows.append((count(step), utc(event.time), num_bytes, took, waited, note))
    return build_table(titles, rows, numeric=titles[:1] + titles[2:5])


def restart_table(goodput: Goodput) -> Table:
    """Show why processes ended and the step from which the next process resumed."""
    titles = (
        "Restarted (UTC)",
        "The process before was",
        "Went on after step",
        "Steps lost",
        "Downtime",
        "",
    )
    rows = [
        (
            utc(restart.time),
            describe_ending(restart.cause),
            "–" if restart.resumed_from is None else count(restart.resumed_from),
            count(restart.repeated_steps),
            duration(restart.downtime_seconds),
            restart.detail,
        )
        for restart in goodput.restarts
    ]
    return build_table(titles, rows, numeric=titles[2:5])


def world_cause_table(goodput: Goodput) -> Table:
    """Show the cost of changes of the world by cause, the most expensive first."""
    seconds, counts = goodput.reconfiguration_seconds_by_cause, goodput.changes_by_cause
    # The sum is the cost of a cause. The longest change shows whether a single case dominates it.
    longest = {
        cause: max(one.seconds for one in goodput.changes if one.cause == cause)
        for cause in counts
    }
    titles = ("Cause", "Changes", "Training stood still", "Longest")
    rows = [
        (
            CHANGES[cause].text,
            count(counts[cause]),
            duration(seconds[cause]),
            duration(longest[cause]),
        )
        for cause in sorted(counts, key=lambda cause: -seconds[cause])
    ]
    return build_table(titles, rows, numeric=titles[1:])


def world_table(goodput: Goodput) -> Table:
    """List all changes of the world in order."""
    titles = ("Changed (UTC)", "Processes", "After step", "Training stood still", "")
    rows = [
        (
            utc(change.time),
            f"{_processes(change.from_world_size)} → {_processes(change.world_size)}",
            count(change.step),
            duration(change.seconds),
            change.detail or CHANGES[change.cause].text,
        )
        for change in goodput.changes
    ]
    return build_table(titles, rows, numeric=titles[1:4])


def _processes(number: int | None) -> str:
    return "–" if number is None else count(number)


def evaluation_table(evaluations: Sequence[EvaluationRecord], *, items: str) -> Table:
    """List all evaluations in order; the best of each set is marked.

    ``items``: the items over which a loss is averaged, such as tokens.
    """
    # Sets may have different metrics. Each metric is a column, which is empty if a set lacks it.
    best = best_evaluations(evaluations)
    metrics = dict.fromkeys(name for one in evaluations for name in one.metrics)
    perplexity = ("Perplexity",) if items == TOKENS else ()
    titles = ("Step", "Set", "Loss", *perplexity, *metrics, items.capitalize(), "Took", "")
    rows = [
        (
            count(one.step),
            one.name,
            real(one.loss),
            *(real(one.perplexity, 2) for _ in perplexity),
            *(real(one.metrics.get(name, math.nan)) for name in metrics),
            count(one.tokens),
            duration(one.seconds),
            "best" if one is best.get(one.name) else "",
        )
        for one in evaluations
    ]
    return build_table(titles, rows, numeric=(titles[0], *titles[2:-1]))


def change_table(events: Sequence[Event]) -> Table:
    """List the fields of the manifest that changed during the run, in order."""
    titles = ("After step", "Field", "Before", "From then on")
    rows = [
        (count(one.step), one.field, one.old, one.new)
        for event in events
        for one in changes_of(event)
    ]
    return build_table(titles, rows, numeric=titles[:1])


def best_evaluations(
    evaluations: Sequence[EvaluationRecord],
) -> dict[str, EvaluationRecord]:
    """Find the evaluation with the lowest finite loss of each set."""
    best: dict[str, EvaluationRecord] = {}
    for one in evaluations:
        if math.isfinite(one.loss) and (
            one.name not in best or one.loss < best[one.name].loss
        ):
            best[one.name] = one
    return best


def last_evaluations(evaluations: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """Keep the last row of each set and step, in order of the steps."""
    last = {(one.step, one.name): one for one in evaluations}
    return [last[key] for key in sorted(last, key=lambda key: key[0])]


def warnings_of(history: History, goodput: Goodput, *, steps: StepTable) -> tuple[str, ...]:
    """Collect the warnings for the reader, as sentences. ``steps``: the valid rows."""
    # In the order of the run; warnings about the files come last.
    found = []
    for event in history.events:
        fields, step = event.fields, count(event.step)
        message, reason = fields.get("message"), fields.get("reason")
        if event.type == EventType.WARNING:
            found.append(str(message))
        elif event.type == EventType.FALLBACK:
            name = fields.get("checkpoint")
            found.append(f"checkpoint {name} did not validate and was set aside: {reason}")
        elif event.type == EventType.SAVE_FAILED:
            found.append(f"a checkpoint could not be saved at step {step}: {reason}")
        elif event.type == EventType.ALERT:
            found.append(f"{fields.get('monitor')} at step {step}: {message}")
        elif event.type == EventType.SKIPPED:
            found.append(f"step {step} made no update: {message}")
        elif event.type == EventType.NON_FINITE:
            found.append(f"the run stopped after step {step}: {message}")
        elif event.type == EventType.FAILED:
            error = fields.get("error")
            found.append(f"a process failed at step {step} with {error}: {message}")
    non_finite = int(np.count_nonzero(~np.isfinite(steps.loss)))
    # Warn about such steps, because their gaps in the curve are easy to overlook.
    if non_finite:
        found.append(
            f"{count(non_finite)} step{'s' if non_finite > 1 else ''} had a loss that is not a number"
        )
    # Show each sentence once, with its number of occurrences.
    times = Counter(found)
    folded = [
        sentence if number == 1 else f"{sentence} ({number} times)"
        for sentence, number in times.items()
    ]
    # Thousands of warnings are not readable, so show only the newest.
    if len(folded) > _MOST_WARNINGS:
        older = f"{len(folded) - _MOST_WARNINGS:,} older warnings are in events.jsonl"
        folded = [older, *folded[-_MOST_WARNINGS:]]
    return (*folded, *history.notes, *goodput.notes)
