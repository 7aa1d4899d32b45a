"""Compares the group that should be with the group that is, and plans another one where they differ. Pure
functions.

Level, not edge: an event only notes what is known now and asks for a review. ``planning`` chooses the
members.
"""

from evergrad_coordinator.rules import adoption, planning
from evergrad_coordinator.rules.changes import (
    announce,
    finish_if_exhausted,
    release_leavers,
    settle,
)
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.rendezvous import JoinHold
from evergrad_coordinator.rules.state import Node, Persist, Proposal

_FREE_PLANS = 5
"""Plans in a row that may be fruitless before the next one is delayed."""
_LONGEST_DELAY_SECONDS = 2.0
"""Enough to keep a storm of failures from using up the cluster, and little beside any start of a group."""


def review(group: Group, now: float) -> None:
    """Plan another group if the one that runs, or is planned, is not the one that should be."""
    group.review_at = None
    if finish_if_exhausted(group):
        return

    # A group that may run unseen comes first: a plan against it would stop workers that are well.
    if find_phase(group) is GroupPhase.ADOPTING:
        adoption.try_to_adopt(group, now)

    # Then the wait for the nodes of a start: each one that came after a plan would cost another plan.
    if rendezvous := group.rendezvous:
        until = rendezvous.ends_at(group.nodes.values(), group.settings)
        if until > now:
            if until < float("inf"):
                group.ask_review(until)
            # While a group may run unseen, a leaver may be a member of it, and is not let go.
            if rendezvous.adopts_until is None:
                release_leavers(group, now, staying=[])
            return
        adoption.give_up(group, rendezvous, now)

    # Level, not edge: whatever happened, only the difference of what should be from what is counts.
    nodes, world = group.nodes.values(), group.world
    members = planning.choose_members(
        nodes, world=world, proposal=group.proposal, max_nodes=group.settings.max_nodes
    )
    if _is_settled(group, members, now):
        return

    # Too few, and nobody is in a group or holds a state that only a plan could ask for: there is nothing to
    # plan.
    is_enough = len(members) >= group.num_needed
    if (
        not group.proposal
        and not is_enough
        and not any(_must_be_asked(group, node) for node in nodes)
    ):
        if world and world.places.keys() <= world.out:
            world.is_over = True
        release_leavers(group, now, staying=[])
        return

    # The last border before workers are stopped: none of an older group may train beside the new one.
    if is_enough and (until := _wait_until(group, members, now)) > now:
        if until < float("inf"):
            group.ask_review(until)
        return
    _plan(group, members, now)


def _is_settled(group: Group, members: tuple[Node, ...], now: float) -> bool:
    """Whether the group is, or is about to become, what it should be."""
    world, proposal = group.world, group.proposal
    # Workers in a generation above ours: its number must be passed before anything else.
    if any(node.group > group.generation for node in group.nodes.values()):
        return False
    # A plan stands as long as it names the right members, and gives its group the time it still has use for.
    if proposal:
        is_same = tuple(node.key for node in members) == proposal.members
        return is_same and (
            proposal.hard or not planning.must_be_hard(world, group.nodes.values())
        )
    if (
        world is None
        or world.is_over
        or world.is_broken
        or world.generation != group.generation
    ):
        return False
    if planning.is_intact(world, members):
        group.joins = JoinHold()
        release_leavers(group, now, staying=None)
        return True

    # Only new members can wait. A group that is coming up is not disturbed: its ``up`` asks for a review.
    if not planning.is_growth(world, members):
        return False
    if not world.is_up:
        return True

    # With fresh workers each join costs the steps since the checkpoint. A group that is still short of nodes
    # takes them all the same.
    settings = group.settings
    if (
        not settings.hold_joins
        or settings.recovery != "fresh"
        or len(world.places) < settings.expect
    ):
        return False
    until = group.joins.ends_at(settings, now=now)
    if until > now:
        group.ask_review(until)
    return until > now


def _must_be_asked(group: Group, node: Node) -> bool:
    """Whether a plan must wait for a node's ``ready``: its workers are in a group, or it leaves and may hold
    the newest state."""
    may_hold = (
        group.settings.recovery == "in-process"
        and group.generation > 0
        and node.step is None
        and node.workers > 0
    )
    return node.group > 0 or (node.is_leaving and node.released_at is None and may_hold)


def _wait_until(group: Group, members: tuple[Node, ...], now: float) -> float:
    """When a plan of ``members`` may be made at the earliest; infinity for what an event ends."""
    world, settings = group.world, group.settings
    group.fence_until = 0.0

    # No member of the old group can vouch for its end. Its workers stop by themselves a lease after their
    # last contact, and until then they may train and write.
    if world and not any(node.key in world.places for node in members):
        lost = planning.find_lost(world, group.nodes.values())
        contacts = [world.last_contact.get(key, now) for key in lost]
        group.fence_until = max(contacts, default=float("-inf")) + group.lease_end
    # The state that the members need is still being saved; the end of the saver asks for a review.
    if group.departures.is_awaited(members):
        return float("inf")

    # Groups that break at once, one after the other, are planned ever more slowly.
    delay = 0.0
    if (excess := group.num_fruitless_plans - _FREE_PLANS) > 0:
        delay = min(
            _LONGEST_DELAY_SECONDS, settings.debounce_seconds * 2 ** min(excess, 16)
        )
    return max(group.fence_until, group.planned_at + delay)


def _plan(group: Group, members: tuple[Node, ...], now: float) -> None:
    """Announce a group of ``members`` under a new number, and begin it at once if all are ready."""
    world, nodes = group.world, group.nodes.values()
    cause, reason = planning.describe_change(world, members, nodes)
    # Plans that lead nowhere are made ever more slowly (``_wait_until``); one that trained ends such a row.
    has_trained = (
        world is not None
        and world.up_at is not None
        and (now - world.up_at > 10 or group.training.step > world.up_step)
    )
    group.num_fruitless_plans = 0 if has_trained else group.num_fruitless_plans + 1
    group.planned_at = now

    # The number is durable before it is sent to anybody, and above every number that any coordinator of the
    # run has given out: two groups under one number could both be allowed to write.
    group.generation = max(group.newest_known, group.settings.epoch << 32) + 1
    group.effects.append(Persist(group.stored_generation, group.generation))
    group.stored_generation = group.generation

    # The group waits for its members, and for nodes that may still train or hold the newest state.
    keys = tuple(node.key for node in members)
    waits_for = set(keys) | {node.key for node in nodes if _must_be_asked(group, node)}
    is_hard = planning.must_be_hard(world, nodes)
    # A group of which too few stay saves while it is whole: one node alone would write for all within its
    # grace period.
    is_short = len(members) < group.num_needed
    saves = not is_hard and is_short and any(node.is_leaving for node in nodes)
    proposal = Proposal(
        group.generation, keys, is_hard, cause, reason, now, waits_for, saves=saves
    )
    group.proposal = proposal
    group.log(
        "plan", hard=is_hard, members=len(keys), cause=cause, reason=reason, saves=saves
    )

    # Counted before the answers: a worker that holds the only state must be waited for, not replaced.
    group.num_holders = sum(node.step is not None and node.step >= 0 for node in nodes)
    for node in nodes:
        node.ready = None
        announce(group, node, proposal)

    # With nobody to wait for no ``ready`` will come that could settle it.
    settle(group, now)
