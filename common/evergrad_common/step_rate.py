"""Pace of a script's steps and the time that is left, from its reports alone. ``now`` is an argument."""


class Pace:
    """Counts steps from the first report on; a step that goes back begins anew, as after a restart."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was noted."""
        return self._first is not None

    def note(self, step: int, *, now: float) -> None:
        """Note a report that ``step`` is finished."""
        # The first report measures nothing: what went before it was the start, not training.
        if self._first is None or step < self._first[0]:
            self._first = (step, now)

    def remaining_seconds(
        self, step: int, total: int | None, *, now: float
    ) -> float | None:
        """Seconds from ``step`` to ``total``; None before a second step, or without a total."""
        if self._first is None or total is None or step <= self._first[0]:
            return None
        return max(0, total - step) * (now - self._first[1]) / (step - self._first[0])
