"""Counts the restarts of the group and the seconds without training, by cause. Pure."""

from dataclasses import dataclass, field

from evergrad_common.causes import PLANNED


@dataclass
class Accounting:
    """Restarts and lost seconds by cause.

    An outage lasts from the event that stopped the running generation until all members of the next
    generation are up.
    """

    restarts: dict[str, int] = field(default_factory=dict)
    lost_seconds: dict[str, float] = field(default_factory=dict)
    cause: str | None = None
    """Cause of the current outage, or None."""
    since: float = 0.0

    def begin(self, cause: str, *, at: float) -> None:
        """Record that no node has trained since ``at``.

        A real cause replaces a consequence (``peer_lost``) and a planned change.
        """
        if self.cause is None:
            self.cause, self.since = cause, at
            return
        # Reports arrive in any order. Keep the earliest time, and the cause that explains the other reports.
        self.since = min(self.since, at)
        if self.cause == "peer_lost" or (
            self.cause in PLANNED and cause not in PLANNED and cause != "peer_lost"
        ):
            self.cause = cause

    def end(self, *, now: float) -> None:
        """Record that all members are up again."""
        # A first start is not a restart, because no event has started an outage before it.
        if self.cause is None:
            return
        self.restarts[self.cause] = self.restarts.get(self.cause, 0) + 1
        self.cancel(now=now)

    def cancel(self, *, now: float) -> None:
        """End the current outage without a restart, because the same group trains or the run has ended.

        Its seconds stay counted, because a counter must not decrease.
        """
        self.lost_seconds = self.observe_lost(now=now)
        self.cause = None

    def observe_lost(self, *, now: float) -> dict[str, float]:
        """Return the lost seconds by cause, including the current outage."""
        lost = dict(self.lost_seconds)
        if self.cause is not None:
            lost[self.cause] = lost.get(self.cause, 0.0) + max(0.0, now - self.since)
        return lost
