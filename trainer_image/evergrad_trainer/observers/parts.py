"""One process of a run, or all those that handed its state on from world to world, while it is accounted for.

Pure: a part takes records and answers from what it has taken.
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
"""Largest difference of two machines' clocks that is not reported: in another world another one writes."""


@dataclass
class ProcessPart:
    """Sums over the records of one part of the run. Its elapsed time less these sums is ``other``."""

    generation: int
    start: Event | None = None
    """None where the start event is lost, or where this account takes over from another one."""
    after: float | None = None
    """Last sign of the run before, where another account has it; None: it is the end of the part before."""
    first_kept: int = 0
    """Place of its first step among the kept ones."""
    steps_lost_before: int = 0
    """Steps of the part before that were lost when this one began."""
    newest: int = 0
    """Newest generation that has trained or changed the world in this part."""
    productive: float = 0.0
    recompute: float = 0.0
    restore: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    absent: float = 0.0
    """Seconds in which rank 0 was elsewhere: they are in another account."""
    num_steps: int = 0
    last_step: int | None = None
    world_size: int | None = None
    changes: Changes = field(default_factory=Changes)
    ended: str = ""
    detail: str = ""
    end: float = -math.inf
    _settled: float = -math.inf
    """Up to here the use of the time between steps is known: a change of the world may claim what follows."""
    _begin: float = math.inf
    _first_step_begin: float | None = None
    _claimed_before_step: float = 0.0
    _times: dict[str, float] = field(default_factory=dict)
    """Newest time of each of the run's files."""
    _backwards: float = 0.0

    def __post_init__(self) -> None:
        self.newest = self.generation
        if self.start is not None:
            # Not among the times of its file: what a process writes before its start stands before it.
            self.end = self.start.time
            size = self.start.fields.get("world_size")
            self.world_size = size if is_positive(size) else None

    @property
    def resumed_from(self) -> int | None:
        """Finished steps it began with; 0 for a fresh start; None where nobody knows."""
        if self.start is None or "resumed_from" not in self.start.fields:
            return None
        value = self.start.fields["resumed_from"]
        return value if isinstance(value, int) else 0

    def add_step(
        self, step: int, world_size: int, seconds: float, time: float, *, is_late: bool
    ) -> None:
        """Count a finished step but for its seconds, which are productive or not.

        ``is_late``: a process that was frozen wrote it after its world was gone; it ends no pause.
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
        """Count an event, but for starts and changes of the world."""
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
            # The first ending counts, and an error's name and message above all: a failure after a stop is
            # the ending, and an exit code alone says least.
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
        """Open a change of the world: training stands still since the last step or change.

        ``takes_over``: rank 0 comes from elsewhere, where the last step was.
        """
        last_sign = self.end if math.isfinite(self.end) else event.time
        elsewhere_until = None
        if takes_over:
            # The time elsewhere is in another account, and must not be in this part's too.
            elsewhere_until = event.time - seconds_of(event, "paused_seconds")
            gap = max(0.0, elsewhere_until - last_sign)
            self.absent += gap
            self._claim_before_step(gap)
        self.changes.open(event, last_sign=last_sign, elsewhere_until=elsewhere_until)
        begin = event.time if elsewhere_until is None else elsewhere_until
        self._see("events", event.time, begin=begin)
        self.newest, self._settled = event.generation, event.time
        # One of its processes may have ended or failed; the others went on.
        self.ended = self.detail = ""

    def _claim_before_step(self, seconds: float) -> None:
        """Take ``seconds`` out of the start-up, before the first step."""
        if self._first_step_begin is None:
            self._claimed_before_step += seconds

    def _see(self, file: str, time: float, *, begin: float) -> None:
        """Take a sign of life: it moves the end, and may show that a clock went back."""
        if math.isfinite(begin):
            self._begin = min(self._begin, begin)
        if math.isfinite(time):
            self._backwards = max(self._backwards, self._times.get(file, time) - time)
            self._times[file] = time
            self.end = max(self.end, time)

    def begin_after(self, previous_end: float | None) -> float:
        """Return when the part began, in Unix seconds, where the part before ended at ``previous_end``.

        A node outlives its workers: a start may name a process that was there before the last sign of the
        part before. Where both were there at once, clocks differ, and the start is taken as it is.
        """
        if self.start is None:
            return self._begin if math.isfinite(self._begin) else 0.0
        # The start event is written late, after imports: the process says when it began.
        claimed, begin = self.start.fields.get("process_start_time"), self.start.time
        if isinstance(claimed, int | float) and 0 < claimed <= begin:
            begin = float(claimed)
        if previous_end is None or self.start.time < previous_end:
            return begin
        return max(begin, previous_end)

    def seconds(
        self, previous_end: float | None, *, only_settled: bool = False
    ) -> dict[str, float]:
        """Seconds of every cause, and ``productive``; they sum to the part's share of the time.

        ``only_settled``: without the time since the last step that a change of the world may still claim.
        """
        begin = self.begin_after(previous_end)
        end = max(begin, self.end)
        # Start-up is what nothing else claims of the time before the first step.
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
        # Durations come from a clock that never goes back. Where they exceed the wall time, the wall clock
        # was set.
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
        """Return the part's account as it is known now."""
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
        # Within one process a clock that goes back was set; between two machines it is only another clock.
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
