"""Handles events from outside: hellos, messages, lost connections and time.

Each function returns the effects in the order in which the edge must carry them out. There is no clock, no
socket and no randomness, so the same events give the same effects. The effects of an event depend on the
phase (``phase.find_phase``; it is computed, never stored):

=========  =========================  ============================  ==================  =====================
phase      hello                      a member is lost, or broken   leaving, capacity   report of the group
=========  =========================  ============================  ==================  =====================
adopting   with the place it had;     waits for the group           waits for the       kept until the group
           once the places of the                                   group               is adopted
           newest group cover all
           ranks: running (a lease
           ends it: waiting)
rendezvous all expected: preparing    does not count                may go              ignored: there is none
waiting    enough: preparing          does not count                may go; one saves   ignored
preparing  member: asked again        planned again without it      planned again       ignored
draining   spare until the next       preparing: no wait for a      planned again       recorded
           group                      step boundary
starting   waits for ``up``           broken                        after ``up``        ``up`` of all: running
running    draining, or held back     broken; its cause is counted  draining            recorded; done or
                                                                                        result: over
broken     preparing                  recorded                      preparing           ignored
over       receives the end           --                            --                  --
=========  =========================  ============================  ==================  =====================

A plan starts the phase preparing or draining. When all members have sent ``ready``, the phase is starting. If
all connections are lost together, the phase is adopting.
"""

import dataclasses

from evergrad_coordinator.protocol import Commit, Hello, Message, Ping, Plan, Welcome
from evergrad_coordinator.rules import adoption, planning, time_accounting
from evergrad_coordinator.rules.changes import announce, drop_node, remove_node
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.limits import check_limits
from evergrad_coordinator.rules.members import REPLACED
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.reports import handle_report
from evergrad_coordinator.rules.review import review
from evergrad_coordinator.rules.state import Effect, Key, Node

TICK_SECONDS = 0.25
"""Maximum seconds between two ticks."""
STANDSTILL_SECONDS = 4 * TICK_SECONDS
"""Seconds between two ticks above which this process itself was not running.

Messages that arrived in this time are not read yet, so a node that seems silent may not be silent.
"""


def on_hello(group: Group, peer: int, hello: Hello, *, now: float) -> list[Effect]:
    """Handle the first message of a connection: refuse the node or add it.

    An accepted node replaces its earlier connection or process.
    """
    is_adopting = find_phase(group) is GroupPhase.ADOPTING
    refusal = group.members.refuse(hello, finished=group.finished, is_adopting=is_adopting)
    if refusal is not None:
        group.send(peer, refusal)
        group.close(peer, refusal.reason)
        group.log("refused", node=hello.node[:64], reason=refusal.reason)
        return _take_effects(group, now)
    # Close the connection without a refusal: the node is valid, and finds the later coordinator when it
    # reconnects.
    if group.members.is_superseded_by(hello):
        group.close(peer, "superseded")
        group.log("superseded", node=hello.node[:64], known=hello.known_generation)
        return _take_effects(group, now)

    # If the same process reconnects, it counts as present all the time. Another process of the node replaces
    # the old process.
    older, was_seen = group.members.claim(hello), now
    if older is not None and older.incarnation == hello.incarnation:
        group.close(older.peer, "reconnected")
        group.members.remove(older)
        was_seen = older.seen
    elif older is not None:
        group.send(older.peer, REPLACED)
        drop_node(group, older, "replaced", now)
    # If the replaced process was the last node and was leaving, its removal has ended the run.
    if group.finished:
        group.send(peer, group.finished)
        group.close(peer, "finished")
        return _take_effects(group, now)

    # The node may have been away so long that its workers have stopped at the end of their lease.
    node = group.members.add(peer, hello, now=now)
    if group.world:
        was_seen = group.world.last_contact.pop(node.key, was_seen)
    adoption.note_absence(group, node, now - was_seen)
    adoption.drop_others(group, node, now)

    # The next number must be above every number that a node has received, or the node ignores the plan.
    group.heard_generation = max(group.heard_generation, hello.known_generation, node.group)
    group.log("hello", node=node.name, workers=node.workers, had=node.group)
    settings = group.settings
    welcome = Welcome(
        group.generation,
        settings.lease_seconds,
        settings.silence_seconds,
        takes_restoring=True,
    )
    group.send(peer, welcome)

    # A returning node may show that the last break was a silence and not a loss. Send the plan that the node
    # missed after the welcome, because a client does not answer before the welcome.
    group.budget.note_return(node.key, group.training)
    _catch_up(group, node, now)
    if group.rendezvous and node.is_candidate and group.rendezvous.first_seen is None:
        group.rendezvous.first_seen = now
    group.change(now)
    return _take_effects(group, now)


def on_message(group: Group, peer: int, message: Message, *, now: float) -> list[Effect]:
    """Handle any later message of a connection. A ``ping`` counts as contact; the edge answers it."""
    node = group.members.peers.get(peer)
    if node is None or group.finished:
        return _take_effects(group, now)

    # Measure the absence before this contact counts, because a lease may have ended during the absence.
    adoption.note_absence(group, node, now - node.seen)
    node.seen = now
    if isinstance(message, Ping):
        return []
    if isinstance(message, Commit):
        adoption.answer_commit(group, node, message)
    else:
        handle_report(group, node, message, now)
    return _take_effects(group, now)


def on_beat(group: Group, key: Key, *, now: float) -> None:
    """Record a beat of a node's helper process: the node is alive, even if its own process is slow."""
    node = group.nodes.get(key[0])
    if node is not None and node.key == key:
        node.beat_at = now


def on_lost(group: Group, peer: int, why: str, *, now: float) -> list[Effect]:
    """Handle the end of a connection."""
    node = group.members.peers.get(peer)
    if node is not None:
        remove_node(group, node, why, now)
    return _take_effects(group, now)


def on_tick(group: Group, *, now: float) -> list[Effect]:
    """Handle the passing of time: check the limits, and make a review if one is due."""
    gap, group.ticked_at = now - group.ticked_at, now
    if group.finished:
        return _take_effects(group, now)

    # This process was not running, so do not count the gap as silence of the nodes. Their leases continued to
    # run out during the gap.
    if gap > STANDSTILL_SECONDS:
        for node in group.nodes.values():
            adoption.note_absence(group, node, now - node.seen)
            # Use at most ``now``, because messages of the gap may have been read before this tick.
            node.seen = min(node.seen + gap, now)
            node.beat_at = min(node.beat_at + gap, now)

    # Check the limits first, so that the review takes dropped nodes and broken groups into account.
    check_limits(group, now)
    if group.review_at is not None and group.review_at <= now and not group.finished:
        review(group, now)
    return _take_effects(group, now)


def set_bounds(
    group: Group,
    *,
    min_nodes: int,
    max_nodes: int,
    max_failures: int | None = None,
    now: float,
) -> list[Effect]:
    """Set new bounds. If ``max_failures`` is None, the limit of failures stays as it is.

    If the bounds require another group, a running group changes at its next step boundary.
    """
    settings = group.settings
    if max_failures is not None and max_failures != group.budget.limit:
        group.budget.limit = max_failures
        group.log("bounds", maxFailures=max_failures)
        group.change(now)
    if (min_nodes, max_nodes) != (settings.min_nodes, settings.max_nodes):
        group.settings = dataclasses.replace(
            settings, min_nodes=min_nodes, max_nodes=max_nodes, expect=max_nodes
        )
        group.log("bounds", min=min_nodes, max=max_nodes)
        group.change(now)
    return _take_effects(group, now)


def next_tick(group: Group, *, now: float) -> float:
    """Return the time of the next tick."""
    if group.review_at is None or group.finished:
        return now + TICK_SECONDS
    return min(group.review_at, now + TICK_SECONDS)


def _take_effects(group: Group, now: float) -> list[Effect]:
    # The time up to this event is counted for the state before the event.
    time_accounting.advance(group, now=now)
    effects, group.effects = group.effects, []
    return effects


def _catch_up(group: Group, node: Node, now: float) -> None:
    """Send a new or returning node the plan that it missed, and record it if its workers are gone."""
    world, proposal = group.world, group.proposal
    is_member = world is not None and node.key in world.places and node.key not in world.out
    # If a member returns without its place, it has no workers in the group any more. Do not conclude this
    # while the group may be adopted: other members can still report a newer group that runs.
    if (
        world
        and is_member
        and not group.rendezvous
        and not planning.holds_its_place(world, node)
    ):
        world.out.add(node.key)
        world.is_broken = True
        group.accounting.begin("node_lost", at=now)

    # Ask the node again, because its earlier answer may have been lost with its connection.
    if proposal:
        if node.key in proposal.members or node.group:
            proposal.waits_for.add(node.key)
        announce(group, node, proposal)
    # Workers of an older group would wait forever for members that are in another group.
    elif world and not world.is_over and 0 < node.group < world.generation:
        replaced = Plan(
            world.generation,
            hard=True,
            is_member=False,
            reason="this group has been replaced",
        )
        group.send(node.peer, replaced)
