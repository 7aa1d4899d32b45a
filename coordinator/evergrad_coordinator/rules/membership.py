"""The rules of generations: events in, effects out. No clock, no sockets, no randomness: the same events give the same effects.

Level, not edge: an event only notes what is known now and asks for a review; the review compares the group that should be with
the group that is, and makes a plan if they differ. ``planning`` says who should be in it. What an event leads to depends on the
phase (``phase.find_phase``; it is computed, never stored):

==========  ==========================  =================================  ===========================  ========================
phase       hello                       a member is lost, or broken        leaving, capacity            report of the group
==========  ==========================  =================================  ===========================  ========================
adopting    with the place it had; once the places of the newest group     waits for the group          kept until it is adopted
            cover all ranks: running    (a lease ends it: waiting)
gathering   all expected: preparing     counts for nothing                 may go                       ignored: there is none
waiting     enough: preparing           counts for nothing                 may go; one saves            ignored
preparing   member: asked again         planned anew without it            planned anew                 ignored
draining    spare until the next group  preparing: nobody waits for steps  planned anew                 noted
starting    waits for ``up``            broken                             after ``up``                 ``up`` of all: running
running     draining, or held back      broken; its cause is counted       draining                     noted; done, result: over
broken      preparing                   noted                              preparing                    ignored
over        told the end                --                                 --                           --
==========  ==========================  =================================  ===========================  ========================

A plan makes preparing or draining; ``ready`` of all members makes starting; all connections lost at once make adopting.
"""

import dataclasses

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.protocol import Commit, End, Hello, Message, Ping, Plan, Welcome
from evergrad_coordinator.rules import adoption, planning
from evergrad_coordinator.rules.accounting import Accounting
from evergrad_coordinator.rules.budget import Failure, FailureBudget
from evergrad_coordinator.rules.departures import Departures
from evergrad_coordinator.rules.limits import check_limits
from evergrad_coordinator.rules.members import REPLACED, Roster
from evergrad_coordinator.rules.phase import Phase, find_phase
from evergrad_coordinator.rules.rendezvous import Gathering, JoinHold
from evergrad_coordinator.rules.reports import handle_report
from evergrad_coordinator.rules.state import (
    Close,
    Effect,
    Finish,
    Key,
    Log,
    Node,
    Persist,
    Proposal,
    Send,
    Settings,
    Training,
    World,
)  # fmt: skip

TICK_SECONDS = 0.25
"""A tick is due at least so often."""
_FREE_PLANS = 5
_LONGEST_DELAY_SECONDS = 2.0


class Membership:
    """One run's group. Every method that takes an event returns the effects, to be carried out in their order."""

    def __init__(self, settings: Settings, *, generation: int, now: float) -> None:
        self.settings = settings
        self.generation = generation
        """Newest number: durable before any effect behind its Persist."""
        self.world: World | None = None
        self.proposal: Proposal | None = None
        self.training = Training()
        self.accounting = Accounting()
        self.budget = FailureBudget(settings.max_failures_without_progress, settings.recovery)
        may_run = planning.may_run_unseen(settings, generation)
        self.gathering: Gathering | None = Gathering(adopts_until=now + self.lease_end if may_run else None)
        self.finished: End | None = None
        self.departures = Departures()
        self.joins = JoinHold()
        self.fence_until = 0.0
        self._stored = generation
        """Newest number that is durable: below ``generation`` where a group of an earlier epoch was adopted."""
        self._heard = 0
        self._roster = Roster(settings)
        self._fruitless = 0
        self._num_holders = 0
        """Nodes that held a state when the newest plan was made."""
        self._planned_at = float("-inf")
        self._review_at: float | None = None
        self._ticked_at = now
        self._effects: list[Effect] = []

    @property
    def phase(self) -> Phase:
        """Where the group stands."""
        return find_phase(self)

    @property
    def newest_known(self) -> int:
        """Newest number that this coordinator or any of its nodes has heard of."""
        return max(self.generation, self._heard)

    @property
    def nodes(self) -> dict[str, Node]:
        """Connected nodes by name."""
        return self._roster.nodes

    # ---- events ------------------------------------------------------------------------------------------------------

    def hello(self, peer: int, hello: Hello, *, now: float) -> list[Effect]:
        """The first message of a connection."""
        refusal = self._roster.refuse(hello, finished=self.finished, is_adopting=self.phase is Phase.ADOPTING)
        if refusal is not None:
            self.send(peer, refusal)
            self._effects.append(Close(peer, getattr(refusal, "reason", "")))
            self.log("refused", node=hello.node[:64], reason=getattr(refusal, "reason", ""))
        elif self._roster.is_superseded_by(hello):
            self._effects.append(Close(peer, "superseded"))
            self.log("superseded", node=hello.node[:64], known=hello.known_generation)
        else:
            self._join(peer, hello, now)
        return self._take()

    def receive(self, peer: int, message: Message, *, now: float) -> list[Effect]:
        """Any later message. A ``ping`` counts as contact and is answered by the edge."""
        node = self._roster.peers.get(peer)
        if node is None or self.finished:
            return self._take()
        adoption.note_absence(self, node, now - node.seen)
        node.seen = now
        if isinstance(message, Ping):
            return []
        if isinstance(message, Commit):
            adoption.answer_commit(self, node, message)
        else:
            handle_report(self, node, message, now)
        return self._take()

    def beat(self, key: Key, *, now: float) -> None:
        """The process beside a node's own is heard: the node is there, however slow it is."""
        node = self.nodes.get(key[0])
        if node is not None and node.key == key:
            node.beat_at = now

    def lost(self, peer: int, why: str, *, now: float) -> list[Effect]:
        """The connection has ended."""
        node = self._roster.peers.get(peer)
        if node is not None:
            self.remove(node, why, now)
        return self._take()

    def tick(self, *, now: float) -> list[Effect]:
        """Time has passed."""
        gap, self._ticked_at = now - self._ticked_at, now
        if self.finished:
            return self._take()
        if gap > 4 * TICK_SECONDS:  # this process itself did not run: what was said meanwhile is still unread
            for node in self.nodes.values():
                adoption.note_absence(self, node, now - node.seen)
                node.seen += gap
                node.beat_at += gap
        check_limits(self, now)
        if self._review_at is not None and self._review_at <= now and not self.finished:
            self._review(now)
        return self._take()

    def set_bounds(
        self, *, min_nodes: int, max_nodes: int, max_failures: int | None = None, now: float
    ) -> list[Effect]:
        """Other limits from now on (None: as it was); a group that runs is changed at its next step boundary, if at all."""
        settings = self.settings
        if max_failures is not None and max_failures != self.budget.limit:
            self.budget.limit = max_failures
            self.log("bounds", maxFailures=max_failures)
            self.change(now)
        if (min_nodes, max_nodes) != (settings.min_nodes, settings.max_nodes):
            self.settings = dataclasses.replace(
                settings, min_nodes=min_nodes, max_nodes=max_nodes, expect=max_nodes
            )
            self.log("bounds", min=min_nodes, max=max_nodes)
            self.change(now)
        return self._take()

    def next_tick(self, *, now: float) -> float:
        """When the next tick is due."""
        if self._review_at is None or self.finished:
            return now + TICK_SECONDS
        return min(self._review_at, now + TICK_SECONDS)

    # ---- what reports use --------------------------------------------------------------------------------------------

    def send(self, peer: int, message: Message) -> None:
        """Effect: one message."""
        self._effects.append(Send(peer, message))

    def log(self, event: str, **fields: object) -> None:
        """Effect: one line of the log."""
        self._effects.append(Log(event, {"generation": self.generation, **fields}))

    def ask_review(self, at: float) -> None:
        """Compare what should be with what is, not later than ``at``."""
        self._review_at = at if self._review_at is None else min(self._review_at, at)

    def change(self, now: float) -> None:
        """Something about the group has changed; what else happens at the same moment is waited for."""
        self.ask_review(now + self.settings.debounce_seconds)

    def drop(self, node: Node, why: str, now: float) -> None:
        """End a node's connection; it counts as lost."""
        self._effects.append(Close(node.peer, why))
        self.remove(node, why, now)

    def remove(self, node: Node, why: str, now: float) -> None:
        """The node is not connected any more."""
        self._roster.remove(node)
        self.log("gone", node=node.name, why=why)
        world, proposal = self.world, self.proposal
        if world and node.key in world.places and node.key not in world.done:
            world.has_left |= node.is_leaving
            world.lost |= set() if node.is_leaving else {node.key}
        if world and node.key in world.places and node.key not in world.out:
            world.last_contact[node.key] = node.seen
            if not world.is_over and node.key not in world.done:
                self.accounting.begin("node_lost", at=node.seen if why == "silent" else now)
        self.departures.note_gone(node)
        if proposal and node.key not in proposal.members:
            proposal.waits_for.discard(node.key)
        self.change(now)
        if not self.nodes:
            self._become_empty(node, now)
        elif proposal and not proposal.waits_for:
            self.settle(now)

    def break_world(self, failure: Failure, *, now: float) -> None:
        """The newest generation cannot go on."""
        if self.world is None:
            return
        self.world.is_broken = True
        if failure.report.cause != "peer_lost" and not self.world.broken_by:
            self.world.broken_by = (
                f"rank {failure.report.rank} of node {failure.node} broke: {failure.report.cause}"
            )
        self.accounting.begin(failure.report.cause, at=failure.at)
        self.budget.report(failure, self.training)
        self.change(now)

    def may_commit(self, node: Node, generation: int) -> bool:
        """Whether ``generation`` may still write: the running one unless a hard plan is pending, or what the saver saves."""
        if self.departures.may_commit(node, generation):
            return True
        world = self.world
        is_running = (
            world is not None
            and not world.is_over
            and world.generation == generation
            and node.key in world.places
        )
        return is_running and not (self.proposal and self.proposal.hard)

    def settle(self, now: float) -> None:
        """All that were asked are ready: leavers may go, and the members begin, if they are enough."""
        proposal = self.proposal
        if proposal is None or proposal.waits_for or self.finished:
            return
        members = [self.nodes[name] for name, _ in proposal.members if name in self.nodes]
        if tuple(node.key for node in members) != proposal.members or not all(
            _takes_part(node, proposal) for node in members
        ):
            self.change(now)
            return
        is_going = len(members) >= self._needed
        self.departures.release(self, now, staying=members if is_going else [])
        if is_going and self.departures.is_awaited(members):
            return
        if is_going:
            # Only now is known what became of its members: each has answered, or was lost.
            if self.world and (ending := planning.find_break(self.world, self.nodes.values(), now=now)):
                self.budget.conclude(ending, self.training)
            if not self._has_failed_too_often():
                self._go(members, now)
            return
        self.proposal = None
        if self.world:
            self.world.is_over = True
        self.log("waiting", ready=len(members), needed=self._needed)

    def _has_failed_too_often(self) -> bool:
        if self.budget.is_exhausted:
            self.finish(ExitCode.INTERNAL, "FailuresWithoutProgress", self.budget.describe())
        return self.budget.is_exhausted

    def finish(self, exit_code: int, reason: str, message: str = "") -> None:
        """The run is over, for all."""
        self.finished = End(exit_code=exit_code, reason=reason, message=message)
        for node in self.nodes.values():
            self.send(node.peer, self.finished)
        self.log("finished", exitCode=exit_code, reason=reason, message=message)
        self._effects.append(Finish(exit_code))

    # ---- joining -----------------------------------------------------------------------------------------------------

    def _join(self, peer: int, hello: Hello, now: float) -> None:
        older, was_seen = self._roster.claim(hello), now
        if older is not None and older.incarnation == hello.incarnation:
            self._effects.append(Close(older.peer, "reconnected"))
            self._roster.remove(older)
            was_seen = older.seen
        elif older is not None:
            self.send(older.peer, REPLACED)
            self.drop(older, "replaced", now)
        if self.finished:  # the process that was replaced was the last one, and leaving
            self.send(peer, self.finished)
            self._effects.append(Close(peer, "finished"))
            return
        node = self._roster.add(peer, hello, now=now)
        if self.world:
            was_seen = self.world.last_contact.pop(node.key, was_seen)
        adoption.note_absence(self, node, now - was_seen)
        adoption.drop_others(self, node, now)
        self._heard = max(self._heard, hello.known_generation, node.group)
        self.log("hello", node=node.name, workers=node.workers, had=node.group)
        self.send(peer, Welcome(self.generation, self.settings.lease_seconds, self.settings.silence_seconds))
        self.budget.note_return(node.key, self.training)
        self._place_again(node, now)
        if self.gathering and node.is_candidate:
            self.gathering.first_seen = (
                now if self.gathering.first_seen is None else self.gathering.first_seen
            )
        self.change(now)

    def _place_again(self, node: Node, now: float) -> None:
        """Tell a node that comes (back) what it missed, and note what it lost meanwhile."""
        world, proposal = self.world, self.proposal
        is_member = world is not None and node.key in world.places and node.key not in world.out
        if world and is_member and not self.gathering and not planning.holds_its_place(world, node):
            world.out.add(node.key)
            world.is_broken = True
            self.accounting.begin("node_lost", at=now)
        if proposal:
            if node.key in proposal.members or node.group:
                proposal.waits_for.add(node.key)
            self._announce(node, proposal)
        elif world and not world.is_over and 0 < node.group < world.generation:
            self.send(
                node.peer,
                Plan(world.generation, hard=True, is_member=False, reason="this group has been replaced"),
            )

    def _become_empty(self, last: Node, now: float) -> None:
        self.proposal = None
        self.departures.was_left = last.is_leaving or last.released_at is not None
        is_gone = self.world is None or self.world.places.keys() <= self.world.out
        # All connections at once: more likely ours failed than all nodes. They may come back as they were.
        self.gathering = Gathering(adopts_until=None if is_gone else now + self.lease_end)
        if self.world:
            self.world.is_over |= is_gone
            self.world.done.clear()  # whoever comes now starts from a checkpoint, with all that it takes
        self.log("empty", wasLeft=self.departures.was_left)
        if self.settings.exit_when_empty and self.departures.was_left and self.finished is None:
            held = max(self._roster.steps.values(), default=-1)
            is_saved = self.settings.recovery == "fresh" or self.departures.saved_step >= held
            code = ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED
            self.finish(code, "stopped", "all nodes have left")

    # ---- review ------------------------------------------------------------------------------------------------------

    @property
    def lease_end(self) -> float:
        """So long after its last contact no worker runs any more; a second is for those that look at the time now and then."""
        return self.settings.lease_seconds + 1

    @property
    def _needed(self) -> int:
        """So many nodes make a group; whoever finishes what others already have ended may run below the minimum."""
        return 1 if self.world and self.world.done else self.settings.min_nodes

    def _review(self, now: float) -> None:
        self._review_at = None
        if self._has_failed_too_often():
            return
        if self.phase is Phase.ADOPTING:
            adoption.try_to_adopt(self, now)
        if self.gathering and not self._has_gathered(self.gathering, now):
            return
        nodes = self.nodes.values()
        members = planning.choose_members(
            nodes, world=self.world, proposal=self.proposal, max_nodes=self.settings.max_nodes
        )
        is_enough = len(members) >= self._needed
        if self._is_settled(members, now):
            return
        if not self.proposal and not is_enough and not any(self._must_be_asked(node) for node in nodes):
            if self.world and self.world.places.keys() <= self.world.out:
                self.world.is_over = True
            self.departures.release(self, now, staying=[])
            return
        if is_enough and (until := self._wait_until(members, now)) > now:
            if until < float("inf"):
                self.ask_review(until)
            return
        self._plan(members, now)

    def _has_gathered(self, gathering: Gathering, now: float) -> bool:
        """Whether the wait for nodes is over."""
        until = gathering.ends_at(self.nodes.values(), self.settings)
        if until <= now:
            adoption.give_up(self, gathering, now)
            return True
        if until < float("inf"):
            self.ask_review(until)
        if gathering.adopts_until is None:
            self.departures.release(self, now, staying=[])
        return False

    def _is_settled(self, members: tuple[Node, ...], now: float) -> bool:
        """Whether the group is, or is about to become, what it should be."""
        world, proposal = self.world, self.proposal
        if any(node.group > self.generation for node in self.nodes.values()):
            return False
        if proposal:
            is_same = tuple(node.key for node in members) == proposal.members
            return is_same and (proposal.hard or not planning.must_be_hard(world, self.nodes.values()))
        if world is None or world.is_over or world.is_broken or world.generation != self.generation:
            return False
        if not planning.is_intact(world, members):
            return planning.is_growth(world, members) and self._holds_growth(now)
        self.joins = JoinHold()
        self.departures.release(self, now, staying=None)
        return True

    def _holds_growth(self, now: float) -> bool:
        """Whether new members wait: for the start that is under way, or with fresh workers for a checkpoint."""
        world = self.world
        if world is None or not world.is_up:
            return True  # `up` asks for a review
        settings = self.settings
        if not settings.hold_joins or settings.recovery != "fresh" or len(world.places) < settings.expect:
            return False
        until = self.joins.ends_at(settings, now=now)
        if until > now:
            self.ask_review(until)
        return until > now

    def _must_be_asked(self, node: Node) -> bool:
        """Whether only its ``ready`` can tell: its workers are in a group, or it leaves and may hold the newest state."""
        may_hold = (
            self.settings.recovery == "in-process"
            and self.generation > 0
            and node.step is None
            and node.workers > 0
        )
        return node.group > 0 or (node.is_leaving and node.released_at is None and may_hold)

    def has_boundary_ahead(self, node: Node) -> bool:
        """Whether its workers are in the running group; any other group waits for members that are elsewhere."""
        return (
            node.group > 0
            and self.world is not None
            and not self.world.is_over
            and node.group == self.world.generation
        )

    def _wait_until(self, members: tuple[Node, ...], now: float) -> float:
        """When a plan of ``members`` may be made at the earliest; infinity for what an event ends."""
        self.fence_until = 0.0
        world = self.world
        if world and not any(node.key in world.places for node in members):
            # Nobody of the old group can vouch for its end. Its workers stop by themselves a lease after their last contact.
            contacts = [
                world.last_contact.get(key, now) for key in planning.find_lost(world, self.nodes.values())
            ]
            self.fence_until = max(contacts, default=float("-inf")) + self.lease_end
        if self.departures.is_awaited(members):
            return float("inf")
        delay = 0.0
        if self._fruitless > _FREE_PLANS:
            delay = min(
                _LONGEST_DELAY_SECONDS,
                self.settings.debounce_seconds * 2 ** min(self._fruitless - _FREE_PLANS, 16),
            )
        return max(self.fence_until, self._planned_at + delay)

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _plan(self, members: tuple[Node, ...], now: float) -> None:
        world = self.world
        cause, reason = planning.describe_change(world, members, self.nodes.values())
        is_fruitful = (
            world is not None
            and world.up_at is not None
            and (now - world.up_at > 10 or self.training.step > world.up_step)
        )
        self._fruitless = 0 if is_fruitful else self._fruitless + 1
        self._planned_at = now
        self.generation = max(self.newest_known, self.settings.epoch << 32) + 1
        self._effects.append(Persist(self._stored, self.generation))
        self._stored = self.generation
        keys = tuple(node.key for node in members)
        waits_for = set(keys) | {node.key for node in self.nodes.values() if self._must_be_asked(node)}
        is_hard = planning.must_be_hard(world, self.nodes.values())
        # A group of which too few stay saves while it is whole: one node alone would write for all within its grace period.
        saves = (
            not is_hard
            and len(members) < self._needed
            and any(node.is_leaving for node in self.nodes.values())
        )
        self.proposal = Proposal(self.generation, keys, is_hard, cause, reason, now, waits_for, saves=saves)
        self.log("plan", hard=self.proposal.hard, members=len(keys), reason=reason, saves=saves)
        self._num_holders = sum(node.step is not None and node.step >= 0 for node in self.nodes.values())
        for node in self.nodes.values():
            node.ready = None
            self._announce(node, self.proposal)
        self.settle(now)

    def _announce(self, node: Node, proposal: Proposal) -> None:
        is_member = node.key in proposal.members
        is_hard = proposal.hard or (node.group > 0 and not self.has_boundary_ahead(node))
        is_only_holder = self._num_holders <= int(node.step is not None and node.step >= 0)
        patience = planning.choose_patience(proposal, self.settings)
        saves = proposal.saves and not is_hard
        self.send(
            node.peer,
            Plan(proposal.generation, is_hard, is_member, proposal.reason, is_only_holder, patience, saves),
        )

    def _go(self, members: list[Node], now: float) -> None:
        places = planning.assign_places(members)
        self.world = World(self.generation, places, started_at=now)
        self.proposal, self.gathering, self.joins = None, None, JoinHold()
        self._roster.steps.clear()
        self.log("go", nodes=len(places), worldSize=self.world.size)
        for node, message in planning.build_go(self.generation, members, places):
            node.group, node.had = self.generation, None
            self.send(node.peer, message)

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def _takes_part(node: Node, proposal: Proposal) -> bool:
    return node.is_candidate and node.ready is not None and node.ready.generation == proposal.generation
