"""The newest facts of a run and their rates, as the displays show them."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from evergrad_trainer.observers.events import saved_step, words_of
from evergrad_trainer.records import EvaluationRecord, Event, EventType, RunInfo, StepRecord

SHORT_WINDOW_SECONDS = 60.0
LONG_WINDOW_SECONDS = 300.0
CHANGE_SHOWN_SECONDS = 20.0
"""How long a display says who came or went."""


class Rate:
    """Rate over a moving window of real wall time: pauses between the steps count too."""

    def __init__(self, *, window_seconds: float, clock: Callable[[], float]) -> None:
        self._window = window_seconds
        self._clock = clock
        self._total = 0.0
        self._points: deque[tuple[float, float]] = deque()
        self._is_first = True

    def add(self, amount: float, *, first_seconds: float) -> None:
        """Count an ``amount`` that was finished now; ``first_seconds``: how long it took, used until there is
        a second one."""
        now = self._clock()
        if not self._points:
            self._points.append((now - first_seconds, 0.0))
        elif self._is_first:
            # The first step warms everything up; it would make the rate too low for as long as the window is.
            self._points.popleft()
            self._is_first = False
        self._total += amount
        # At most a few hundred points, however short the steps are.
        if len(self._points) > 1 and now - self._points[-2][0] < self._window / 200:
            self._points.pop()
        self._points.append((now, self._total))
        while len(self._points) > 2 and now - self._points[1][0] > self._window:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        """0 before the first amount."""
        if len(self._points) < 2:
            return 0.0
        (begun, before), (now, after) = self._points[0], self._points[-1]
        return (after - before) / (now - begun) if now > begun else 0.0


class State:
    """Newest facts of the run, which both displays show."""

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
        self.units: dict[str, str] = {}
        self._tokens = Rate(window_seconds=SHORT_WINDOW_SECONDS, clock=clock)
        self._steps = Rate(window_seconds=LONG_WINDOW_SECONDS, clock=clock)

    def start(self, info: RunInfo) -> None:
        self.name, self.total_steps, self.step = info.name, info.total_steps, info.start_step
        self.num_processes = info.world_size
        self.units = {name: one.get("unit", "") for name, one in info.metrics.items()}
        self.saved_step = None if info.takes_over else info.start_step or None

    def finish_step(self, record: StepRecord) -> None:
        self.step, self.num_processes = record.step, record.world_size
        # A step without an update has no loss or metric worth showing: the last ones stay.
        self.loss = self.loss if record.skipped else record.loss
        self.metrics = self.metrics if record.skipped else record.metrics
        self._tokens.add(record.tokens, first_seconds=record.step_seconds)
        self._steps.add(1, first_seconds=record.step_seconds)

    def finish_evaluation(self, record: EvaluationRecord) -> None:
        self.activity = ""
        self.evaluations[record.name] = record.loss
        # A loss that is no number would be the best one for ever.
        if math.isfinite(record.loss):
            self.best_evaluations[record.name] = min(
                record.loss, self.best_evaluations.get(record.name, math.inf)
            )

    def see(self, event: Event) -> None:
        if event.type == EventType.SAVE:
            self.saved_step = saved_step(event)
        elif event.type == EventType.EXTENDED:
            self.total_steps = int(event.fields.get("to_steps", self.total_steps))
        elif event.type == EventType.WORLD:
            self.num_processes = int(event.fields.get("world_size", self.num_processes))
            self._change, self._changed = words_of(event), self._clock()
            self.activity = ""

    @property
    def recent_change(self) -> str:
        """Who came or went a moment ago, in the coordinator's words; empty otherwise."""
        return self._change if self._clock() - self._changed < CHANGE_SHOWN_SECONDS else ""

    @property
    def elapsed_seconds(self) -> float:
        """Since this process's displays were made."""
        return self._clock() - self._begun

    @property
    def tokens_per_second(self) -> float:
        return self._tokens.per_second

    @property
    def remaining_seconds(self) -> float:
        """Not a number before the first step."""
        rate = self._steps.per_second
        return max(0, self.total_steps - self.step) / rate if rate else math.nan
