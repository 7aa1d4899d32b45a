"""Events from outside: hellos, messages, lost connections, time. Each function returns the effects, in their
order.

No clock, no sockets, no randomness: the same events give the same effects. The effects of an event depend on
the phase (``phase.find_phase``; it is computed, never stored):

=========  =========================  ============================  ==================  =====================
phase      hello                      a member is lost, or broken   leaving, capacity   report of the group
=========  =========================  ============================  ==================  =====================
adopting   with the place it had;     waits for the group           waits for the       kept until the group
           once the places of the                                   group               is adopted
           newest group cover all
           ranks: running (a lease
           ends it: waiting)
rendezvous all expected: preparing    counts for nothing            may go              ignored: there is none
waiting    enough: preparing          counts for nothing            may go; one saves   ignored
preparing  member: asked again        planned anew without it       planned anew        ignored
draining   spare until the next       preparing: nobody waits       planned anew        noted
           group                      for steps
starting   waits for ``up``           broken                        after ``up``        ``up`` of all: running
running    draining, or held back     broken; its cause is counted  draining            noted; done or result:
                                                                                        over
broken     preparing                  noted                         preparing           ignored
over       told the end               --                            --                  --
=========  =========================  ============================  ==================  =====================

A plan makes preparing or draining; ``ready`` of all members makes starting; all connections lost at once make
adopting.
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
"""Longest time between two ticks."""
STANDSTILL_SECONDS = 4 * TICK_SECONDS
"""Time between two ticks beyond which this process itself did not run: messages that came meanwhile are still
unread, and silence means nothing."""


def on_hello(group: Group, peer: int, hello: Hello, *, now: float) -> list[Effect]:
    """Take the first message of a connection: refuse the node, or take it in, in the place of the connection
    or process that it had before."""
    is_adopting = find_phase(group) is GroupPhase.ADOPTING
    refusal = group.members.refuse(hello, finished=group.finished, is_adopting=is_adopting)
    if refusal is not None:
        group.send(peer, refusal)
        group.close(peer, refusal.reason)
        group.log("refused", node=hello.node[:64], reason=refusal.reason)
        return _take_effects(group, now)
    # No refusal: the node is well, and finds the later coordinator when it connects again.
    if group.members.is_superseded_by(hello):
        group.close(peer, "superseded")
        group.log("superseded", node=hello.node[:64], known=hello.known_generation)
        return _take_effects(group, now)

    # The same process on a new connection was never away; another process of the node replaces the old one.
    older, was_seen = group.members.claim(hello), now
    if older is not None and older.incarnation == hello.incarnation:
        group.close(older.peer, "reconnected")
        group.members.remove(older)
        was_seen = older.seen
    elif older is not None:
        group.send(older.peer, REPLACED)
        drop_node(group, older, "replaced", now)
    # The process that was replaced may have been the last one, and leaving: that ends the run.
    if group.finished:
        group.send(peer, group.finished)
        group.close(peer, "finished")
        return _take_effects(group, now)

    # A reconnected node may have been away for long enough that its workers have ended by their lease.
    node = group.members.add(peer, hello, now=now)
    if group.world:
        was_seen = group.world.last_contact.pop(node.key, was_seen)
    adoption.note_absence(group, node, now - was_seen)
    adoption.drop_others(group, node, now)

    # The next number goes above every one that a node knows: it would ignore a plan below.
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

    # A node that is back may show that a break was silence and no loss. The plan that it missed follows the
    # welcome: a client answers nothing before that.
    group.budget.note_return(node.key, group.training)
    _catch_up(group, node, now)
    if group.rendezvous and node.is_candidate and group.rendezvous.first_seen is None:
        group.rendezvous.first_seen = now
    group.change(now)
    return _take_effects(group, now)


def on_message(group: Group, peer: int, message: Message, *, now: float) -> list[Effect]:
    """Take any later message. A ``ping`` counts as contact; the edge answers it."""
    node = group.members.peers.get(peer)
    if node is None or group.finished:
        return _take_effects(group, now)

    # The absence is measured before the contact counts: a lease may have ended in it.
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
    """Take a sign of the process beside a node's own: the node is there, however slow it is."""
    node = group.nodes.get(key[0])
    if node is not None and node.key == key:
        node.beat_at = now


def on_lost(group: Group, peer: int, why: str, *, now: float) -> list[Effect]:
    """Take the end of a connection."""
    node = group.members.peers.get(peer)
    if node is not None:
        remove_node(group, node, why, now)
    return _take_effects(group, now)


def on_tick(group: Group, *, now: float) -> list[Effect]:
    """Take the passing of time: limits are checked, and a review that is due is made."""
    gap, group.ticked_at = now - group.ticked_at, now
    if group.finished:
        return _take_effects(group, now)

    # Silence means nothing then. The leases went on all the same.
    if gap > STANDSTILL_SECONDS:
        for node in group.nodes.values():
            adoption.note_absence(group, node, now - node.seen)
            # Not into the future: what had come meanwhile may have been read before this tick.
            node.seen = min(node.seen + gap, now)
            node.beat_at = min(node.beat_at + gap, now)

    # Limits first: what they drop or break is part of what the review sees.
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
    """Take other limits (None: as before); a group that runs is changed at its next step
    boundary, if at all."""
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
    """When the next tick is due."""
    if group.review_at is None or group.finished:
        return now + TICK_SECONDS
    return min(group.review_at, now + TICK_SECONDS)


def _take_effects(group: Group, now: float) -> list[Effect]:
    # The time up to this event belongs to what was before it.
    time_accounting.advance(group, now=now)
    effects, group.effects = group.effects, []
    return effects


def _catch_up(group: Group, node: Node, now: float) -> None:
    """Send a node what it missed before it came, or came back, and note what it lost meanwhile."""
    world, proposal = group.world, group.proposal
    is_member = world is not None and node.key in world.places and node.key not in world.out
    # A member that is back without its place has no workers in the group any more. While the group may be
    # adopted, the other members can still prove that a newer one runs.
    if (
        world
        and is_member
        and not group.rendezvous
        and not planning.holds_its_place(world, node)
    ):
        world.out.add(node.key)
        world.is_broken = True
        group.accounting.begin("node_lost", at=now)

    # Whatever it answered before its connection ended may be lost: it is asked again.
    if proposal:
        if node.key in proposal.members or node.group:
            proposal.waits_for.add(node.key)
        announce(group, node, proposal)
    # Workers of an older group wait for members that are elsewhere, and would wait for ever.
    elif world and not world.is_over and 0 < node.group < world.generation:
        replaced = Plan(
            world.generation,
            hard=True,
            is_member=False,
            reason="this group has been replaced",
        )
        group.send(node.peer, replaced)
