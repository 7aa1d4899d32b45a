"""Estimates the rate of a script's steps and the remaining time, only from its reports. ``now`` is an
argument."""


class Pace:
    """Counts steps from the first report. If the step decreases, for example after a restart, counting starts
    again."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was reported."""
        return self._first is not None

    def note(self, step: int, *, now: float) -> None:
        """Note a report that ``step`` is finished. ``now`` in seconds."""
        # The first report only sets the start: the time before it was start-up, not training.
        if self._first is None or step < self._first[0]:
            self._first = (step, now)

    def remaining_seconds(
        self, step: int, total: int | None, *, now: float
    ) -> float | None:
        """Return the estimated seconds from ``step`` to ``total``; None before a second step, or without a
        total."""
        if self._first is None or total is None or step <= self._first[0]:
            return None
        return max(0, total - step) * (now - self._first[1]) / (step - self._first[0])
