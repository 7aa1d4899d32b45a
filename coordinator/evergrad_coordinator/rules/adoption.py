"""Adopts a running group that another coordinator has started, and handles members that were out of contact.

Pure functions.
"""

from evergrad_coordinator.protocol import Commit, Permit
from evergrad_coordinator.rules.changes import drop_node
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.planning import find_newest_running
from evergrad_coordinator.rules.rendezvous import Rendezvous
from evergrad_coordinator.rules.reports import handle_report
from evergrad_coordinator.rules.state import GroupWorld, Node

_LEASE_MARGIN_SECONDS = 1.0
"""Seconds by which a node's last contact may be older than the coordinator's record of it: two pings."""


def try_to_adopt(group: Group, now: float) -> None:
    """Adopt the newest group whose members are all connected, without stopping its workers.

    It does not matter which coordinator started the group. If a node moved from an older group to a newer
    one, its hello reports the place in the newer group. If an older group shares no member with a newer one,
    the older group has had no contact for a lease. Therefore the newest complete group is the running group.
    """
    rendezvous, world = group.rendezvous, group.world
    found = find_newest_running(group.nodes.values())
    # A group that is older than the newest known group is stale, even if it is complete.
    if rendezvous is None or found is None or found[0] < (world.generation if world else 0):
        return
    generation, places = found
    # Do not adopt a group that is known to be broken, because its members are about to leave it.
    if world and world.is_broken and world.generation == generation:
        return

    # If a plan was pending, its number stays the newest number. The plan is made again, and the group
    # continues until its step boundary.
    group.rendezvous = None
    group.generation = group.newest_known
    group.world = GroupWorld(generation, places, started_at=now, up_at=now, up=set(places))
    group.log("adopted", adopted=generation, nodes=len(places), worldSize=group.world.size)
    # If it is the group that was known, it is not a restart: only its connections were lost.
    if world is None or world.generation != generation:
        group.accounting.end(now=now)
    _answer_kept(group, rendezvous, now)


def give_up(group: Group, rendezvous: Rendezvous, now: float) -> None:
    """Stop waiting for a group to adopt: not all of its members have reconnected."""
    group.rendezvous = None
    world = group.world
    # If a connected member reports another place or none, its workers are not in the group any more.
    if world is not None and not world.is_over:
        world.is_broken = True
        world.out |= {
            node.key
            for node in group.nodes.values()
            if node.key in world.places and node.group != world.generation
        }
    _answer_kept(group, rendezvous, now)


def answer_commit(group: Group, node: Node, message: Commit) -> None:
    """Answer whether a generation may write.

    While a group may be adopted, the answer is delayed until the decision.
    """
    # A refusal now could cancel a save of a group that is adopted a moment later. A permission could lead to
    # two writers.
    if find_phase(group) is GroupPhase.ADOPTING and group.rendezvous:
        group.rendezvous.commits[node.peer] = message
        return

    # The running generation may write unless a hard plan is pending, because its members may already be out
    # of it. A leaving node may write the state that it was asked to save.
    world, generation = group.world, message.generation
    is_running = (
        world is not None
        and not world.is_over
        and world.generation == generation
        and node.key in world.places
    )
    is_granted = group.departures.may_commit(node, generation) or (
        is_running and not (group.proposal and group.proposal.hard)
    )
    group.send(node.peer, Permit(request=message.request, granted=is_granted))


def _answer_kept(group: Group, rendezvous: Rendezvous, now: float) -> None:
    """Handle the questions and reports that arrived while the adoption of their group was undecided."""
    # A report may drop a node or end the run. Therefore iterate over copies and check before each report.
    for node in list(group.nodes.values()):
        if (commit := rendezvous.commits.get(node.peer)) is not None:
            answer_commit(group, node, commit)
        reports, node.early = list(node.early.values()), {}
        for report in reports:
            if not group.finished:
                handle_report(group, node, report, now)


def drop_others(group: Group, member: Node, now: float) -> None:
    """Drop nodes whose fingerprint differs from the fingerprint of a member of the running group.

    Such nodes connected before the first member. They receive the reason when they reconnect.
    """
    for node in list(group.nodes.values()):
        if node.fingerprint != member.fingerprint:
            drop_node(group, node, "differs from the group that runs", now)


def note_absence(group: Group, node: Node, seconds: float) -> None:
    """Record a member that was out of contact for nearly a lease or longer. ``seconds``: its absence.

    Its workers may have stopped by themselves, with the same exit code as after a requested stop.
    """
    world = group.world
    if (
        world
        and node.key in world.places
        and seconds > max(group.settings.lease_seconds - _LEASE_MARGIN_SECONDS, 0)
    ):
        world.unwatched.add(node.key)
