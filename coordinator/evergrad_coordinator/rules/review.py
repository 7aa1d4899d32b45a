"""Compares the desired group with the current group, and plans a new group if they differ. Pure functions.

The review is level-triggered: an event only updates the known state and requests a review. ``planning``
chooses the members.
"""

from evergrad_coordinator.rules import adoption, planning
from evergrad_coordinator.rules.changes import (
    announce,
    finish_if_exhausted,
    release_leavers,
    start_if_ready,
)
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.rendezvous import JoinHold
from evergrad_coordinator.rules.state import Node, Persist, Proposal

_FREE_PLANS = 5
"""Number of consecutive plans without a trained step, after which the next plan is delayed."""
_LONGEST_DELAY_SECONDS = 2.0
"""Maximum delay of a plan, in seconds.

It limits the load of repeated failures, and is short compared with the start of a group.
"""


def review(group: Group, now: float) -> None:
    """Plan a new group if the running or planned group differs from the desired group."""
    group.review_at = None
    if finish_if_exhausted(group):
        return

    # First try to adopt a group that may be running unseen: a new plan would stop its healthy workers.
    if find_phase(group) is GroupPhase.ADOPTING:
        adoption.try_to_adopt(group, now)

    # Then wait for the expected nodes: each node that connects after a plan would cause another plan.
    if rendezvous := group.rendezvous:
        until = rendezvous.ends_at(group.nodes.values(), group.settings)
        if until > now:
            if until < float("inf"):
                group.ask_review(until)
            # While a group may be running unseen, a leaving node may be its member and must not go.
            if rendezvous.adopts_until is None:
                release_leavers(group, now, staying=[])
            return
        adoption.give_up(group, rendezvous, now)

    # Compare the desired members with the current state; the event that led here does not matter.
    nodes, world = group.nodes.values(), group.world
    members = planning.choose_members(
        nodes, world=world, proposal=group.proposal, max_nodes=group.settings.max_nodes
    )
    if _is_settled(group, members, now):
        return

    # If there are too few nodes, none is in a group, and none may hold a state that only a plan can request,
    # there is nothing to plan.
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

    # This is the last check before workers are stopped: no worker of an older group may train concurrently
    # with the new group.
    if is_enough and (until := _wait_until(group, members, now)) > now:
        if until < float("inf"):
            group.ask_review(until)
        return
    _plan(group, members, now)


def _is_settled(group: Group, members: tuple[Node, ...], now: float) -> bool:
    """Return whether the running or planned group is already the desired group, or may stay for now."""
    world, proposal = group.world, group.proposal
    # If workers are in a generation above ours, a plan with a higher number is needed first.
    if any(node.group > group.generation for node in group.nodes.values()):
        return False
    # A plan stays valid while it has the right members, unless it is soft and must be hard now.
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

    # Only new members can wait. Do not disturb a group that is starting: its ``up`` requests a review.
    if not planning.is_growth(world, members):
        return False
    if not world.is_up:
        return True

    # With fresh workers, each join repeats the steps since the checkpoint. If the group still has fewer nodes
    # than expected, nodes join without a wait.
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
    """Return whether a plan must wait for a node's ``ready``.

    It must if the node's workers are in a group, or if the node is leaving and may hold the newest state.
    """
    may_hold = (
        group.settings.recovery == "in-process"
        and group.generation > 0
        and node.step is None
        and node.workers > 0
    )
    return node.group > 0 or (node.is_leaving and node.released_at is None and may_hold)


def _wait_until(group: Group, members: tuple[Node, ...], now: float) -> float:
    """Return the earliest time for a plan of ``members``; infinity if only an event can end the wait."""
    world, settings = group.world, group.settings
    group.fence_until = 0.0

    # If no planned member was in the old group, no node can confirm its end. Its workers stop by themselves
    # one lease after their last contact. Until then they may train and write.
    if world and not any(node.key in world.places for node in members):
        lost = planning.find_lost(world, group.nodes.values())
        contacts = [world.last_contact.get(key, now) for key in lost]
        group.fence_until = max(contacts, default=float("-inf")) + group.lease_end
    # The members need the state that a leaving node is saving; the end of this node requests a review.
    if group.departures.is_awaited(members):
        return float("inf")

    # If groups repeatedly break without training, the delay doubles with each plan.
    delay = 0.0
    if (excess := group.num_fruitless_plans - _FREE_PLANS) > 0:
        delay = min(
            _LONGEST_DELAY_SECONDS, settings.debounce_seconds * 2 ** min(excess, 16)
        )
    return max(group.fence_until, group.planned_at + delay)


def _plan(group: Group, members: tuple[Node, ...], now: float) -> None:
    """Announce a group of ``members`` with a new number, and start it immediately if all are ready."""
    world, nodes = group.world, group.nodes.values()
    cause, reason = planning.describe_change(world, members, nodes)
    # Count consecutive plans without training, which ``_wait_until`` delays. A group that trained resets it.
    has_trained = (
        world is not None
        and world.up_at is not None
        and (now - world.up_at > 10 or group.training.step > world.up_step)
    )
    group.num_fruitless_plans = 0 if has_trained else group.num_fruitless_plans + 1
    group.planned_at = now

    # The number must be durable before any node receives it, and above every number that any coordinator of
    # the run has issued. Otherwise two groups with one number could both be permitted to write.
    group.generation = max(group.newest_known, group.settings.epoch << 32) + 1
    group.effects.append(Persist(group.stored_generation, group.generation))
    group.stored_generation = group.generation

    # The plan waits for its members, and for nodes that may still train or hold the newest state.
    keys = tuple(node.key for node in members)
    waits_for = set(keys) | {node.key for node in nodes if _must_be_asked(group, node)}
    is_hard = planning.must_be_hard(world, nodes)
    # If too few members stay, all ranks save together before the group ends. Otherwise a single leaving node
    # would have to write the whole state within its grace period.
    is_short = len(members) < group.num_needed
    saves = not is_hard and is_short and any(node.is_leaving for node in nodes)
    proposal = Proposal(
        group.generation, keys, is_hard, cause, reason, now, waits_for, saves=saves
    )
    group.proposal = proposal
    group.log(
        "plan", hard=is_hard, members=len(keys), cause=cause, reason=reason, saves=saves
    )

    # Count the holders before the answers arrive: a worker with the only state must not be replaced.
    group.num_holders = sum(node.step is not None and node.step >= 0 for node in nodes)
    for node in nodes:
        node.ready = None
        announce(group, node, proposal)

    # If the plan waits for no node, no ``ready`` will arrive, so begin here.
    start_if_ready(group, now)
