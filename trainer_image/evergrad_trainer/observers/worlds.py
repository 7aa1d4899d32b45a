"""One change of a run's world while it is accounted for: how long training stood still for it. Pure."""

import math
from dataclasses import dataclass

from evergrad_coordinator.causes import read_change
from evergrad_trainer.observers.events import words_of
from evergrad_trainer.observers.goodput import WorldChange
from evergrad_trainer.records import Event


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
        """The change as it is known now."""
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


def is_positive(value: object) -> bool:
    """Whether a field holds a number of processes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
