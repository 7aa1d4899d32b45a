"""All that is known about one run's group, as one value. Events change it (``events``), and the edge carries
out the effects they leave.

The value has one owner. Its methods only leave effects or ask for a review; the rules are functions over it.
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
"""Connections that end within that time end together: many turns of the coordinator's event loop, and little
beside the start of a group."""


@dataclass
class Group:
    """One run's group: who is connected, what runs, what is planned, and what has been counted."""

    settings: GroupSettings
    generation: int
    """Newest number: durable before any effect behind its Persist."""
    members: Members
    budget: FailureBudget
    ticked_at: float
    """Time of the newest tick."""
    ledger: Ledger
    """Uses that the time of the nodes went to."""
    rendezvous: Rendezvous | None = None
    """Nodes are waited for before the first plan; None once that is over."""
    world: GroupWorld | None = None
    """The newest group that was told to go, or was found running."""
    proposal: Proposal | None = None
    """A plan that was announced and has not gone yet."""
    finished: End | None = None
    """How the run ended."""
    training: TrainingState = field(default_factory=TrainingState)
    accounting: Accounting = field(default_factory=Accounting)
    departures: Departures = field(default_factory=Departures)
    joins: JoinHold = field(default_factory=JoinHold)
    fence_until: float = 0.0
    """No plan before: workers of a lost group may train until then."""
    stored_generation: int = 0
    """Newest number that is durable: below ``generation`` where a group of an earlier epoch was adopted."""
    heard_generation: int = 0
    """Newest number that any node has reported."""
    num_fruitless_plans: int = 0
    """Plans in a row whose groups trained no step."""
    num_holders: int = 0
    """Nodes that held a state when the newest plan was made."""
    planned_at: float = float("-inf")
    review_at: float | None = None
    """When the group that should be is next compared with the one that is; None: after the next change."""
    effects: list[Effect] = field(default_factory=list)
    """Effects for the edge to carry out, in this order."""

    @property
    def nodes(self) -> dict[str, Node]:
        """Connected nodes by name."""
        return self.members.nodes

    @property
    def newest_known(self) -> int:
        """Newest number that this coordinator or any of its nodes knows."""
        return max(self.generation, self.heard_generation)

    @property
    def num_needed(self) -> int:
        """Fewest nodes of a group.

        Those that finish what others have already ended may run below the minimum.
        """
        return 1 if self.world and self.world.done else self.settings.min_nodes

    @property
    def lease_end(self) -> float:
        """Seconds after a worker's last contact when it runs no more, with a second for looking at the time
        now and then."""
        return self.settings.lease_seconds + 1

    @property
    def is_whole(self) -> bool:
        """Whether the newest group is up, has not broken, and has lost no member."""
        # With the first ``up`` it is known at which step the group begins.
        world = self.world
        return (
            world is not None
            and bool(world.up)
            and not world.is_broken
            and not planning.find_lost(world, self.nodes.values())
        )

    def send(self, peer: int, message: Message) -> None:
        """Leave the effect of one message."""
        self.effects.append(Send(peer, message))

    def close(self, peer: int, why: str) -> None:
        """Leave the effect of ending a connection."""
        self.effects.append(Close(peer, why))

    def log(self, event: str, **fields: object) -> None:
        """Leave the effect of one line of the log."""
        self.effects.append(Log(event, {"generation": self.generation, **fields}))

    def ask_review(self, at: float) -> None:
        """Compare what should be with what is, not later than ``at``."""
        # Never later than was asked for before: the earlier reason still stands.
        self.review_at = at if self.review_at is None else min(self.review_at, at)

    def change(self, now: float) -> None:
        """Ask for a review soon: changes that come at the same moment are answered by one plan."""
        self.ask_review(now + self.settings.debounce_seconds)

    def hasten(self, now: float) -> None:
        """Ask for a review at once: a group without one of its members stands still until the next plan."""
        # Not within the same moment: where all connections break, the network did, and no plan may stop the
        # group before the last one is seen to end. Members lost one after the other make one more plan, and
        # not one each.
        debounce = self.settings.debounce_seconds
        gathered = now + min(_GATHERING_SECONDS, debounce)
        self.ask_review(max(gathered, self.planned_at + debounce))


def new_group(settings: GroupSettings, *, generation: int, now: float) -> Group:
    """The group of a coordinator that starts and knows ``generation``, the newest durable number."""
    # A group that may run unseen gets a whole lease from now: its last contact may be a moment old.
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
