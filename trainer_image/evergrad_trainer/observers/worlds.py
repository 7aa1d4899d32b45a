"""Computes the duration of the pause for each change of a run's world. Pure."""

import math
from dataclasses import dataclass, field

from evergrad_common.causes import read_change
from evergrad_trainer.base.records import Event
from evergrad_trainer.observers.events import words_of
from evergrad_trainer.observers.goodput import WorldChange


@dataclass
class OpenChange:
    """A change whose duration may still grow, and from which saves and evaluations may still subtract time.

    It lasts from the last step or change before it to the first step after it. If several changes follow each
    other without a step between them, each change has the time up to its own event, and the last change also
    has the rest.
    """

    world: Event
    begin: float
    end: float
    claimed: float
    """Seconds of evaluations and saves of older worlds."""
    claimed_later: float = 0.0
    """Seconds of evaluations and saves of this world before its first step; they count only after a step."""
    has_step: bool = False

    def close(self, step_begin: float) -> None:
        """End the change at the begin of the first step of its world."""
        self.has_step = True
        # If the step has no time, the change ends at its own event.
        if math.isfinite(step_begin):
            self.end = max(self.end, step_begin)

    def claim_save(self, generation: int, seconds: float) -> None:
        """Subtract ``seconds`` for a save of the last step before the change, reported by ``generation``."""
        if generation < self.world.generation:
            self.claimed += seconds
        else:
            self.claimed_later += seconds

    @property
    def seconds(self) -> float:
        """Time lost to the change alone."""
        claimed = self.claimed + (self.claimed_later if self.has_step else 0.0)
        seconds = max(0.0, self.end - self.begin - claimed)
        return seconds if math.isfinite(seconds) else 0.0

    def result(self) -> WorldChange:
        """Return the change so far."""
        fields = self.world.fields
        size, from_size = fields.get("world_size"), fields.get("from_world_size")
        return WorldChange(
            time=self.world.time,
            generation=self.world.generation,
            step=self.world.step,
            world_size=size if is_positive(size) else None,
            from_world_size=from_size if is_positive(from_size) else None,
            cause=read_change(fields.get("cause")),
            detail=words_of(self.world),
            seconds=self.seconds,
        )


@dataclass
class Changes:
    """The changes of one part of the run, without the time of saves and evaluations."""

    all: list[OpenChange] = field(default_factory=list)
    seconds: float = 0.0
    """Sum of the seconds of all changes."""
    _step: int | None = None
    _step_time: float | None = None
    """End of the newest step."""
    _saved: float = 0.0
    """Seconds that saves of the newest step have blocked so far."""
    _evaluated: float = 0.0
    """Seconds of evaluations since the newest step or change."""
    _saving: dict[int, OpenChange] = field(default_factory=dict)
    """Maps a step to the change right after it, because saves of that step are reported later."""

    @property
    def _open(self) -> OpenChange | None:
        """The newest change if no step has followed it yet, or else None."""
        return self.all[-1] if self.all and not self.all[-1].has_step else None

    def add_step(self, step: int, begin: float, time: float) -> None:
        """End the open change when a step begins."""
        if change := self._open:
            self.seconds -= change.seconds
            change.close(begin)
            self.seconds += change.seconds
        # If the step is trained again, later reports of a save refer to the new step.
        self._saving.pop(step, None)
        self._step, self._saved, self._evaluated = step, 0.0, 0.0
        self._step_time = time if math.isfinite(time) else self._step_time

    def add_evaluation(self, seconds: float) -> None:
        """Subtract the seconds of an evaluation from the change in which it happened."""
        self._evaluated += seconds
        if change := self._open:
            # It counts after the next step. If another change comes first, it belongs to that change.
            change.claimed_later += seconds

    def add_save(self, step: int, generation: int, seconds: float) -> None:
        """Subtract the blocking seconds of a save of ``step`` from the change right after that step."""
        if step == self._step:
            self._saved += seconds
        if change := self._saving.get(step):
            self.seconds -= change.seconds
            change.claim_save(generation, seconds)
            self.seconds += change.seconds

    def open(
        self,
        world: Event,
        *,
        last_sign: float,
        elsewhere_until: float | None,
    ) -> None:
        """Begin a change, at the last step or change.

        ``last_sign``: time of the part's last record, used if there was no step before. ``elsewhere_until``:
        if rank 0 was another process, the time at which its last step ended.
        """
        begin, claimed, step = last_sign, 0.0, None
        if elsewhere_until is not None:
            begin = elsewhere_until
        elif before := self._open:
            begin, claimed = before.world.time, self._evaluated
        elif self._step_time is not None:
            begin, claimed, step = (
                self._step_time,
                self._evaluated + self._saved,
                self._step,
            )
        # Clocks of two machines differ, so the last step may have a later time than this event.
        change = OpenChange(
            world,
            min(begin, world.time),
            world.time,
            claimed,
        )
        self.all.append(change)
        self.seconds += change.seconds
        if step is not None:
            self._saving[step] = change
        self._saved = self._evaluated = 0.0


def is_positive(value: object) -> bool:
    """Whether ``value`` is a valid number of processes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
