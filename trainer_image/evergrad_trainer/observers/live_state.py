"""The newest facts of a run and their rates, for the displays."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from evergrad_trainer.base.records import (
    TOKENS,
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.events import saved_step, words_of
from evergrad_trainer.observers.utilisation import utilisation

SHORT_WINDOW_SECONDS = 60.0
LONG_WINDOW_SECONDS = 300.0
CHANGE_SHOWN_SECONDS = 20.0
"""How long a display shows a change of the world."""


class Rate:
    """Rate over a moving window of wall time, which includes pauses between steps."""

    def __init__(
        self,
        *,
        window_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._window = window_seconds
        self._clock = clock
        self._total = 0.0
        self._points: deque[tuple[float, float]] = deque()
        self._is_first = True

    def add(self, amount: float, *, first_seconds: float) -> None:
        """Add an ``amount`` that was finished now. ``first_seconds``: its duration, used until a second
        amount is added."""
        now = self._clock()
        if not self._points:
            self._points.append((now - first_seconds, 0.0))
        elif self._is_first:
            # Drop the first step, which includes warm-up and would lower the rate for the whole window.
            self._points.popleft()
            self._is_first = False
        self._total += amount
        # Keep at most a few hundred points, even if steps are very short.
        if len(self._points) > 1 and now - self._points[-2][0] < self._window / 200:
            self._points.pop()
        self._points.append((now, self._total))
        while len(self._points) > 2 and now - self._points[1][0] > self._window:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        """Amount per second over the window; 0 before the first amount."""
        if len(self._points) < 2:
            return 0.0
        begun, before = self._points[0]
        now, after = self._points[-1]
        # Two amounts with the same time, from a coarse clock, have no rate.
        if now <= begun:
            return 0.0
        return (after - before) / (now - begun)


class LiveState:
    """The newest facts of the run, for both displays."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self.name = ""
        self.total_steps = 0
        self.step = 0
        self.loss = math.nan
        self.saved_step: int | None = None
        self.activity = ""
        self.num_processes = 0
        self._change = ""
        self._changed = -math.inf
        self.evaluations: dict[str, float] = {}
        self.best_evaluations: dict[str, float] = {}
        self.metrics: Mapping[str, float] = {}
        self.utilisation: float | None = None
        """Model FLOPs utilisation of the newest step; None if it is unknown."""
        self._info: RunInfo | None = None
        self.units: dict[str, str] = {}
        self.unit_read = TOKENS
        self._tokens = Rate(window_seconds=SHORT_WINDOW_SECONDS, clock=clock)
        self._steps = Rate(window_seconds=LONG_WINDOW_SECONDS, clock=clock)

    def start(self, info: RunInfo) -> None:
        """Update the facts when a run starts or resumes."""
        self._info = info
        self.name = info.name
        self.total_steps = info.total_steps
        self.step = info.start_step
        self.num_processes = info.world_size
        self.unit_read = info.unit_read
        self.units = {name: one.get("unit", "") for name, one in info.metrics.items()}
        # A process that starts after step 0 has read a checkpoint, unless it takes over from another rank 0.
        self.saved_step = None
        if info.start_step and not info.takes_over:
            self.saved_step = info.start_step

    def finish_step(self, record: StepRecord) -> None:
        """Update the facts with a finished step."""
        self.step = record.step
        self.num_processes = record.world_size
        # A skipped step has no valid loss or metrics, so keep the last values.
        if not record.skipped:
            self.loss = record.loss
            self.metrics = record.metrics
            if self._info is not None:
                self.utilisation = utilisation(self._info, record)
        self._tokens.add(record.tokens, first_seconds=record.step_seconds)
        self._steps.add(1, first_seconds=record.step_seconds)

    def finish_evaluation(self, record: EvaluationRecord) -> None:
        """Update the facts with the loss of one set."""
        self.activity = ""
        name, loss = record.name, record.loss
        self.evaluations[name] = loss
        # NaN would stay the best loss forever.
        if math.isfinite(loss):
            best = self.best_evaluations.get(name, math.inf)
            self.best_evaluations[name] = min(loss, best)

    def see(self, event: Event) -> None:
        """Update the facts with an event."""
        if event.type == EventType.SAVE:
            self.saved_step = saved_step(event)
        elif event.type == EventType.EXTENDED:
            self.total_steps = int(event.fields.get("to_steps", self.total_steps))
        elif event.type == EventType.WORLD:
            self.num_processes = int(event.fields.get("world_size", self.num_processes))
            self._change = words_of(event)
            self._changed = self._clock()
            self.activity = ""

    @property
    def recent_change(self) -> str:
        """The coordinator's description of a change of the world in the last 20 s; empty otherwise."""
        age = self._clock() - self._changed
        return self._change if age < CHANGE_SHOWN_SECONDS else ""

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the displays of this process were created."""
        return self._clock() - self._begun

    @property
    def tokens_per_second(self) -> float:
        return self._tokens.per_second

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the last step at the current rate; NaN before the first step."""
        rate = self._steps.per_second
        return max(0, self.total_steps - self.step) / rate if rate else math.nan
