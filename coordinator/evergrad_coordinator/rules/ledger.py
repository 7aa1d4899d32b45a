"""Node-milliseconds of a run by use, as one value: what is counted, and what a report may still claim. Pure.

Whole numbers of milliseconds: the uses of an interval sum to its length times its nodes exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from evergrad_common.causes import Use
from evergrad_coordinator.protocol import Progress

OPEN: Final[tuple[Use, ...]] = ("training", "repeated")
"""Uses of which a report of progress may still claim a part for evaluations and saves."""


def apportion(amount: int, weights: Mapping[Use, int]) -> dict[Use, int]:
    """Divide ``amount`` by ``weights``, of which one is above 0, into whole numbers that sum to it."""
    total = sum(weights.values())
    # Whole numbers throughout: floating-point shares need not sum to the amount.
    shares = {use: amount * weight // total for use, weight in weights.items()}

    # Those that were rounded down most get what is left, one each. Equal remainders go by the name, so that
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
    """Node-milliseconds by use since the coordinator began. Times in seconds of its clock."""

    began_at: float
    has_formed: bool = False
    """Whether a group has been up, perhaps under an earlier coordinator."""
    highest_step: int = -1
    counted: dict[Use, int] = field(default_factory=dict)
    unsettled: dict[Use, int] = field(default_factory=dict)
    """Time of training and of repeated steps, of which evaluations and saves may still claim a part."""
    nodes: dict[Use, int] = field(default_factory=dict)
    """Number of nodes in each use since the last event."""
    at_milliseconds: int = 0
    """Time up to which everything is counted, since ``began_at``."""
    phase: object = None
    """Phase of the group when the nodes were counted last."""
    recounted_at: float = float("-inf")
    """Time of its clock at which the nodes were counted last."""
    reported: tuple[int, float, float] | None = None
    """Generation of the newest report, and its seconds of evaluations and saves."""
    joined: dict[str, float] = field(default_factory=dict)
    """When each connected node could train first, by its address."""

    def close_interval(self, *, now: float) -> None:
        """Count the time since the last event for the nodes that were in each use."""
        # Rounded from the beginning and not from the last event: roundings of short intervals would add up.
        since_began = round(1000 * (now - self.began_at))
        at = max(self.at_milliseconds, since_began)
        elapsed = at - self.at_milliseconds
        self.at_milliseconds = at
        for use, number in self.nodes.items():
            # Without a report the next one has no base to claim from, and the time would wait in vain.
            is_open = use in OPEN and self.reported is not None
            kept = self.unsettled if is_open else self.counted
            kept[use] = kept.get(use, 0) + elapsed * number

    def settle(self) -> None:
        """Count the open time of training as what it was taken for."""
        for use, amount in self.unsettled.items():
            known = self.counted.get(use, 0)
            self.counted[use] = known + amount
        self.unsettled.clear()

    def note_progress(self, message: Progress) -> None:
        """Take a report of progress, which says how long evaluations and saves have taken so far."""
        evaluating = message.evaluation_seconds
        saving = message.saving_seconds
        known, self.reported = self.reported, None
        # A report without its counters leaves nothing that the next one could be compared with.
        if evaluating is not None and saving is not None:
            self.reported = (message.generation, evaluating, saving)
        # The first report of a group may be another node's, whose counters began at another time.
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
        """Count the seconds of every member as ``use``, out of the open time of training."""
        members = sum(self.nodes.get(one, 0) for one in OPEN)
        left = sum(self.unsettled.values())
        # No more than is left: a report may speak of time that was settled before it came.
        of_each = round(1000 * max(0.0, seconds))
        claimed = min(left, of_each * members)
        if claimed > 0:
            for taken, amount in apportion(claimed, self.unsettled).items():
                self.unsettled[taken] -= amount
            self.counted[use] = self.counted.get(use, 0) + claimed

    def describe(self, *, now: float) -> dict[str, object]:
        """The part of ``GET /status`` on time: node-milliseconds, and since when nodes could train."""
        return {
            "milliseconds": {use: amount for use, amount in self.counted.items() if amount},
            # As an age: the clocks of two hosts are never compared.
            "joinedSecondsAgo": {
                address: round(max(0.0, now - at), 1) for address, at in self.joined.items()
            },
        }
