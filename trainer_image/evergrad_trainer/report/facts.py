"""Gathers the facts of a report from a run directory. Both renderers show them and compute nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from evergrad_coordinator.causes import CHANGES, describe_ending
from evergrad_coordinator.text import count, duration, percent, real, short_count, size, utc
from evergrad_trainer.observers.accounting import account
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import History, StepTable, read_history
from evergrad_trainer.provenance.record import read_processes
from evergrad_trainer.provenance.redaction import hide_home
from evergrad_trainer.records import EventType
from evergrad_trainer.report.tables import (
    CAUSE_TEXTS,
    Table,
    best_evaluations,
    change_table,
    checkpoint_table,
    evaluation_table,
    last_evaluations,
    restart_table,
    warnings_of,
    world_cause_table,
    world_table,
)
from evergrad_trainer.run_directory import RunDirectory

FINAL_LOSS_STEPS = 20
"""The final training loss is also given as a mean of this many steps: a single step's is noise."""


@dataclass(frozen=True)
class Status:
    """``tone``: good, bad, warn or quiet."""

    label: str
    tone: str
    detail: str


@dataclass(frozen=True)
class Figure:
    """One number of the summary. ``note``: what it means or is made of."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Share:
    """Time that went to one cause. ``ratio``: of the elapsed time."""

    cause: str
    text: str
    seconds: float
    ratio: float
    duration: str
    percent: str


@dataclass(frozen=True)
class Facts:
    """Everything that a report shows besides its plots."""

    name: str
    subtitle: tuple[str, ...]
    status: Status
    figures: tuple[Figure, ...]
    shares: tuple[Share, ...]
    evaluations: Table
    checkpoints: Table
    restarts: Table
    changes: Table
    """Fields of the file that changed while the run lived."""
    worlds: Table
    """Each change of the world; without rows where the world stayed the same."""
    world_causes: Table
    warnings: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    configuration: str
    goodput: Goodput
    steps: StepTable
    """The rows that count, in order of the steps."""
    superseded: StepTable
    """The others, in the order of the file."""
    history: History
    metrics: Mapping[str, Mapping[str, str]]
    """Metrics of the recipe besides the loss: ``unit`` and ``help`` by name, from its start event."""


def gather_facts(directory: RunDirectory) -> Facts:
    """Read everything. Raises RunDirectoryError for files that are no run's; a run without steps is fine."""
    directory.require_run()
    history = read_history(directory)
    goodput = account(history.steps, history.events, history.evaluations)
    # A step trained again after a kill is in the file twice: figures and curves show the one that counts.
    counting, superseded = _split(history.steps)
    resolved = directory.read_resolved() or {}
    started = _started(history, resolved)
    evaluations = last_evaluations(history.evaluations)
    manifest = resolved.get("manifest", resolved)
    return Facts(
        name=str(started.get("run") or directory.path.resolve().name),
        subtitle=_subtitle(started, goodput),
        status=_status(
            goodput, is_complete=directory.is_complete(), step=_current_step(history.steps)
        ),
        figures=_figures(history, counting, goodput, started),
        shares=_shares(goodput),
        evaluations=evaluation_table(evaluations),
        checkpoints=checkpoint_table(history.events),
        restarts=restart_table(goodput),
        changes=change_table(history.events),
        worlds=world_table(goodput),
        world_causes=world_cause_table(goodput),
        warnings=warnings_of(history, goodput),
        environment=_environment(read_processes(directory)),
        configuration=hide_home(
            yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=110)
        )
        if manifest
        else "",
        goodput=goodput,
        steps=counting,
        superseded=superseded,
        history=history,
        metrics={
            str(name): one
            for name, one in _mapping(started.get("metrics")).items()
            if isinstance(one, Mapping)
        },
    )


def _current_step(steps: StepTable) -> int:
    return int(steps.step[-1]) if len(steps) else 0


def _split(steps: StepTable) -> tuple[StepTable, StepTable]:
    """Separate the rows that count from the rest.

    Rows beyond the newest row's step were lost in a kill and will be trained again.
    """
    last = steps.last_rows()
    # Training went back to the newest row: what is beyond it has not come again yet.
    last = last[steps.step[last] <= _current_step(steps)]
    is_counting = np.zeros(len(steps), np.bool_)
    is_counting[last] = True
    return steps.take(last), steps.take(~is_counting)


def _started(history: History, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Take the facts of the newest start event, with the manifest's where it has none."""
    starts = [event.fields for event in history.events if event.type == EventType.START]
    training = _dig(resolved, "manifest", "spec", "training")
    # A run that failed before its first start event has a manifest all the same.
    from_manifest = {
        "run": _dig(resolved, "manifest", "metadata", "name"),
        "model": _dig(training, "model", "config", "model_type")
        or _dig(training, "model", "path"),
        "precision": _dig(training, "runtime", "precision"),
        "parallelism": _dig(training, "runtime", "parallelism"),
        "total_steps": _dig(resolved, "derived", "totalSteps"),
    }
    return {key: value for key, value in from_manifest.items() if value is not None} | (
        starts[-1] if starts else {}
    )


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _subtitle(started: Mapping[str, Any], goodput: Goodput) -> tuple[str, ...]:
    parameters = started.get("parameters")
    facts = [
        str(started["model"]) if started.get("model") else "",
        f"{short_count(parameters)} parameters" if isinstance(parameters, int) else "",
        str(started.get("precision") or ""),
        str(started.get("parallelism") or ""),
    ]

    # One number of processes, or the least and the most where training went on with others.
    sizes = {one.world_size for one in goodput.changes} | {
        one.from_world_size for one in goodput.changes
    }
    at_start = started.get("world_size")
    if known := sorted({size for size in (*sizes, at_start) if isinstance(size, int)}):
        number = f"{known[0]}–{known[-1]}" if len(known) > 1 else str(known[0])
        facts.append(f"{number} process{'es' if known[-1] != 1 else ''}")
    if goodput.processes:
        facts.append(
            f"{utc(goodput.processes[0].begin)} – {utc(max(one.end for one in goodput.processes))} UTC"
        )
    return tuple(fact for fact in facts if fact)


def _status(goodput: Goodput, *, is_complete: bool, step: int) -> Status:
    # The mark of the end counts, whatever the last process of the run wrote after it.
    if is_complete:
        return Status("Complete", "good", f"reached step {count(step)}")
    if not goodput.processes:
        return Status("Not started", "quiet", "no process has written anything yet")
    last = goodput.processes[-1]
    if last.ended == "failed":
        return Status("Failed", "bad", last.detail)
    if last.ended == "running or killed":
        return Status(
            "No end recorded",
            "quiet",
            f"running, or killed; last sign at {utc(last.end)} UTC, step {count(step)}",
        )
    return Status(
        "Stopped",
        "warn",
        f"{describe_ending(last.ended)} after step {count(step)}",
    )


def _figures(
    history: History, steps: StepTable, goodput: Goodput, started: Mapping[str, Any]
) -> tuple[Figure, ...]:
    total = started.get("total_steps")
    step = count(_current_step(history.steps))
    figures = [
        Figure("Steps", step, f"of {count(total)}" if isinstance(total, int) else "finished"),
        _loss_figure(steps),
        *_evaluation_figures(history),
        Figure(
            "Tokens",
            short_count(steps.tokens.sum()),
            f"{count(steps.valid_tokens.sum())} of them carried a loss",
        ),
        _speed_figure(steps),
        Figure(
            "Wall time",
            duration(goodput.elapsed_seconds),
            f"{duration(goodput.productive_seconds)} in steps that were kept",
        ),
        Figure("Goodput", percent(goodput.ratio), "of the time went into steps that were kept"),
    ]

    # Restarts cost steps, changes of the world only time: each says by its causes what to do about it.
    ended = [
        f"{number} {one.replace('_', ' ')}" for one, number in goodput.restarts_by_cause.items()
    ]
    repeated = sum(restart.repeated_steps for restart in goodput.restarts)
    lost = f"{count(repeated)} step{'' if repeated == 1 else 's'} lost"
    note = f"{', '.join(ended)}; {lost}" if ended else "trained in one go"
    figures.append(Figure("Restarts", count(len(goodput.restarts)), note))
    if goodput.changes:
        changed = ", ".join(
            f"{number} × {CHANGES[one].text}"
            for one, number in goodput.changes_by_cause.items()
        )
        still = duration(goodput.lost_seconds["reconfiguration"])
        note = f"{changed}; training stood still for {still}"
        figures.append(Figure("Changes of the world", count(len(goodput.changes)), note))
    return tuple(figures)


def _loss_figure(steps: StepTable) -> Figure:
    if not len(steps):
        return Figure("Training loss", "–", "no step yet")
    # One step's loss is noise: the mean is what runs are compared by.
    recent = steps.loss[-FINAL_LOSS_STEPS:]
    recent = recent[np.isfinite(recent)]
    last = real(float(steps.loss[-1]))
    if len(recent) < 2:
        return Figure("Training loss", last, "of the last step")
    return Figure(
        "Training loss",
        real(float(recent.mean())),
        f"mean of the last {len(recent)} steps; the last is {last}",
    )


def _evaluation_figures(history: History) -> list[Figure]:
    """Show the newest loss of each set, at most four of them."""
    best = best_evaluations(history.evaluations)
    newest = {one.name: one for one in last_evaluations(history.evaluations)}
    figures = []
    for name, one in list(newest.items())[:4]:
        note = f"perplexity {real(one.perplexity, 2)}"
        # The best one is worth a word only where it is not the newest.
        if name in best and best[name].step != one.step:
            note += f"; best {real(best[name].loss)} at step {count(best[name].step)}"
        figures.append(Figure(f"{name} loss", real(one.loss), note))
    return figures


def _speed_figure(steps: StepTable) -> Figure:
    # Rows of a broken clock have no duration; a speed over no time would be infinite.
    seconds = float(np.nansum(steps.step_seconds))
    if not seconds > 0:
        return Figure("Tokens per second", "–", "no step yet")
    median = duration(float(np.nanmedian(steps.step_seconds)))
    return Figure(
        "Tokens per second",
        short_count(float(steps.tokens.sum()) / seconds),
        f"while training; a step takes {median}",
    )


def _shares(goodput: Goodput) -> tuple[Share, ...]:
    """List productive time first, then what was lost, the largest part first; causes that took nothing are
    left out."""
    elapsed = goodput.elapsed_seconds
    # The dearest cause first, since that is what one can do something about.
    lost = sorted(goodput.lost_seconds.items(), key=lambda item: -item[1])
    parts = [
        ("productive", goodput.productive_seconds),
        *((cause, seconds) for cause, seconds in lost if seconds > 0),
    ]
    return tuple(
        Share(
            cause,
            CAUSE_TEXTS[cause],
            seconds,
            seconds / elapsed,
            duration(seconds),
            percent(seconds / elapsed),
        )
        for cause, seconds in parts
        if elapsed > 0
    )


def _environment(processes: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Show the newest process's provenance, as rows."""
    if not processes:
        return ()
    # Earlier processes may have run elsewhere; the newest one says how the run goes on.
    entry = processes[-1]
    versions, hardware, git, task = (
        _mapping(entry.get(key)) for key in ("versions", "hardware", "git", "task")
    )
    memory = hardware.get("memory_bytes")
    commit = str(git.get("commit") or "")
    # Other versions in earlier processes may have changed the last bits of their steps.
    earlier = dict.fromkeys(
        f"{key} {was}"
        for process in processes
        for key in ("evergrad", "torch", "transformers")
        if (was := _mapping(process.get("versions")).get(key)) not in (None, versions.get(key))
    )
    rows = [
        ("Command", entry.get("command")),
        ("Seed", entry.get("seed")),
        *(
            (key.capitalize(), versions.get(key))
            for key in ("evergrad", "torch", "transformers", "python", "platform")
        ),
        ("Earlier versions", ", ".join(earlier)),
        ("Files of the task", ", ".join(f"{name} {own}" for name, own in task.items())),
        ("Commit", commit + (" with changes" if git.get("has_changes") else "")),
        ("CPU", hardware.get("cpu")),
        ("Cores", hardware.get("usable_cores")),
        ("Memory", size(memory) if isinstance(memory, int) else None),
        ("Accelerators", ", ".join(map(str, hardware.get("gpus") or [])) or "none"),
    ]
    return tuple(
        (title, hide_home(str(value))) for title, value in rows if value not in (None, "")
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
