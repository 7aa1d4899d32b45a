"""The progress bar of a terminal: one line that is redrawn, with permanent messages above it."""

import math
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from evergrad_common.causes import describe_ending
from evergrad_common.text import compact, count, duration, real, short_count
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import describe_event
from evergrad_trainer.observers.live_state import LiveState

_REDRAW_SECONDS = 0.2
_SHORTEST_BAR = 8
_LONGEST_BAR = 40


def render_line(state: LiveState, width: int, *, is_unicode: bool = True) -> Text:
    """Render the bar in ``width`` columns. If parts do not fit, the least important parts are left out."""
    parts = _parts(state)
    # Remove the least important parts on a narrow terminal; the step always stays.
    while len(parts) > 1 and _needed(parts) > width:
        parts.remove(min(parts, key=lambda part: part[0]))
    space = width - _needed(parts, bar=0)
    line = Text(no_wrap=True, overflow="crop")
    # Put the bar after the run's name, in the space that the texts leave.
    for index, (_, text, style) in enumerate(parts):
        if index == 1 and space >= _SHORTEST_BAR:
            full, half, empty = ("━", "╸", "━") if is_unicode else ("#", "-", "-")
            length = min(space, _LONGEST_BAR)
            share = min(1.0, state.step / state.total_steps) if state.total_steps else 0.0
            # Use half characters, so that the bar also moves visibly in long runs.
            done, has_half = divmod(math.floor(share * length * 2), 2)
            line.append(full * done + half * has_half, "green")
            line.append(empty * (length - done - has_half), "bright_black").append("  ")
        line.append(text, style).append("" if index == len(parts) - 1 else "  ")
    return line


def _parts(state: LiveState) -> list[tuple[int, str, str]]:
    """List (importance, text, style) of each part, from left to right."""
    share = state.step / state.total_steps if state.total_steps else 0.0
    is_over = state.step >= state.total_steps > 0
    # Show the elapsed time of a finished run instead of the remaining time.
    remaining = (
        f"in {duration(state.elapsed_seconds)}"
        if is_over
        else f"ETA {duration(state.remaining_seconds)}"
    )
    parts = [
        (9, state.name, "bold"),
        (10, f"{count(state.step)}/{count(state.total_steps)}", ""),
        (3, f"{math.floor(share * 100)}%", "dim"),
        (8, f"loss {real(state.loss)}", "bold cyan"),
        (6, f"{short_count(state.tokens_per_second or math.nan)} {state.unit_read}/s", ""),
        (7, remaining, "green"),
    ]
    if state.utilisation is not None:
        parts.append((1, f"{state.utilisation:.0%} MFU", "dim"))
    # Do not show the number of processes if it is 1, unless it has just changed.
    if state.num_processes > 1 or state.recent_change:
        parts.append(
            (
                2,
                f"{count(state.num_processes)} process{'' if state.num_processes == 1 else 'es'}",
                "dim",
            )
        )
    if state.recent_change:
        parts.append((6, state.recent_change, "yellow"))
    if state.saved_step is not None:
        parts.append((5, f"saved {count(state.saved_step)}", "dim"))
    parts.extend(
        (1, f"{name} {compact(value)} {state.units.get(name, '')}".rstrip(), "cyan")
        for name, value in state.metrics.items()
    )
    parts.extend(
        (4, f"{name} {real(loss)}", "magenta") for name, loss in state.evaluations.items()
    )
    if state.activity:
        parts.append((9, state.activity, "yellow"))
    return parts


def _describe(event: Event) -> str | None:
    """Describe an event as a sentence; events without a sentence are shown as in the log."""
    fields = event.fields
    if event.type == EventType.STOP:
        reason = describe_ending(str(fields.get("reason") or "")) or "stopped"
        saved = "its state is saved" if fields.get("saved") else "its state is not saved"
        return f"stopped at step {count(event.step)}: {reason}; {saved}"
    if event.type == EventType.COMPLETE:
        return f"complete: all {count(event.step)} steps are trained"
    if event.type == EventType.RESTORED:
        return f"restored {fields.get('checkpoint')}, in {fields.get('seconds')} s"
    if event.type == EventType.WARNING:
        return f"warning: {fields.get('message')}"
    if event.type == EventType.FAILED:
        return f"failed at step {count(event.step)}: {fields.get('message')}"
    if event.type == EventType.FALLBACK:
        return f"{fields.get('checkpoint')} was passed over: {fields.get('reason')}"
    if event.type == EventType.SAVE_FAILED:
        return f"the save of step {count(event.step)} failed: {fields.get('reason')}"
    return describe_event(event)


def _needed(parts: list[tuple[int, str, str]], bar: int = _SHORTEST_BAR) -> int:
    return sum(len(text) for _, text, _ in parts) + 2 * len(parts) + bar


class _Line:
    """A line that rich renders at the terminal's current width."""

    def __init__(self, state: LiveState) -> None:
        self._state = state

    def __rich_console__(
        self,
        console: Console,
        options: ConsoleOptions,
    ) -> RenderResult:
        yield render_line(
            self._state,
            options.max_width,
            is_unicode=not options.ascii_only,
        )


class ProgressBar(BaseObserver):
    """Observer that draws at most five times a second, in the calling thread, so that no additional thread
    competes with the training."""

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._drawn = -math.inf
        self._state = LiveState(clock)
        self._console = Console(
            file=stream,
            highlight=False,
            soft_wrap=False,
        )
        self._live = Live(
            _Line(self._state), console=self._console, auto_refresh=False, transient=False
        )

    def run_start(self, info: RunInfo) -> None:
        self._state.start(info)
        # A new rank 0 continues below the lines of the previous rank 0.
        if not info.takes_over:
            facts = [
                f"{short_count(info.parameters)} parameters",
                f"{count(info.total_steps)} steps of {count(info.tokens_per_step)} {info.unit_read}",
                f"{info.world_size} process{'es' if info.world_size > 1 else ''}",
                info.precision,
                info.parallelism,
            ]
            self._print(
                Text.assemble((info.name, "bold"), f"  {info.model}, {', '.join(facts)}")
            )
            self._print(Text.assemble(("run directory  ", "dim"), info.run_directory))
            if info.metrics_address:
                self._print(Text.assemble(("metrics        ", "dim"), info.metrics_address))
        self._live.start(refresh=True)

    def step_end(self, record: StepRecord) -> None:
        self._state.finish_step(record)
        self._draw(is_last=record.step >= self._state.total_steps)

    def evaluation_progress(self, name: str, done: int, total: int) -> None:
        self._state.activity = f"evaluating {name} {done}/{total}"
        self._draw()

    def evaluation_end(self, record: EvaluationRecord) -> None:
        state = self._state
        # Compare before the state is updated, because otherwise the loss is compared with itself.
        better = math.isfinite(record.loss) and record.loss < state.best_evaluations.get(
            record.name, math.inf
        )
        state.finish_evaluation(record)
        self._print(
            Text.assemble(
                (f"step {count(record.step)}  ", "dim"),
                (record.name, "magenta"),
                f"  loss {real(record.loss)}  perplexity {compact(record.perplexity)}",
                ("  best so far" if better else "", "green"),
            )
        )
        self._draw(is_last=True)

    def event(self, event: Event) -> None:
        self._state.see(event)
        line = _describe(event)
        # The bar shows saves. A line for each save would scroll other messages away.
        if line is not None and event.type != EventType.SAVE:
            style = "yellow" if event.type in _ALARMING else "dim"
            self._print(Text(line, "bold red" if event.type == EventType.FAILED else style))
        self._draw(is_last=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal."""
        self._live.stop()

    def _draw(self, *, is_last: bool = False) -> None:
        now = self._clock()
        if self._live.is_started and (is_last or now - self._drawn >= _REDRAW_SECONDS):
            self._drawn = now
            self._live.refresh()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


_ALARMING = frozenset(
    {
        EventType.WARNING,
        EventType.SAVE_FAILED,
        EventType.FALLBACK,
        EventType.WORLD,
        EventType.SKIPPED,
        EventType.NON_FINITE,
    }
)
