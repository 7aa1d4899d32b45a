"""How a coordinator takes over a group that it has not begun, and what it assumes of nodes without contact.
Pure functions."""

from evergrad_coordinator.protocol import Commit, Permit
from evergrad_coordinator.rules.changes import drop_node
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.planning import find_newest_running
from evergrad_coordinator.rules.rendezvous import Rendezvous
from evergrad_coordinator.rules.reports import handle_report
from evergrad_coordinator.rules.state import GroupWorld, Node

_LEASE_MARGIN_SECONDS = 1.0
"""A node's last contact may be that much older than the coordinator's, which is two pings."""


def try_to_adopt(group: Group, now: float) -> None:
    """Take over the newest group whose members are all here, whichever coordinator began it: no worker of it
    stops.

    A node that went from an older group to a newer one says so by the place it had, and an older group that
    shares no member with a newer one has had no contact for a lease. The newest one that is whole is the one
    that runs.
    """
    rendezvous, world = group.rendezvous, group.world
    found = find_newest_running(group.nodes.values())
    # Below the newest group that is known here, even a whole one is stale.
    if rendezvous is None or found is None or found[0] < (world.generation if world else 0):
        return
    generation, places = found
    # A group that is known to have broken is not taken up again: its members are about to leave it.
    if world and world.is_broken and world.generation == generation:
        return

    # A plan that was in the air stays the newest number: it is made anew, and the group goes on until its
    # boundary.
    group.rendezvous = None
    group.generation = group.newest_known
    group.world = GroupWorld(generation, places, started_at=now, up_at=now, up=set(places))
    group.log("adopted", adopted=generation, nodes=len(places), worldSize=group.world.size)
    group.accounting.end(now=now)
    _answer_kept(group, rendezvous, now)


def give_up(group: Group, rendezvous: Rendezvous, now: float) -> None:
    """Wait no longer: the group that ran, if there was one, is not whole."""
    group.rendezvous = None
    world = group.world
    # Members that are here with another place, or none, show that their workers are out of it.
    if world is not None and not world.is_over:
        world.is_broken = True
        world.out |= {
            node.key
            for node in group.nodes.values()
            if node.key in world.places and node.group != world.generation
        }
    _answer_kept(group, rendezvous, now)


def answer_commit(group: Group, node: Node, message: Commit) -> None:
    """Answer whether a generation may write; while one may be adopted, as soon as that is known."""
    # A refusal now would cost the save of a group that goes on in a moment, and a permission two writers.
    if find_phase(group) is GroupPhase.ADOPTING and group.rendezvous:
        group.rendezvous.commits[node.peer] = message
        return

    # The running generation may write unless a hard plan is pending: its members may be out of it already. A
    # leaving node may write what it was told to save.
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
    """Take up the questions and reports that came while nobody knew whether their group goes on."""
    # A report may drop a node or end the run, hence the copies and the look before each.
    for node in list(group.nodes.values()):
        if (commit := rendezvous.commits.get(node.peer)) is not None:
            answer_commit(group, node, commit)
        reports, node.early = list(node.early.values()), {}
        for report in reports:
            if not group.finished:
                handle_report(group, node, report, now)


def drop_others(group: Group, member: Node, now: float) -> None:
    """Drop nodes that came before the first member of the group and differ from it.

    They are told why when they come again.
    """
    for node in list(group.nodes.values()):
        if node.fingerprint != member.fingerprint:
            drop_node(group, node, "differs from the group that runs", now)


def note_absence(group: Group, node: Node, seconds: float) -> None:
    """Note a member that was away for nearly a lease: its workers may have ended by themselves, as if they
    had been asked to."""
    world = group.world
    if (
        world
        and node.key in world.places
        and seconds > max(group.settings.lease_seconds - _LEASE_MARGIN_SECONDS, 0)
    ):
        world.unwatched.add(node.key)
