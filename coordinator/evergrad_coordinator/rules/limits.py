"""Checks the time limits of silence, of answers to a plan, of starts and of leaving nodes. Pure functions."""

from evergrad_coordinator.protocol import Broken
from evergrad_coordinator.rules.budget import GenerationFailure
from evergrad_coordinator.rules.changes import break_world, drop_node, has_boundary_ahead
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.state import Proposal, node_order


def check_limits(group: Group, now: float) -> None:
    """Drop nodes and break groups that have exceeded a time limit."""
    silence, leaving = group.settings.silence_seconds, group.settings.soft_limit_seconds
    for node in list(group.nodes.values()):
        # A node that sends beats is slow, not lost. But if its own connection has been silent for a lease,
        # its workers have stopped by themselves.
        if now - max(node.seen, node.beat_at) > silence or now - node.seen > max(
            group.lease_end, silence
        ):
            drop_node(group, node, "silent", now)
        elif node.released_at is not None and now - node.released_at > leaving:
            drop_node(group, node, "was asked to leave and did not", now)

    # Check the answers to the plan after the drops, because a plan does not wait for dropped nodes.
    if group.proposal:
        _check_answers(group, group.proposal, now)

    # A started group must come up. Reading or transferring a large state may take long, so the limit counts
    # from the last growth of a member's state.
    world, limit = group.world, group.settings.up_limit_seconds
    if (
        world is None
        or world.is_up
        or world.is_over
        or world.is_broken
        or now - max(world.started_at, world.moved_at) <= limit
    ):
        return
    missing = min((name for name, _ in world.places.keys() - world.up), key=node_order)
    since = "its start" if not world.moved else "the last growth of a member's state"
    text = (
        f"the group was not complete {limit:g} s after {since}: node {missing} was not up"
    )
    report = Broken(
        world.generation, "setup_failed", step=group.training.step, message=text
    )
    break_world(group, GenerationFailure(missing, now, report), now=now)


def _check_answers(group: Group, proposal: Proposal, now: float) -> None:
    """Drop nodes that do not answer a plan.

    If the running group does not reach a step boundary in time, the plan becomes hard instead.
    """
    settings, waited = group.settings, now - proposal.made_at
    # This runs at each tick, and most plans are answered long before the shorter limit.
    if waited <= min(settings.ready_limit_seconds, settings.soft_limit_seconds):
        return
    for name, incarnation in list(proposal.waits_for):
        node = group.nodes.get(name)
        if node is None or node.incarnation != incarnation:
            continue
        # A group that stops at a step boundary gets the time of a step. A node that is not in the running
        # group has no step to finish.
        is_patient = not proposal.hard and has_boundary_ahead(group, node)
        if waited <= (
            settings.soft_limit_seconds if is_patient else settings.ready_limit_seconds
        ):
            continue
        # Make a hard plan instead of dropping the node: the node may be healthy and its step too long.
        if is_patient and group.world:
            group.world.is_broken = True
            group.change(now)
            return
        drop_node(group, node, "not ready in time", now)
