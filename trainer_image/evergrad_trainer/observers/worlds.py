"""Changes of a run's world while they are accounted for: how long training stood still for each. Pure."""

import math
from dataclasses import dataclass, field

from evergrad_common.causes import read_change
from evergrad_trainer.base.records import Event
from evergrad_trainer.observers.events import words_of
from evergrad_trainer.observers.goodput import WorldChange


@dataclass
class OpenChange:
    """A change whose time may still grow, and of which saves and evaluations may still claim a part.

    It lasts from the last step before it, or from the change before it, to the first step after it. Where
    several changes follow each other without a step in between, each has the time up to its own event, and
    the last one has the rest too.
    """

    world: Event
    begin: float
    end: float
    claimed: float
    """Seconds that evaluations and saves of older worlds claim."""
    claimed_later: float = 0.0
    """Seconds that this world itself claims before its first step; they count where a step came."""
    has_step: bool = False

    def close(self, step_begin: float) -> None:
        """End the change where the first step of its world begins."""
        self.has_step = True
        # A row without a time ends the change where its event was.
        if math.isfinite(step_begin):
            self.end = max(self.end, step_begin)

    def claim_save(self, generation: int, seconds: float) -> None:
        """Take ``seconds`` for a save of the last step before the change, reported by ``generation``."""
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
        """Return the change as it is known now."""
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
    """The changes of one part of the run, and what saves and evaluations claim of their time."""

    all: list[OpenChange] = field(default_factory=list)
    seconds: float = 0.0
    """Sum over all of them, kept up to date."""
    _step: int | None = None
    _step_time: float | None = None
    """End of the newest step."""
    _saved: float = 0.0
    """Seconds that saves of the newest step have blocked so far."""
    _evaluated: float = 0.0
    """Seconds of evaluations since the newest step or change."""
    _saving: dict[int, OpenChange] = field(default_factory=dict)
    """By step, the change that came right after it: saves of that step are reported later."""

    @property
    def _open(self) -> OpenChange | None:
        """The change after which no step has come yet."""
        return self.all[-1] if self.all and not self.all[-1].has_step else None

    def add_step(self, step: int, begin: float, time: float) -> None:
        """End the open change where a step begins."""
        if change := self._open:
            self.seconds -= change.seconds
            change.close(begin)
            self.seconds += change.seconds
        # Trained again: a save that is reported from now on is of this one.
        self._saving.pop(step, None)
        self._step, self._saved, self._evaluated = step, 0.0, 0.0
        self._step_time = time if math.isfinite(time) else self._step_time

    def add_evaluation(self, seconds: float) -> None:
        """Take an evaluation's seconds out of the change that it is in."""
        self._evaluated += seconds
        if change := self._open:
            # It counts once a step has come; where another change comes, it belongs to that one.
            change.claimed_later += seconds

    def add_save(self, step: int, generation: int, seconds: float) -> None:
        """Take the seconds that a save of ``step`` blocked out of the change that came right after it."""
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
        """Begin a change: training stands still since the last step or change.

        ``last_sign``: of the part, where there was no step before. ``elsewhere_until``: rank 0 comes from
        elsewhere, where the last step ended then.
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
        # Clocks of two machines: the last step may have been written after this event.
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
    """Whether a field holds a number of processes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
