"""How often the group changed and how long nobody trained, by cause. Pure."""

from dataclasses import dataclass, field

from evergrad_common.causes import PLANNED


@dataclass
class Accounting:
    """An outage lasts from the event that stopped the running generation until all of the next one are up."""

    restarts: dict[str, int] = field(default_factory=dict)
    lost_seconds: dict[str, float] = field(default_factory=dict)
    cause: str | None = None
    """Cause of the outage that lasts."""
    since: float = 0.0

    def begin(self, cause: str, *, at: float) -> None:
        """Note that nobody trains since ``at``.

        A real cause takes the place of its consequence and of a change that was merely planned.
        """
        if self.cause is None:
            self.cause, self.since = cause, at
            return
        # Reports come in any order: the earliest moment counts, and the cause that explains the others.
        self.since = min(self.since, at)
        if self.cause == "peer_lost" or (
            self.cause in PLANNED and cause not in PLANNED and cause != "peer_lost"
        ):
            self.cause = cause

    def end(self, *, now: float) -> None:
        """Note that all are up again."""
        # A first start is no restart: no event began an outage before it.
        if self.cause is None:
            return
        self.restarts[self.cause] = self.restarts.get(self.cause, 0) + 1
        self.lost_seconds = self.observe_lost(now=now)
        self.cause = None

    def observe_lost(self, *, now: float) -> dict[str, float]:
        """Seconds by cause, with the outage that lasts."""
        lost = dict(self.lost_seconds)
        if self.cause is not None:
            lost[self.cause] = lost.get(self.cause, 0.0) + max(0.0, now - self.since)
        return lost
