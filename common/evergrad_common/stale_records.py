"""Rows that a frozen process wrote late, told from those of a run whose generations began anew. Pure."""

from typing import Any


class Beginnings:
    """When the generations of a run began anew, by its events: their numbers are below those of before once
    somebody has removed ``checkpoints`` alone."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._newest = 0

    def note(self, kind: Any, generation: Any, time: Any) -> None:
        """Take the next event of the file; fields may be missing or of any type."""
        if not isinstance(generation, int) or not isinstance(time, int | float):
            return
        # A process starts before others overtake it, frozen or not.
        if kind == "start" and generation < self._newest:
            self.times.append(float(time))
            self._newest = generation
        self._newest = max(self._newest, generation)


class InTime:
    """Tells the rows of one file, one after the other: those of an older generation than one before are late,
    unless generations began anew in between.

    A process that was frozen while others went on wrote them, and they are nobody's progress.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self._newest = 0
        self._begun = 0
        """Number of beginnings up to the last one by which numbers fell."""

    def accepts(self, generation: Any, time: Any) -> bool:
        """Whether the next row is in time; fields may be missing or of any type."""
        if generation is None:
            return True
        if not isinstance(generation, int):
            return False
        if generation < self._newest:
            if not isinstance(time, int | float):
                return False
            begun = sum(one <= time for one in self._beginnings.times)
            if begun <= self._begun:
                return False
            self._begun = begun
        self._newest = generation
        return True
