"""Time sums of one part of a run: one process, or all processes that passed the state from world to world.

Pure: the results depend only on the records that were added.
"""

import math
from dataclasses import dataclass, field

from evergrad_common.text import duration
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType
from evergrad_trainer.observers.events import saved_step, seconds_of
from evergrad_trainer.observers.goodput import ProcessAccount
from evergrad_trainer.observers.worlds import Changes, is_positive

_CLOCK_TOLERANCE_SECONDS = 0.001
_CLOCKS_APART_SECONDS = 1.0
"""Largest difference between the clocks of two machines that is not reported. After a change of the world,
another machine may write the records."""


@dataclass
class ProcessPart:
    """Sums over the records of one part of the run. The elapsed time minus these sums is ``other``."""

    generation: int
    start: Event | None = None
    """None if the start event is lost, or if this account continues another account."""
    after: float | None = None
    """Last time of the run before this part, if another account contains it; None: the end of the previous
    part."""
    first_kept: int = 0
    """Index of the part's first step among the kept steps."""
    steps_lost_before: int = 0
    """Number of steps of the previous part that were lost when this part began."""
    newest: int = 0
    """Newest generation that trained or changed the world in this part."""
    productive: float = 0.0
    recompute: float = 0.0
    restore: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    absent: float = 0.0
    """Seconds in which another process was rank 0; they are in that process's account."""
    num_steps: int = 0
    last_step: int | None = None
    world_size: int | None = None
    changes: Changes = field(default_factory=Changes)
    ended: str = ""
    detail: str = ""
    end: float = -math.inf
    _settled: float = -math.inf
    """Time up to which the cause of the time between steps is known. The time after it may belong to a change
    of the world."""
    _begin: float = math.inf
    _first_step_begin: float | None = None
    _claimed_before_step: float = 0.0
    _times: dict[str, float] = field(default_factory=dict)
    """Newest time of each of the run's files."""
    _backwards: float = 0.0

    def __post_init__(self) -> None:
        self.newest = self.generation
        if self.start is not None:
            # Do not add this time to ``_times``: a process may write older records before its start event.
            self.end = self.start.time
            size = self.start.fields.get("world_size")
            self.world_size = size if is_positive(size) else None

    @property
    def resumed_from(self) -> int | None:
        """Number of finished steps that the part began with; 0 for a fresh start; None if unknown."""
        if self.start is None or "resumed_from" not in self.start.fields:
            return None
        value = self.start.fields["resumed_from"]
        return value if isinstance(value, int) else 0

    def add_step(
        self, step: int, world_size: int, seconds: float, time: float, *, is_late: bool
    ) -> None:
        """Count a finished step, without its seconds, which the account adds as productive or recompute.

        ``is_late``: a process that was frozen wrote the step after its world had ended; it does not end a
        pause.
        """
        self._see("steps", time, begin=time - seconds)
        self.num_steps += 1
        if is_late:
            return
        self.last_step, begin = step, time - seconds
        self.changes.add_step(step, begin, time)
        if self._first_step_begin is None:
            self._first_step_begin = begin
            self._claimed_before_step += self.changes.seconds
            if self.world_size is None:
                self.world_size = world_size
        self._settled = time if math.isfinite(time) else self._settled

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Count an evaluation."""
        seconds = record.seconds if 0 < record.seconds < math.inf else 0.0
        self._see(
            "evaluations",
            record.time,
            begin=record.time - record.seconds,
        )
        self.evaluation += seconds
        self.changes.add_evaluation(seconds)
        self._claim_before_step(seconds)

    def add_event(self, event: Event) -> None:
        """Count an event that is neither a start nor a change of the world."""
        self._see("events", event.time, begin=event.time)
        if event.type == EventType.RESTORED:
            self.restore += seconds_of(event, "seconds")
        elif event.type in (EventType.SAVE, EventType.SAVE_FAILED):
            seconds = seconds_of(event, "blocking_seconds")
            self.checkpoint += seconds
            self._claim_before_step(seconds)
            step = saved_step(event) if event.type == EventType.SAVE else event.step
            self.changes.add_save(step, event.generation, seconds)
        elif event.type in (
            EventType.STOP,
            EventType.COMPLETE,
            EventType.FAILED,
            EventType.END,
        ):
            self._settled = event.time
            # A failure takes precedence over a stop, and an exit code is used only if there is no other
            # ending.
            fields = event.fields
            if self.ended == "failed":
                return
            if event.type == EventType.STOP:
                self.ended = str(fields.get("reason", "stop"))
            elif event.type == EventType.COMPLETE:
                self.ended = "complete"
            elif event.type == EventType.FAILED:
                text = f"{fields.get('error', 'error')}: {fields.get('message', '')}"
                self.ended, self.detail = "failed", text.rstrip(": ")
            elif not self.ended:
                self.ended = f"exit {fields.get('exit_code')}"

    def add_world(self, event: Event, *, takes_over: bool) -> None:
        """Open a change of the world, which begins at the last step or change.

        ``takes_over``: rank 0 was another process until now, which wrote the last step.
        """
        last_sign = self.end if math.isfinite(self.end) else event.time
        elsewhere_until = None
        if takes_over:
            # Another account contains the time of the previous rank 0, so it must not count here.
            elsewhere_until = event.time - seconds_of(event, "paused_seconds")
            gap = max(0.0, elsewhere_until - last_sign)
            self.absent += gap
            self._claim_before_step(gap)
        self.changes.open(event, last_sign=last_sign, elsewhere_until=elsewhere_until)
        begin = event.time if elsewhere_until is None else elsewhere_until
        self._see("events", event.time, begin=begin)
        self.newest, self._settled = event.generation, event.time
        # If one process ended or failed, the others continued, so the part has not ended.
        self.ended = self.detail = ""

    def _claim_before_step(self, seconds: float) -> None:
        """Subtract ``seconds`` from the start-up time if there is no step yet."""
        if self._first_step_begin is None:
            self._claimed_before_step += seconds

    def _see(self, file: str, time: float, *, begin: float) -> None:
        """Update begin and end of the part with the times of a record, and check if the clock went back."""
        if math.isfinite(begin):
            self._begin = min(self._begin, begin)
        if math.isfinite(time):
            self._backwards = max(self._backwards, self._times.get(file, time) - time)
            self._times[file] = time
            self.end = max(self.end, time)

    def begin_after(self, previous_end: float | None) -> float:
        """Return when the part began, in Unix seconds; the previous part ended at ``previous_end``.

        A node outlives its workers, so the process of a start event may be older than the end of the previous
        part; then the part begins at that end. If the start event itself is older, the clocks differ, and the
        start is used as it is.
        """
        if self.start is None:
            return self._begin if math.isfinite(self._begin) else 0.0
        # The start event is written after the imports, so use the start time of the process, if it is valid.
        claimed, begin = self.start.fields.get("process_start_time"), self.start.time
        if isinstance(claimed, int | float) and 0 < claimed <= begin:
            begin = float(claimed)
        if previous_end is None or self.start.time < previous_end:
            return begin
        return max(begin, previous_end)

    def seconds(
        self, previous_end: float | None, *, only_settled: bool = False
    ) -> dict[str, float]:
        """Return the seconds of each cause and of ``productive``; their sum is the elapsed time of the part.

        ``only_settled``: exclude the time since the last step, which may belong to a change of the world.
        """
        begin = self.begin_after(previous_end)
        end = max(begin, self.end)
        # Start-up is the part of the time before the first step that has no other cause.
        first, claimed = self._first_step_begin, self._claimed_before_step + self.restore
        if first is None:
            first, claimed = end, claimed + self.changes.seconds
        startup = first - begin - claimed
        seconds = {
            "productive": max(0.0, self.productive),
            "recompute": self.recompute,
            "restore": self.restore,
            "checkpoint": self.checkpoint,
            "evaluation": self.evaluation,
            "reconfiguration": max(0.0, self.changes.seconds),
            "startup": max(0.0, startup) if math.isfinite(startup) else 0.0,
        }
        if only_settled and self._first_step_begin is not None:
            end = max(begin, self._settled)
        # Durations come from a monotonic clock. If they exceed the elapsed time, the wall clock was changed.
        measured = math.fsum(seconds.values())
        seconds["other"] = max(0.0, end - begin - self.absent - measured)
        seconds["downtime"] = (
            0.0 if previous_end is None else max(0.0, begin - previous_end)
        )
        return seconds

    def result(
        self,
        previous_end: float | None,
        *,
        is_last: bool,
    ) -> ProcessAccount:
        """Return the account of the part so far."""
        begin = self.begin_after(previous_end)
        return ProcessAccount(
            generation=self.generation,
            begin=begin,
            end=max(begin, self.end),
            pid=self.start.fields.get("pid") if self.start is not None else None,
            world_size=self.world_size,
            resumed_from=self.resumed_from,
            num_steps=self.num_steps,
            last_step=self.last_step,
            ended=self.ended or ("running or killed" if is_last else "killed"),
            detail=self.detail,
            seconds=self.seconds(previous_end),
            changes=tuple(change.result() for change in self.changes.all),
        )

    def odd_clocks(self, previous_end: float | None) -> list[str]:
        """Describe clocks that went back in this part or before it, as sentences."""
        notes = []
        # In one process, a clock that goes back was changed. Between machines, the clocks only differ.
        tolerance = _CLOCKS_APART_SECONDS if self.changes.all else _CLOCK_TOLERANCE_SECONDS
        if self._backwards > tolerance:
            notes.append(
                f"the clock went back by {duration(self._backwards)} while generation "
                f"{self.generation} ran"
            )
        overlap = (
            0.0 if previous_end is None else previous_end - self.begin_after(previous_end)
        )
        if overlap > _CLOCK_TOLERANCE_SECONDS:
            notes.append(
                f"generation {self.generation} began {duration(overlap)} before the last sign of the "
                "one before: the clock went back, or both ran at once"
            )
        return notes
