"""The state of one run's group, as one value.

Events change it (``events``), and the edge carries out the effects that they add. The methods of the value
only add effects or request a review; the rules are functions over it.
"""

from dataclasses import dataclass, field

from evergrad_coordinator.protocol import End, Message
from evergrad_coordinator.rules import planning
from evergrad_coordinator.rules.budget import FailureBudget
from evergrad_coordinator.rules.drains import Departures
from evergrad_coordinator.rules.interruptions import Accounting
from evergrad_coordinator.rules.ledger import Ledger
from evergrad_coordinator.rules.members import Members
from evergrad_coordinator.rules.rendezvous import JoinHold, Rendezvous
from evergrad_coordinator.rules.state import (
    Close,
    Effect,
    GroupSettings,
    GroupWorld,
    Log,
    Node,
    Proposal,
    Send,
    TrainingState,
)  # fmt: skip

_GATHERING_SECONDS = 0.005
"""Connections that end within this many seconds count as ending together.

The time covers many iterations of the coordinator's event loop, and is short compared with the start of a
group.
"""


@dataclass
class Group:
    """One run's group: connected nodes, running group, pending plan and counts."""

    settings: GroupSettings
    generation: int
    """Newest generation. It is durable before any effect after its ``Persist`` is carried out."""
    members: Members
    budget: FailureBudget
    ticked_at: float
    """Time of the newest tick."""
    ledger: Ledger
    """Time of the nodes, by use."""
    rendezvous: Rendezvous | None = None
    """The wait for nodes before the first plan; None after this wait."""
    world: GroupWorld | None = None
    """The newest group that was started with ``go``, or was adopted."""
    proposal: Proposal | None = None
    """The plan that was announced and has not started yet."""
    finished: End | None = None
    """The end of the run; None while the run continues."""
    training: TrainingState = field(default_factory=TrainingState)
    accounting: Accounting = field(default_factory=Accounting)
    departures: Departures = field(default_factory=Departures)
    joins: JoinHold = field(default_factory=JoinHold)
    fence_until: float = 0.0
    """Time before which no plan is made, because workers of a lost group may still train."""
    stored_generation: int = 0
    """Newest durable generation. It is below ``generation`` after the adoption of another epoch's group."""
    heard_generation: int = 0
    """Newest generation that any node has reported."""
    num_fruitless_plans: int = 0
    """Number of consecutive plans whose groups trained no step."""
    num_holders: int = 0
    """Number of nodes that held a state when the newest plan was made."""
    planned_at: float = float("-inf")
    review_at: float | None = None
    """Time of the next review; None if the next change requests it."""
    effects: list[Effect] = field(default_factory=list)
    """Effects for the edge to carry out, in this order."""

    @property
    def nodes(self) -> dict[str, Node]:
        """Connected nodes by name."""
        return self.members.nodes

    @property
    def newest_known(self) -> int:
        """Newest generation that this coordinator has issued or any of its nodes has reported."""
        return max(self.generation, self.heard_generation)

    @property
    def num_needed(self) -> int:
        """Minimum number of nodes of the next group.

        If some members have already completed the run's work, the remaining ones may be fewer than the run's
        minimum.
        """
        return 1 if self.world and self.world.done else self.settings.min_nodes

    @property
    def lease_end(self) -> float:
        """Seconds after a worker's last contact by which it has certainly stopped.

        This is the lease plus one second, because workers check the time only periodically.
        """
        return self.settings.lease_seconds + 1

    @property
    def is_whole(self) -> bool:
        """Whether the newest group is up, has not broken, and has lost no member."""
        # The first ``up`` reports the step at which the group starts.
        world = self.world
        return (
            world is not None
            and bool(world.up)
            and not world.is_broken
            and not planning.find_lost(world, self.nodes.values())
        )

    def send(self, peer: int, message: Message) -> None:
        """Add the effect that sends one message."""
        self.effects.append(Send(peer, message))

    def close(self, peer: int, why: str) -> None:
        """Add the effect that closes a connection."""
        self.effects.append(Close(peer, why))

    def log(self, event: str, **fields: object) -> None:
        """Add the effect that writes one line of the log."""
        self.effects.append(Log(event, {"generation": self.generation, **fields}))

    def ask_review(self, at: float) -> None:
        """Request a review at ``at`` or earlier."""
        # Keep an earlier time that was requested before, because its reason still applies.
        self.review_at = at if self.review_at is None else min(self.review_at, at)

    def change(self, now: float) -> None:
        """Request a review after ``debounce_seconds``, so that simultaneous changes lead to one plan."""
        self.ask_review(now + self.settings.debounce_seconds)

    def hasten(self, now: float) -> None:
        """Request a review within milliseconds, because a group without a member cannot train.

        If a plan was made less than ``debounce_seconds`` ago, the review waits until that time has passed.
        """
        # Wait _GATHERING_SECONDS: if all connections end, the network has failed, and no plan may stop the
        # group before the last connection has ended. The debounce makes members that are lost one after the
        # other cause one more plan, not one plan each.
        debounce = self.settings.debounce_seconds
        gathered = now + min(_GATHERING_SECONDS, debounce)
        self.ask_review(max(gathered, self.planned_at + debounce))


def new_group(settings: GroupSettings, *, generation: int, now: float) -> Group:
    """Return the group of a coordinator that starts. ``generation``: the newest durable number."""
    # Wait a whole lease from now for a group that may be running, because its last contact may be recent.
    may_run = planning.may_run_unseen(settings, generation)
    group = Group(
        settings,
        generation,
        members=Members(settings),
        budget=FailureBudget(settings.max_failures_without_progress, settings.recovery),
        ticked_at=now,
        ledger=Ledger(began_at=now, has_formed=generation > 0),
        stored_generation=generation,
    )
    group.rendezvous = Rendezvous(adopts_until=now + group.lease_end if may_run else None)
    return group
