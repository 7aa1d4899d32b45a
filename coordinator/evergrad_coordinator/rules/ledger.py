"""Counts the node-milliseconds of a run by use, including time that a later report may still claim. Pure.

All amounts are whole milliseconds, so the uses of an interval sum exactly to its length times its nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from evergrad_common.causes import Use
from evergrad_coordinator.protocol import Progress

OPEN: Final[tuple[Use, ...]] = ("training", "repeated")
"""Uses from which a progress report may still claim a part for evaluations and saves."""


def apportion(amount: int, weights: Mapping[Use, int]) -> dict[Use, int]:
    """Divide ``amount`` in proportion to ``weights`` into whole numbers that sum to it.

    At least one weight must be above 0. For example, 10 divided by ``{"training": 2, "repeated": 1}`` is
    ``{"training": 7, "repeated": 3}``.
    """
    total = sum(weights.values())
    # Use whole numbers, because floating-point shares need not sum to the amount.
    shares = {use: amount * weight // total for use, weight in weights.items()}

    # The uses that were rounded down most get one each of the remainder. Ties are resolved by name, so that
    # the same weights always give the same shares.
    def rank(use: Use) -> tuple[int, Use]:
        remainder = amount * weights[use] % total
        return (-remainder, use)

    left = amount - sum(shares.values())
    for use in sorted(weights, key=rank)[:left]:
        shares[use] += 1
    return shares


@dataclass
class Ledger:
    """Node-milliseconds by use since the coordinator started. Times are seconds of its clock."""

    began_at: float
    has_formed: bool = False
    """Whether a group has been up, perhaps under an earlier coordinator."""
    highest_step: int = -1
    counted: dict[Use, int] = field(default_factory=dict)
    unsettled: dict[Use, int] = field(default_factory=dict)
    """Time of training and repeated steps from which evaluations and saves may still claim a part."""
    nodes: dict[Use, int] = field(default_factory=dict)
    """Number of nodes in each use since the last event."""
    at_milliseconds: int = 0
    """Milliseconds since ``began_at`` up to which all time is counted."""
    phase: object = None
    """Phase of the group when the nodes were last counted."""
    recounted_at: float = float("-inf")
    """Time at which the nodes were last counted."""
    reported: tuple[int, float, float] | None = None
    """Generation of the newest report, and its seconds of evaluations and saves."""
    joined: dict[str, float] = field(default_factory=dict)
    """Time from which each connected node could train, by its address."""

    def close_interval(self, *, now: float) -> None:
        """Count the time since the last event for the nodes that were in each use."""
        # Round the time since the start, not since the last event, or the rounding errors would add up.
        since_began = round(1000 * (now - self.began_at))
        at = max(self.at_milliseconds, since_began)
        elapsed = at - self.at_milliseconds
        self.at_milliseconds = at
        for use, number in self.nodes.items():
            # Without an earlier report, the next report has no baseline for a claim, so count the time now.
            is_open = use in OPEN and self.reported is not None
            kept = self.unsettled if is_open else self.counted
            kept[use] = kept.get(use, 0) + elapsed * number

    def settle(self) -> None:
        """Count the unsettled time under the uses for which it was recorded."""
        for use, amount in self.unsettled.items():
            known = self.counted.get(use, 0)
            self.counted[use] = known + amount
        self.unsettled.clear()

    def note_progress(self, message: Progress) -> None:
        """Handle a progress report, which contains the total seconds of evaluations and saves."""
        evaluating = message.evaluation_seconds
        saving = message.saving_seconds
        known, self.reported = self.reported, None
        # A report without both counters is no baseline for the next report.
        if evaluating is not None and saving is not None:
            self.reported = (message.generation, evaluating, saving)
        # The first report of a group may come from another node, whose counters started at another time.
        if (
            self.reported is not None
            and known is not None
            and known[0] == message.generation
        ):
            self._claim("evaluation", self.reported[1] - known[1])
            self._claim("saving", self.reported[2] - known[2])
        # The time up to a report is final once it has claimed its part.
        self.settle()

    def _claim(self, use: Use, seconds: float) -> None:
        """Move ``seconds`` of every member from the unsettled time to ``use``."""
        members = sum(self.nodes.get(one, 0) for one in OPEN)
        left = sum(self.unsettled.values())
        # Claim at most the unsettled time, because a report may include time that was settled before.
        of_each = round(1000 * max(0.0, seconds))
        claimed = min(left, of_each * members)
        if claimed > 0:
            for taken, amount in apportion(claimed, self.unsettled).items():
                self.unsettled[taken] -= amount
            self.counted[use] = self.counted.get(use, 0) + claimed

    def describe(self, *, now: float) -> dict[str, object]:
        """Return ``usage`` of ``GET /status``: node-milliseconds, and since when each node could train."""
        return {
            "milliseconds": {use: amount for use, amount in self.counted.items() if amount},
            # Report an age, so that no reader compares the clocks of two hosts.
            "joinedSecondsAgo": {
                address: round(max(0.0, now - at), 1) for address, at in self.joined.items()
            },
        }
