"""The phase of a run's group, as one value computed from what is known. Pure."""

from enum import Enum

from evergrad_coordinator.rules.group import Group


class GroupPhase(Enum):
    """Exactly one holds. ``events`` has the table of what happens in which."""

    ADOPTING = "adopting"
    """A group may be running that this coordinator has not seen: its nodes have a lease's time to
    report it."""
    RENDEZVOUS = "rendezvous"
    """No group runs; the nodes expected at the start are waited for."""
    DRAINING = "draining"
    """A plan was announced; the group that runs goes on to its next step boundary."""
    PREPARING = "preparing"
    """A plan was announced, and nobody is to train: its members get out of whatever they were in."""
    STARTING = "starting"
    """All were ready and told to go; not all are up."""
    RUNNING = "running"
    """All members are up."""
    BROKEN = "broken"
    """The newest group cannot go on, and no plan has been made yet."""
    WAITING = "waiting"
    """No group, and no plan: nodes are missing, or a lease or a save is waited for."""
    OVER = "over"
    """The run has ended for all."""


def find_phase(group: Group) -> GroupPhase:
    """The phase of what ``group`` knows now."""
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
