"""Determines the use of each node's time from the state of the group. Pure.

Every node that could train has exactly one use at a time. An event ends one interval and starts the next:

================================================  =================  =======
state of the group                                member, or planned  others
================================================  =================  =======
over                                              end                end
adopting: nodes that name a place they have       training           waiting
running or draining, whole and not broken         training, repeated idle
fewer nodes are here than are needed              waiting            waiting
rendezvous, waiting                               waiting            waiting
any other: a plan, a start, a group that broke    recovery           idle
the same before any group has been up             startup            idle
================================================  =================  =======

A node that may go has the use ``end``. The leaving node that saves the newest state has the use ``saving``.
"""

from typing import Final

from evergrad_common.causes import Use
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.ledger import OPEN
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.planning import find_lost
from evergrad_coordinator.rules.state import Node

_UP: Final = (GroupPhase.RUNNING, GroupPhase.DRAINING)
_WAITING: Final = (GroupPhase.RENDEZVOUS, GroupPhase.WAITING)
RECOUNT_SECONDS: Final = 0.25
"""Minimum seconds between two counts of the nodes within a phase.

If nodes were counted at each event, a thousand nodes that connect together would be counted a thousand times.
"""


def advance(group: Group, *, now: float) -> None:
    """Count the time since the last event, and determine each node's use from now on. ``now``: seconds."""
    ledger, training = group.ledger, group.training
    ledger.close_interval(now=now)

    # When training reaches the highest step again, the following steps are new and not repeated.
    phase = find_phase(group)
    is_caught_up = "repeated" in ledger.nodes and training.step >= ledger.highest_step
    ledger.highest_step = max(ledger.highest_step, training.step)
    is_same = phase is ledger.phase and not is_caught_up
    if is_same and now - ledger.recounted_at < RECOUNT_SECONDS:
        return

    # A step needs every rank. If one is missing, the group does not train, even if it has not broken yet.
    world = group.world
    trains = (
        phase in _UP
        and world is not None
        and not world.is_broken
        and not find_lost(world, group.nodes.values())
        and world.out <= world.done
    )
    # An outage ends with the run. It also ends if the group trains although no new group is up: a member's
    # connection was lost, and the member is back before a plan was made.
    if trains or phase is GroupPhase.OVER:
        group.accounting.cancel(now=now)
    if not trains:
        # After training has stopped, no report can claim earlier time any more.
        ledger.settle()
    ledger.has_formed = ledger.has_formed or trains
    ledger.phase, ledger.recounted_at = phase, now

    # In some phases, all nodes that neither leave nor save have the same use.
    is_short = sum(node.is_candidate for node in group.nodes.values()) < group.num_needed
    of_all: Use | None = None
    if phase is GroupPhase.OVER:
        of_all = "end"
    elif phase in _WAITING or (
        is_short and not trains and phase is not GroupPhase.ADOPTING
    ):
        of_all = "waiting"

    joined: dict[str, float] = {}
    nodes: dict[Use, int] = {}
    is_repeated = training.step < ledger.highest_step
    for node in group.nodes.values():
        # Until a node has workers, its pod is starting. The operator counts this time.
        if node.workers == 0 and node.address not in ledger.joined:
            continue
        # If a node's hello contains its place, the node trained before this coordinator started.
        first = ledger.began_at if node.had else now
        joined[node.address] = ledger.joined.get(node.address, first)
        use = _find_use(group, node, of_all, trains=trains)
        if use in OPEN and is_repeated:
            use = "repeated"
        nodes[use] = nodes.get(use, 0) + 1
    ledger.nodes, ledger.joined = nodes, joined


def _find_use(group: Group, node: Node, of_all: Use | None, *, trains: bool) -> Use:
    """Return the use of a node. ``of_all``: common use of all nodes that neither leave nor save, if any."""
    world, proposal = group.world, group.proposal
    if of_all == "end":
        return "end"
    if group.departures.saver == node.key:
        return "saving"
    if node.is_done or node.released_at is not None:
        return "end"
    if of_all is not None:
        return of_all
    if group.rendezvous is not None:
        # The node's group may be running although it has not been adopted yet.
        return "training" if node.had else "waiting"

    is_member = world is not None and node.key in world.places and not world.is_over
    if trains:
        is_in = world is not None and is_member and node.key not in world.out
        return "training" if is_in else "idle"
    is_planned = proposal is not None and node.key in proposal.members
    if not (is_member or is_planned):
        return "idle"
    return "recovery" if group.ledger.has_formed else "startup"
