"""Carries out changes of a group: a node leaves, a generation breaks, a plan is announced and begins, the run
ends. Pure functions.

Other modules decide on the change: ``review`` compares the group with its settings, ``reports`` and
``limits`` detect failures, and ``events`` receives messages.
"""

from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import End, Leave, Plan
from evergrad_coordinator.rules import planning
from evergrad_coordinator.rules.budget import GenerationFailure, describe_worker
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.rendezvous import JoinHold, Rendezvous
from evergrad_coordinator.rules.state import Finish, GroupWorld, Node, Proposal

# ---- a node goes -------------------------------------------------------------------------------------------


def drop_node(group: Group, node: Node, why: str, now: float) -> None:
    """End a node's connection; it counts as lost."""
    group.close(node.peer, why)
    remove_node(group, node, why, now)


def remove_node(group: Group, node: Node, why: str, now: float) -> None:
    """Record that a node is no longer connected, and update its group."""
    group.members.remove(node)
    group.log("gone", node=node.name, why=why)
    _record_loss(group, node, why, now)
    group.departures.note_gone(node)

    # If this node is not a member of the plan, the plan continues without it. Otherwise a review makes a new
    # plan.
    world, proposal = group.world, group.proposal
    if proposal and node.key not in proposal.members:
        proposal.waits_for.discard(node.key)
    if world and not world.is_over and node.key in world.lost:
        group.hasten(now)
    else:
        group.change(now)

    if not group.nodes:
        _wait_for_nodes(group, node, now)
        _finish_if_left(group)
    elif proposal and not proposal.waits_for:
        start_if_ready(group, now)


def _record_loss(group: Group, node: Node, why: str, now: float) -> None:
    """Record what the newest group loses with ``node``: a member, and the time until the next step."""
    world = group.world
    if world is None or node.key not in world.places:
        return
    # A member that leaves on request is not lost, and neither is a member whose workers have ended with 0.
    if node.key not in world.done:
        world.has_left |= node.is_leaving
        world.lost |= set() if node.is_leaving else {node.key}
    # Its workers may still train, so no new group begins before their lease, counted from the last contact,
    # has ended.
    if node.key not in world.out:
        world.last_contact[node.key] = node.seen
        if not (world.is_over or group.finished or node.key in world.done):
            group.accounting.begin("node_lost", at=node.seen if why == "silent" else now)


def _wait_for_nodes(group: Group, last: Node, now: float) -> None:
    """Wait for nodes again, after the ``last`` node of the group has gone."""
    group.proposal = None
    group.departures.was_left = last.is_leaving or last.released_at is not None
    is_gone = group.world is None or group.world.places.keys() <= group.world.out
    # If all connections end together, our network has probably failed, not every node. They may reconnect.
    adopts_until = None if is_gone else now + group.lease_end
    if group.world is None and group.rendezvous is not None:
        # A group that may still be running does not end because the only node seen so far is gone again.
        adopts_until = group.rendezvous.adopts_until
    group.rendezvous = Rendezvous(adopts_until)
    if group.world:
        group.world.is_over |= is_gone
        # Nodes that come now start from a checkpoint, and nothing that ended before counts as done.
        group.world.done.clear()
    group.log("empty", wasLeft=group.departures.was_left)


def _finish_if_left(group: Group) -> None:
    """End a local run whose nodes have all left on request.

    Its exit code reports whether the newest state is on the disk.
    """
    if not group.settings.exit_when_empty or not group.departures.was_left:
        return
    if group.finished is not None:
        return
    # Fresh workers hold no state that their script has not saved.
    held = max(group.members.steps.values(), default=-1)
    is_saved = group.settings.recovery == "fresh" or group.departures.saved_step >= held
    code = ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED
    finish(group, code, "stopped", "all nodes have left")


def release_leavers(group: Group, now: float, *, staying: list[Node] | None) -> None:
    """Let leavers go that are in no group.

    ``staying`` are the nodes that continue; None if a group runs, because it holds the state.
    """
    departures = group.departures
    leavers = [
        node
        for node in group.nodes.values()
        if node.is_leaving and node.released_at is None and node.group == 0
    ]
    # If no other node holds the state, one leaver saves it. Fresh workers hold no state in memory, because
    # their script saves it.
    if (
        staying is not None
        and departures.saver is None
        and group.settings.recovery == "in-process"
    ):
        saver = planning.choose_saver(
            leavers, staying=staying, saved_step=departures.saved_step
        )
        if saver is not None:
            departures.saver, departures.saving_generation = saver.key, group.generation

    # Sent once for each connection: a saver that reconnects is asked to save again.
    for node in leavers:
        node.released_at = now
        is_saver = node.key == departures.saver
        group.send(node.peer, Leave(group.generation, save=is_saver))
        group.log("leave", node=node.name, save=is_saver)


# ---- a generation breaks, or the run ends ------------------------------------------------------------------


def break_world(group: Group, failure: GenerationFailure, *, now: float) -> None:
    """Record that the newest generation cannot continue, and count the cause."""
    world = group.world
    if world is None:
        return
    report = failure.report
    # The steps before this failure are progress since the last one. They are taken before the failure counts.
    group.budget.progress.note_step(report.step, is_whole=group.is_whole)
    world.is_broken = True
    # The first report that is not a consequence names the cause; later reports follow from it.
    if not failure.is_consequence and not world.broken_by:
        world.break_cause = failure.cause
        who = describe_worker(report)
        world.broken_by = f"{who} of node {failure.node} broke: {failure.cause}"

    # Also for a report that comes late: the budget finds the root cause among all of them.
    group.accounting.begin(failure.cause, at=failure.at)
    group.budget.report(failure, group.training)
    group.change(now)


def finish(group: Group, exit_code: int, reason: str, message: str = "") -> None:
    """End the run for all."""
    # Kept so that nodes that connect later receive the same message.
    group.finished = End(exit_code=exit_code, reason=reason, message=message)
    for node in group.nodes.values():
        group.send(node.peer, group.finished)
    group.log("finished", exitCode=exit_code, reason=reason, message=message)
    group.effects.append(Finish(exit_code))


def finish_if_exhausted(group: Group) -> bool:
    """End the run if its generations broke more than the allowed number of times. Returns whether it did."""
    if group.budget.is_exhausted:
        finish(group, ExitCode.INTERNAL, "FailuresWithoutProgress", group.budget.describe())
    return group.budget.is_exhausted


# ---- a plan is announced, and begins -----------------------------------------------------------------------


def announce(group: Group, node: Node, proposal: Proposal) -> None:
    """Send a node its part of the plan.

    Workers that are not in the running group have no step boundary to wait for.
    """
    is_hard = proposal.hard or (node.group > 0 and not has_boundary_ahead(group, node))
    plan = Plan(
        proposal.generation,
        hard=is_hard,
        is_member=node.key in proposal.members,
        reason=proposal.reason,
        is_only_holder=group.num_holders <= int(node.step is not None and node.step >= 0),
        patience_seconds=planning.choose_patience(proposal, group.settings),
        saves=proposal.saves and not is_hard,
        cause=proposal.cause,
    )
    group.send(node.peer, plan)


def has_boundary_ahead(group: Group, node: Node) -> bool:
    """Return whether a node's workers are in the running group and can reach a step boundary.

    Any other group cannot, because its workers wait for members that have left it.
    """
    world = group.world
    return (
        node.group > 0
        and world is not None
        and not world.is_over
        and node.group == world.generation
    )


def start_if_ready(group: Group, now: float) -> None:
    """If all nodes of the plan are ready, let leavers go, and begin if there are enough members."""
    proposal = group.proposal
    if proposal is None or proposal.waits_for or group.finished:
        return

    # If a member went away, came back as another process or cannot take part, make a new plan.
    members = [group.nodes[name] for name, _ in proposal.members if name in group.nodes]
    are_same = tuple(node.key for node in members) == proposal.members
    if not are_same or not all(planning.takes_part(node, proposal) for node in members):
        group.change(now)
        return

    # Leavers go before the group begins, because it may have to wait for the leaver that saves.
    is_enough = len(members) >= group.num_needed
    release_leavers(group, now, staying=members if is_enough else [])
    if not is_enough:
        group.proposal = None
        if group.world:
            group.world.is_over = True
        group.log("waiting", ready=len(members), needed=group.num_needed)
        return
    if group.departures.is_awaited(members):
        return

    # Only now is the end of the old group certain: each of its members has answered, or was lost.
    if group.world and (
        ending := planning.find_break(group.world, group.nodes.values(), now=now)
    ):
        group.budget.conclude(ending, group.training)
    if finish_if_exhausted(group):
        return
    _begin_group(group, members, now)


def _begin_group(group: Group, members: list[Node], now: float) -> None:
    """Make ``members`` the newest group, and send each of them its place."""
    # From here on the group exists: reports about it count, and reports about older ones do not.
    places = planning.assign_places(members)
    group.world = GroupWorld(group.generation, places, started_at=now)
    group.proposal, group.rendezvous, group.joins = None, None, JoinHold()
    group.members.steps.clear()
    group.log("go", nodes=len(places), worldSize=group.world.size)
    for node, message in planning.build_go(group.generation, members, places):
        node.group, node.had = group.generation, None
        group.send(node.peer, message)
