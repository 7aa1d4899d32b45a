"""The head of a report as texts: status, subtitle, figures, shares of time and environment. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evergrad_common.causes import CHANGES, describe_ending
from evergrad_common.text import count, duration, percent, real, short_count, size, utc
from evergrad_trainer.base.records import TOKENS
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import History, StepTable
from evergrad_trainer.report.tables import CAUSE_TEXTS, best_evaluations, last_evaluations
from evergrad_trainer.run.redaction import hide_home

FINAL_LOSS_STEPS = 20
"""Number of last steps over which the final training loss is averaged, because one step's loss is noisy."""
_MOST_SETS = 4
"""Maximum number of evaluation sets with a figure; the table lists all sets."""


@dataclass(frozen=True)
class RunStatus:
    """The state of the run in one word. ``tone``: good, bad, warn or quiet."""

    label: str
    tone: str
    detail: str


@dataclass(frozen=True)
class Figure:
    """One number of the summary. ``note``: its meaning or its parts."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Share:
    """The time of one cause. ``ratio``: its share of the elapsed time."""

    cause: str
    text: str
    seconds: float
    ratio: float
    duration: str
    percent: str
    process_time: str
    """The time of all processes together; empty if no process existed at that time."""


def describe_status(goodput: Goodput, *, is_complete: bool, step: int) -> RunStatus:
    """Describe how the run ended, or its state if it has not ended."""
    # The completion mark takes precedence over records that a process wrote after it.
    if is_complete:
        return RunStatus("Complete", "good", f"reached step {count(step)}")
    if not goodput.processes:
        return RunStatus("Not started", "quiet", "no process has written anything yet")

    # Without the mark, use the end of the last process.
    last = goodput.processes[-1]
    if last.ended == "failed":
        return RunStatus("Failed", "bad", last.detail)
    if last.ended == "running or killed":
        sign = f"last sign at {utc(last.end)} UTC, step {count(step)}"
        return RunStatus("No end recorded", "quiet", f"running, or killed; {sign}")
    ending = describe_ending(last.ended)
    return RunStatus("Stopped", "warn", f"{ending} after step {count(step)}")


def describe_run(started: Mapping[str, Any], goodput: Goodput) -> tuple[str, ...]:
    """Describe the run in short texts: model, size, precision, parallelism, processes and time."""
    parameters = started.get("parameters")
    facts = [
        str(started.get("model") or ""),
        f"{short_count(parameters)} parameters" if isinstance(parameters, int) else "",
        str(started.get("precision") or ""),
        str(started.get("parallelism") or ""),
    ]

    # Show one number of processes, or the smallest and the largest if the number changed.
    sizes = [started.get("world_size")]
    for change in goodput.changes:
        sizes += [change.from_world_size, change.world_size]
    known = sorted({size for size in sizes if isinstance(size, int)})
    if known:
        least, most = known[0], known[-1]
        number = f"{least}–{most}" if most > least else str(least)
        facts.append(f"{number} process{'es' if most != 1 else ''}")

    # Processes may overlap if a frozen one continued to write, so the last to begin may not end last.
    if goodput.processes:
        begin = goodput.processes[0].begin
        end = max(one.end for one in goodput.processes)
        facts.append(f"{utc(begin)} – {utc(end)} UTC")
    return tuple(fact for fact in facts if fact)


def summary_figures(
    history: History,
    steps: StepTable,
    goodput: Goodput,
    started: Mapping[str, Any],
    *,
    unit: str = TOKENS,
) -> tuple[Figure, ...]:
    """List the numbers of the summary, in the order of the page.

    ``steps``: the valid rows. ``unit``: unit of the data that the steps read, such as tokens.
    """
    total = started.get("total_steps")
    step = count(history.steps.newest_step)
    items = str(started.get("loss_items", TOKENS))
    carriers = "of them" if items == TOKENS else items
    return (
        Figure(
            "Steps", step, f"of {count(total)}" if isinstance(total, int) else "finished"
        ),
        loss_figure(steps),
        *evaluation_figures(history, items=items),
        Figure(
            unit.capitalize(),
            short_count(steps.tokens.sum()),
            f"{count(steps.valid_tokens.sum())} {carriers} carried a loss",
        ),
        speed_figure(steps, unit=unit),
        *utilisation_figures(steps, started),
        Figure(
            "Wall time",
            duration(goodput.elapsed_seconds),
            f"{duration(goodput.productive_seconds)} in steps that were kept",
        ),
        Figure(
            "Goodput", percent(goodput.ratio), "of the time went into steps that were kept"
        ),
        *interruption_figures(goodput),
    )


def loss_figure(steps: StepTable) -> Figure:
    """Show the training loss at the end."""
    if not len(steps):
        return Figure("Training loss", "–", "no step yet")
    # Average several steps to compare runs, because the loss of one step is noisy.
    recent = steps.loss[-FINAL_LOSS_STEPS:]
    recent = recent[np.isfinite(recent)]
    last = real(float(steps.loss[-1]))
    if len(recent) < 2:
        return Figure("Training loss", last, "of the last step")
    note = f"mean of the last {len(recent)} steps; the last is {last}"
    return Figure("Training loss", real(float(recent.mean())), note)


def evaluation_figures(history: History, *, items: str) -> list[Figure]:
    """Show the newest loss of each set, for at most four sets."""
    best = best_evaluations(history.evaluations)
    newest = {one.name: one for one in last_evaluations(history.evaluations)}
    figures = []
    for name, one in list(newest.items())[:_MOST_SETS]:
        notes = [f"perplexity {real(one.perplexity, 2)}"] if items == TOKENS else []
        # Mention the best loss only if it is not the newest.
        if name in best and best[name].step != one.step:
            notes.append(f"best {real(best[name].loss)} at step {count(best[name].step)}")
        note = "; ".join(notes) or f"mean over {count(one.tokens)} {items}"
        figures.append(Figure(f"{name} loss", real(one.loss), note))
    return figures


def speed_figure(steps: StepTable, *, unit: str = TOKENS) -> Figure:
    """Show tokens (or another ``unit``) per second over all valid steps."""
    title = f"{unit.capitalize()} per second"
    # Rows of a broken clock have no duration, and a speed over zero seconds would be infinite.
    seconds = float(np.nansum(steps.step_seconds))
    if not seconds > 0:
        return Figure(title, "–", "no step yet")
    speed = float(steps.tokens.sum()) / seconds
    median = duration(float(np.nanmedian(steps.step_seconds)))
    note = f"while training; a step takes {median}"
    return Figure(title, short_count(speed), note)


def utilisation_figures(steps: StepTable, started: Mapping[str, Any]) -> list[Figure]:
    """Show operations per second and, for known devices, their share of the peak performance."""
    work, peak = started.get("flops_per_step"), started.get("peak_flops")
    # Skipped steps have no tokens and no operations.
    trained = (steps.tokens > 0) & (steps.step_seconds > 0)
    seconds = float(np.nansum(steps.step_seconds[trained]))
    if not isinstance(work, int | float) or not seconds > 0:
        return []
    speed = work * int(trained.sum()) / seconds
    text = _flops(speed)
    if not isinstance(peak, int | float):
        return [Figure("Model FLOP/s", text, "over all processes, while training")]
    possible = float(np.nansum((steps.step_seconds * steps.world_size)[trained])) * peak
    share = work * int(trained.sum()) / possible
    return [Figure("Utilisation", percent(share), f"MFU: {text} over all processes")]


def _flops(per_second: float) -> str:
    """Format operations per second; for example, ``70.9e9`` becomes ``70.9 GFLOP/s``."""
    text = short_count(per_second)
    number = text.rstrip("kMBT")
    # Units have SI prefixes, so replace the B (billion) of a count with G.
    return f"{number} {text[len(number) :].replace('B', 'G')}FLOP/s"


def interruption_figures(goodput: Goodput) -> list[Figure]:
    """Count restarts, and changes of the world if there were any, by their causes."""
    # Restarts cost steps. The note shows the number of steps and the causes.
    ended = [
        f"{number} {cause.replace('_', ' ')}"
        for cause, number in goodput.restarts_by_cause.items()
    ]
    repeated = sum(restart.repeated_steps for restart in goodput.restarts)
    lost = f"{count(repeated)} step{'' if repeated == 1 else 's'} lost"
    note = f"{', '.join(ended)}; {lost}" if ended else "trained in one go"
    figures = [Figure("Restarts", count(len(goodput.restarts)), note)]

    # Changes of the world cost time, but no steps.
    if goodput.changes:
        changed = ", ".join(
            f"{number} × {CHANGES[cause].text}"
            for cause, number in goodput.changes_by_cause.items()
        )
        still = duration(goodput.lost_seconds["reconfiguration"])
        note = f"{changed}; training stood still for {still}"
        figures.append(Figure("Changes of the world", count(len(goodput.changes)), note))
    return figures


def time_shares(goodput: Goodput) -> tuple[Share, ...]:
    """List productive time first, then lost time by cause, the largest first, without causes of 0 s."""
    elapsed = goodput.elapsed_seconds
    if not elapsed > 0:
        return ()
    # List the most expensive cause first, because reducing it gains most.
    lost = sorted(goodput.lost_seconds.items(), key=lambda item: -item[1])
    of_all = goodput.process_seconds
    parts = [("productive", goodput.productive_seconds)]
    parts += [(cause, seconds) for cause, seconds in lost if seconds > 0]
    return tuple(
        Share(
            cause=cause,
            text=CAUSE_TEXTS[cause],
            seconds=seconds,
            ratio=seconds / elapsed,
            duration=duration(seconds),
            percent=percent(seconds / elapsed),
            process_time=duration(of_all[cause]) if of_all[cause] > 0 else "",
        )
        for cause, seconds in parts
    )


def environment_rows(processes: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Show the provenance of the newest process, as rows of a title and a text."""
    if not processes:
        return ()
    # Earlier processes may have run on other machines. The newest process describes the current state.
    entry = processes[-1]
    versions = as_mapping(entry.get("versions"))
    hardware = as_mapping(entry.get("hardware"))
    git = as_mapping(entry.get("git"))
    task = as_mapping(entry.get("task"))
    memory = hardware.get("memory_bytes")
    commit = str(git.get("commit") or "")
    gpus = ", ".join(map(str, hardware.get("gpus") or []))

    # List other versions of earlier processes, because they may have changed the last bits of results.
    earlier: dict[str, None] = {}
    for process in processes:
        for key in ("evergrad", "torch", "transformers"):
            version = as_mapping(process.get("versions")).get(key)
            if version not in (None, versions.get(key)):
                earlier[f"{key} {version}"] = None

    own = ("evergrad", "torch", "transformers", "python", "platform")
    rows = [
        ("Command", entry.get("command")),
        ("Seed", entry.get("seed")),
        *((key.capitalize(), versions.get(key)) for key in own),
        ("Earlier versions", ", ".join(earlier)),
        (
            "Files of the task",
            ", ".join(f"{name} {digest}" for name, digest in task.items()),
        ),
        ("Commit", commit + (" with changes" if git.get("has_changes") else "")),
        ("CPU", hardware.get("cpu")),
        ("Cores", hardware.get("usable_cores")),
        ("Memory", size(memory) if isinstance(memory, int) else None),
        ("Accelerators", gpus or "none"),
    ]
    # Reports are shared, and paths of a home directory contain the user's name.
    return tuple(
        (title, hide_home(str(text))) for title, text in rows if text not in (None, "")
    )


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, or else an empty one, because files may be of other versions."""
    return value if isinstance(value, Mapping) else {}
