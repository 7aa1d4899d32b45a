"""Computes a run's time accounts from its records: productive seconds, and lost seconds by cause.

The exporter reads the accounts after each record, the report after the last record of the files. Pure.
"""

import math
from array import array

from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.goodput import CAUSES, Goodput, ProcessAccount, Restart
from evergrad_trainer.observers.parts import ProcessPart

Record = RunInfo | StepRecord | EvaluationRecord | Event


class Account:
    """Time accounts of a run up to the last record: productive seconds, and lost seconds by cause.

    Goodput = time in steps that were kept / elapsed time, as in Google's ml-goodput-measurement. A step is
    kept unless training resumes from an earlier step.
    """

    def __init__(
        self,
        *,
        highest_step: int = 0,
        last_time: float | None = None,
        most_steps: int | None = None,
    ) -> None:
        """Begin after ``highest_step`` and ``last_time`` (Unix seconds), up to which the accounts of earlier
        processes of the run are complete.

        ``most_steps``: number of newest steps whose seconds are stored, at 16 bytes per step. After a restart
        from an earlier step, steps that are no longer stored stay productive. None stores all steps.
        """
        self._parts: list[ProcessPart] = []
        self._last_time = last_time
        self._elsewhere = [(1, highest_step)] if highest_step else []
        """Ranges (first step, last step) that other accounts count as productive; here they are repeated
        steps."""
        self._highest_step = highest_step
        self._takes_over = False
        self._most_steps = most_steps
        self._kept_steps = array("q")
        self._kept_seconds = array("d")
        self._waiting: list[Event | EvaluationRecord] = []
        """Records of generations of which it is not known yet whether they are new starts or continue the
        last process."""

    def add(self, record: Record) -> None:
        """Add the next record. Records must be added in the order in which they were written."""
        if isinstance(record, StepRecord):
            self.add_step(
                record.step,
                record.generation,
                record.world_size,
                record.step_seconds,
                record.time,
            )
        elif isinstance(record, RunInfo):
            # This process has become rank 0. The time since its last record is in the accounts of other
            # processes, which also counted the steps above its highest step as productive.
            if record.highest_step is not None and record.highest_step > self._highest_step:
                self._elsewhere.append((self._highest_step + 1, record.highest_step))
                self._highest_step = record.highest_step
            if record.last_time is not None:
                self._last_time = record.last_time
            self._takes_over = record.takes_over
        elif isinstance(record, EvaluationRecord):
            self._add_owned(record)
        elif record.type == EventType.START:
            # The process starts from a checkpoint or from the beginning, so newer steps are lost. Records
            # that it wrote before its start event, for example about its data, belong to it.
            mine = [one for one in self._waiting if one.generation == record.generation]
            self._waiting = [
                one for one in self._waiting if one.generation < record.generation
            ]
            self.finish()
            part = ProcessPart(record.generation, record, after=self._last_time)
            self._last_time, self._takes_over = None, False
            if part.resumed_from is not None:
                part.steps_lost_before = self._take_back(part.resumed_from)
            self._append(part)
            for one in mine:
                _give(part, one)
        elif record.type == EventType.WORLD:
            part = self._go_on(record.generation)
            self._take_back(record.step)
            part.add_world(record, takes_over=self._takes_over)
            self._takes_over = False
        else:
            if record.type == EventType.STOP:
                self._go_on(record.generation)
            self._add_owned(record)

    def add_step(
        self, step: int, generation: int, world_size: int, seconds: float, time: float
    ) -> None:
        """Add a finished step, with the same effect as ``add`` of its record."""
        part = self._parts[-1] if self._parts else None
        if part is None or generation > part.newest:
            part = self._go_on(generation)

        # A process that was frozen while the others continued may still write a step. Do not count it as
        # progress.
        is_late = generation < part.newest
        seconds = seconds if 0 < seconds < math.inf else 0.0
        part.add_step(step, world_size, seconds, time, is_late=is_late)
        if is_late:
            part.recompute += seconds
            return

        # If a step occurs again without a restart event, training went back: newer steps are lost.
        if self._kept_steps and self._kept_steps[-1] >= step:
            self._take_back(step - 1)
        if step <= self._highest_step and any(
            first <= step <= last for first, last in self._elsewhere
        ):
            # Another account counts this step as productive. The sum of all accounts must count it once.
            part.recompute += seconds
            return
        part.productive += seconds
        self._kept_steps.append(step)
        self._kept_seconds.append(seconds)
        self._highest_step = max(self._highest_step, step)
        if self._most_steps is not None and len(self._kept_steps) > 2 * self._most_steps:
            # Remove many steps at a time, because removing the front of an array copies the rest.
            number = len(self._kept_steps) - self._most_steps
            del self._kept_steps[:number], self._kept_seconds[:number]
            for one in self._parts:
                one.first_kept = max(0, one.first_kept - number)

    def finish(self) -> None:
        """Assign the waiting records to parts. Call this after the last record."""
        waiting, self._waiting = self._waiting, []
        has_started = any(part.start is not None for part in self._parts)
        # A generation that only failed is a separate process, because no other process continued its state.
        # Without any start event, count each generation as a separate process.
        own = {
            one.generation
            for one in waiting
            if isinstance(one, Event) and one.type in (EventType.FAILED, EventType.END)
        }
        for record in sorted(waiting, key=lambda one: one.generation):
            generation = record.generation
            is_own = generation in own or not has_started
            is_new = not self._parts or self._parts[-1].generation < generation
            if is_own and is_new:
                self._append(ProcessPart(generation))
            part = self._parts[-1]
            part.newest = max(part.newest, generation)
            _give(part, record)

    def seconds(self, *, only_settled: bool = False) -> dict[str, float]:
        """Return the seconds so far of each cause of CAUSES and of ``productive``; takes constant time per
        start.

        ``only_settled``: exclude the time since the last step if its cause is not known yet.
        """
        totals = dict.fromkeys(("productive", *CAUSES), 0.0)
        previous_end = None
        for part in self._parts:
            # If another account covers the time before this part, ``after`` is the last time of that account.
            previous_end = previous_end if part.after is None else part.after
            is_open = only_settled and part is self._parts[-1]
            for cause, seconds in part.seconds(previous_end, only_settled=is_open).items():
                totals[cause] += seconds
            previous_end = max(part.begin_after(previous_end), part.end)
        return totals

    def goodput(self) -> Goodput:
        """Return the accounts so far, with each process, restart and change of the world size."""
        processes: list[ProcessAccount] = []
        restarts: list[Restart] = []
        notes: list[str] = []
        previous_end = None
        for index, part in enumerate(self._parts):
            previous_end = previous_end if part.after is None else part.after
            is_last = index == len(self._parts) - 1
            now = part.result(previous_end, is_last=is_last)
            notes.extend(part.odd_clocks(previous_end))
            if processes:
                before = processes[-1]
                restart = Restart(
                    cause=before.ended,
                    detail=before.detail,
                    time=now.begin,
                    generation=now.generation,
                    resumed_from=now.resumed_from,
                    downtime_seconds=now.seconds["downtime"],
                    repeated_steps=part.steps_lost_before,
                )
                restarts.append(restart)
            processes.append(now)
            previous_end = now.end

        def total(name: str) -> float:
            return math.fsum(one.seconds[name] for one in processes)

        return Goodput(
            productive_seconds=total("productive"),
            lost_seconds={cause: total(cause) for cause in CAUSES},
            processes=tuple(processes),
            restarts=tuple(restarts),
            notes=tuple(notes),
        )

    def _go_on(self, generation: int) -> ProcessPart:
        """Return the part that trains, stops or changes its world in ``generation``: usually the last one."""
        is_known = any(part.start is not None or part.changes.all for part in self._parts)
        if not self._parts or (not is_known and generation > self._parts[-1].newest):
            # Without start events, count each generation as a separate process.
            self.finish()
            if not self._parts or generation > self._parts[-1].newest:
                # If this process took over rank 0, the accounts of other processes contain the time before.
                after = None if self._takes_over else self._last_time
                self._append(ProcessPart(generation, after=after))
                self._last_time = None
            return self._parts[-1]
        part = self._parts[-1]
        waiting = [one for one in self._waiting if one.generation <= generation]
        self._waiting = [one for one in self._waiting if one.generation > generation]
        for record in waiting:
            # This includes failures: the other ranks continued without the failed process.
            _give(part, record)
        part.newest = max(part.newest, generation)
        return part

    def _add_owned(self, record: Event | EvaluationRecord) -> None:
        """Assign a record to the part of its generation, or store it until that part exists."""
        if not self._parts or record.generation > self._parts[-1].newest:
            self._waiting.append(record)
            return
        # An older process may write a record after a newer process has begun.
        owners = [part for part in self._parts if part.generation <= record.generation]
        _give(owners[-1] if owners else self._parts[0], record)

    def _append(self, part: ProcessPart) -> None:
        part.first_kept = len(self._kept_steps)
        self._parts.append(part)

    def _take_back(self, step: int) -> int:
        """Move the seconds of the steps after ``step``, which are lost, from productive to recompute.

        Returns the number of lost steps that the last part had trained.
        """
        lost = 0
        owners = iter(reversed(self._parts))
        owner = next(owners, None)
        # From the newest step down. Each step belongs to the last part that began before its index.
        while self._kept_steps and self._kept_steps[-1] > step:
            self._kept_steps.pop()
            seconds = self._kept_seconds.pop()
            place = len(self._kept_steps)
            while owner is not None and owner.first_kept > place:
                owner.first_kept = place
                owner = next(owners, None)
            if owner is not None:
                owner.productive -= seconds
                owner.recompute += seconds
                lost += owner is self._parts[-1]
        return lost


def _give(part: ProcessPart, record: Event | EvaluationRecord) -> None:
    if isinstance(record, Event):
        part.add_event(record)
    else:
        part.add_evaluation(record)
