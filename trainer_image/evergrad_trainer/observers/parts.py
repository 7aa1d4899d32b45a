"""One process of a run, or all those that handed its state on from world to world, while it is accounted for.

Pure: a part takes records and answers from what it has taken.
"""

import math
from dataclasses import dataclass, field

from evergrad_coordinator.text import duration
from evergrad_trainer.observers.events import saved_step, seconds_of
from evergrad_trainer.observers.goodput import ProcessAccount
from evergrad_trainer.observers.worlds import OpenChange, is_positive
from evergrad_trainer.records import EvaluationRecord, Event, EventType

_CLOCK_TOLERANCE_SECONDS = 0.001
_CLOCKS_APART_SECONDS = 1.0
"""Largest difference of two machines' clocks that is not reported: in another world another one writes."""


@dataclass
class Part:
    """Sums over the records of one part of the run. Its elapsed time less these sums is ``other``."""

    generation: int
    start: Event | None = None
    """None where the start event is lost, or where this account takes over from another one."""
    after: float | None = None
    """Last sign of the run before, where another account has it; None: the part before knows it."""
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
    reconfiguration: float = 0.0
    absent: float = 0.0
    """Seconds in which rank 0 was elsewhere: they are in another account."""
    num_steps: int = 0
    last_step: int | None = None
    world_size: int | None = None
    changes: list[OpenChange] = field(default_factory=list)
    ended: str = ""
    detail: str = ""
    end: float = -math.inf
    _settled: float = -math.inf
    """Up to here it is known what the time between steps was for: a change of the world claims what follows."""
    _begin: float = math.inf
    _first_step_begin: float | None = None
    _claimed_before_step: float = 0.0
    _step_time: float | None = None
    """End of the newest step."""
    _saved: float = 0.0
    """Seconds that saves of the newest step have blocked so far."""
    _evaluated: float = 0.0
    """Seconds of evaluations since the newest step or change."""
    _saving: dict[int, OpenChange] = field(default_factory=dict)
    """By step, the change that came right after it: saves of that step are reported later."""
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
        if self.changes and not self.changes[-1].has_step:
            self._move(self.changes[-1]).close(begin)
            self.reconfiguration += self.changes[-1].seconds
        if self._first_step_begin is None:
            self._first_step_begin = begin
            self._claimed_before_step += self.reconfiguration
            self.world_size = world_size if self.world_size is None else self.world_size
        # Trained again: a save that is reported from now on is of this one.
        self._saving.pop(step, None)
        if math.isfinite(time):
            self._step_time = self._settled = time
        self._saved = self._evaluated = 0.0

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Count an evaluation."""
        seconds = record.seconds if 0 < record.seconds < math.inf else 0.0
        self._see("evaluations", record.time, begin=record.time - record.seconds)
        self.evaluation += seconds
        self._evaluated += seconds
        self._claim_before_step(seconds)
        if self.changes and not self.changes[-1].has_step:
            # It counts once a step has come; before another change it belongs to that one.
            self.changes[-1].claimed_later += seconds

    def add_event(self, event: Event) -> None:
        """Count an event, but for starts and changes of the world."""
        self._see("events", event.time, begin=event.time)
        if event.type == EventType.RESTORED:
            self.restore += seconds_of(event, "seconds")
        elif event.type in (EventType.SAVE, EventType.SAVE_FAILED):
            self._add_save(event)
        self._add_ending(event)

    def add_world(self, event: Event, *, takes_over: bool) -> None:
        """Open a change of the world: training stands still since the last step or change.

        ``takes_over``: rank 0 comes from elsewhere, where the last step was.
        """
        before = self.changes[-1] if self.changes else None
        claimed, step = 0.0, None
        if takes_over:
            begin = event.time - seconds_of(event, "paused_seconds")
            gap = max(0.0, begin - self.end) if math.isfinite(self.end) else 0.0
            self.absent += gap
            self._claim_before_step(gap)
        elif before is not None and not before.has_step:
            begin, claimed = before.world.time, self._evaluated
        elif self._step_time is not None:
            begin, claimed, step = (
                self._step_time,
                self._evaluated + self._saved,
                self.last_step,
            )
        else:
            begin = self.end if math.isfinite(self.end) else event.time
        self._see("events", event.time, begin=begin)
        # Clocks of two machines: the last step may have been written after this event.
        change = OpenChange(event, min(begin, event.time), event.time, claimed)
        self.changes.append(change)
        self.reconfiguration += change.seconds
        if step is not None:
            self._saving[step] = change
        self.newest, self._saved, self._evaluated = event.generation, 0.0, 0.0
        self._settled = event.time
        # One of its processes may have ended or failed; the others went on.
        self.ended = self.detail = ""

    def _add_save(self, event: Event) -> None:
        seconds = seconds_of(event, "blocking_seconds")
        self.checkpoint += seconds
        self._claim_before_step(seconds)
        step = saved_step(event) if event.type == EventType.SAVE else event.step
        if step == self.last_step:
            self._saved += seconds
        if change := self._saving.get(step):
            self._move(change).claim_save(event.generation, seconds)
            self.reconfiguration += change.seconds

    def _move(self, change: OpenChange) -> OpenChange:
        """Take a change out of the sum: its seconds are about to differ."""
        self.reconfiguration -= change.seconds
        return change

    def _add_ending(self, event: Event) -> None:
        """Note how a process ends; what came first counts, and an error's name and message above all."""
        fields = event.fields
        if event.type in (EventType.STOP, EventType.COMPLETE, EventType.FAILED, EventType.END):
            self._settled = event.time
        if self.ended == "failed":
            return
        if event.type == EventType.STOP:
            self.ended = str(fields.get("reason", "stop"))
        elif event.type == EventType.COMPLETE:
            self.ended = "complete"
        elif event.type == EventType.FAILED:
            text = f"{fields.get('error', 'error')}: {fields.get('message', '')}"
            self.ended, self.detail = "failed", text.rstrip(": ")
        elif event.type == EventType.END and not self.ended:
            self.ended = f"exit {fields.get('exit_code')}"

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
        """When the part began, in Unix seconds, where the part before ended at ``previous_end``.

        A node outlives its workers: a start may name a process that was there before the last sign of the
        part before. Where both were there at once, clocks differ, and the start is taken as it is.
        """
        if self.start is None:
            return self._begin if math.isfinite(self._begin) else 0.0
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
        first, claimed = self._first_step_begin, self._claimed_before_step + self.restore
        if first is None:
            first, claimed = end, claimed + self.reconfiguration
        startup = first - begin - claimed
        seconds = {
            "productive": max(0.0, self.productive),
            "recompute": self.recompute,
            "restore": self.restore,
            "checkpoint": self.checkpoint,
            "evaluation": self.evaluation,
            "reconfiguration": max(0.0, self.reconfiguration),
            "startup": max(0.0, startup) if math.isfinite(startup) else 0.0,
        }
        if only_settled and self._first_step_begin is not None:
            end = max(begin, self._settled)
        # Durations come from a clock that never goes back. Where they exceed the wall time, the wall clock
        # was set.
        measured = math.fsum(seconds.values())
        seconds["other"] = max(0.0, end - begin - self.absent - measured)
        seconds["downtime"] = 0.0 if previous_end is None else max(0.0, begin - previous_end)
        return seconds

    def result(self, previous_end: float | None, *, is_last: bool) -> ProcessAccount:
        """The part's account as it is known now."""
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
            changes=tuple(change.result() for change in self.changes),
        )

    def odd_clocks(self, previous_end: float | None) -> list[str]:
        """Clocks that went back in this part or before it, as sentences."""
        notes = []
        tolerance = _CLOCKS_APART_SECONDS if self.changes else _CLOCK_TOLERANCE_SECONDS
        if self._backwards > tolerance:
            notes.append(
                f"the clock went back by {duration(self._backwards)} while generation "
                f"{self.generation} ran"
            )
        overlap = 0.0 if previous_end is None else previous_end - self.begin_after(previous_end)
        if overlap > _CLOCK_TOLERANCE_SECONDS:
            notes.append(
                f"generation {self.generation} began {duration(overlap)} before the last sign of the "
                "one before: the clock went back, or both ran at once"
            )
        return notes
