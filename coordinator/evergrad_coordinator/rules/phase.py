"""Computes the phase of a run's group from its state. Pure."""

from enum import Enum

from evergrad_coordinator.rules.group import Group


class GroupPhase(Enum):
    """The phase of a group. The docstring of ``events`` has a table of the effects in each phase."""

    ADOPTING = "adopting"
    """A group may be running that this coordinator has not seen; its nodes have one lease to report it."""
    RENDEZVOUS = "rendezvous"
    """No group is running; the coordinator waits for the nodes that are expected at the start."""
    DRAINING = "draining"
    """A plan was announced; the running group continues to its next step boundary."""
    PREPARING = "preparing"
    """A plan was announced and no node trains; the members leave their earlier groups."""
    STARTING = "starting"
    """All members were ready and have received ``go``; not all are up."""
    RUNNING = "running"
    """All members are up."""
    BROKEN = "broken"
    """The newest group cannot continue, and no plan has been made yet."""
    WAITING = "waiting"
    """There is no group and no plan, because nodes are missing, or a lease or a save has not ended."""
    OVER = "over"
    """The run has ended for all nodes."""


def find_phase(group: Group) -> GroupPhase:
    """Return the current phase of ``group``."""
    world, proposal, rendezvous = group.world, group.proposal, group.rendezvous
    if group.finished:
        return GroupPhase.OVER
    if rendezvous is not None:
        return (
            GroupPhase.RENDEZVOUS
            if rendezvous.adopts_until is None
            else GroupPhase.ADOPTING
        )
    is_alive = world is not None and not world.is_over
    if proposal is not None:
        return (
            GroupPhase.DRAINING if is_alive and not proposal.hard else GroupPhase.PREPARING
        )
    if world is None or world.is_over:
        return GroupPhase.WAITING
    if world.is_broken:
        return GroupPhase.BROKEN
    return GroupPhase.RUNNING if world.is_up else GroupPhase.STARTING
