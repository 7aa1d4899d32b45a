"""Separates rows that a frozen process wrote late from rows of a run whose generations restarted. Pure.

For example, a process of generation 3 that was frozen while generation 4 trained may still append its row.
"""

from typing import Any


class Beginnings:
    """Times at which the generation numbers of a run restarted, from its events.

    The numbers become smaller if a user removes ``checkpoints`` and keeps the other files.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._newest = 0

    def note(self, kind: Any, generation: Any, time: Any) -> None:
        """Take the next event of the file; fields may be missing or of any type."""
        if not isinstance(generation, int) or not isinstance(time, int | float):
            return
        # A process logs its start before others overtake it, even if it is frozen later.
        if kind == "start" and generation < self._newest:
            self.times.append(float(time))
            self._newest = generation
        self._newest = max(self._newest, generation)


class InTime:
    """Decides for each row of one file, in order, whether it is in time.

    A row is late if its generation is older than the generation of an earlier row, unless the numbers
    restarted in between. A process that was frozen while others continued wrote it, so it is not progress of
    the run.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self._newest = 0
        self._begun = 0
        """Number of beginnings up to the last one by which numbers fell."""

    def accepts(self, generation: Any, time: Any) -> bool:
        """Return whether the next row is in time. Fields may be missing or of any type."""
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
