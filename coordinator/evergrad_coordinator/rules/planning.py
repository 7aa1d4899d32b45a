"""Who is in the next group, at which ranks, and which leaving node saves. Pure functions."""

from collections.abc import Collection, Iterable, Sequence

from evergrad_common.causes import ChangeCause
from evergrad_coordinator.protocol import Go
from evergrad_coordinator.rules.budget import Break
from evergrad_coordinator.rules.state import (
    GroupSettings,
    GroupWorld,
    Key,
    Node,
    Proposal,
    RankPlacement,
    node_order,
)


def choose_members(
    nodes: Iterable[Node],
    *,
    world: GroupWorld | None,
    proposal: Proposal | None,
    max_nodes: int,
) -> tuple[Node, ...]:
    """Members of the running world first, then those already planned, then spares; sorted by index.

    Once members have ended well (fresh workers), the group only shrinks to those that have not. If none of
    these is left, one other node takes over the work of those that were lost.
    """
    candidates = [node for node in nodes if node.is_candidate]
    in_world = world.places.keys() if world else frozenset[Key]()
    planned = frozenset(proposal.members) if proposal else frozenset[Key]()
    # A newcomer beside members that are at their end would train what is done already.
    if world and world.done:
        remaining = [node for node in candidates if node.key in in_world]
        is_work_lost = not world.places.keys() <= world.done
        candidates = remaining or candidates[: int(is_work_lost)]

    # A node that trains goes on, and a plan that is made anew names the same nodes: neither a spare nor a
    # newcomer with a lower index takes a place away.
    def priority(node: Node) -> tuple[int, tuple[int, int, str]]:
        return (0 if node.key in in_world else 1 if node.key in planned else 2), node_order(
            node.name
        )

    chosen = sorted(candidates, key=priority)[:max_nodes]
    # By index, not by arrival: the same nodes get the same ranks again.
    return tuple(sorted(chosen, key=lambda node: node_order(node.name)))


def takes_part(node: Node, proposal: Proposal) -> bool:
    """Whether a member can begin with the plan: its workers are ready for just this generation."""
    return (
        node.is_candidate
        and node.ready is not None
        and node.ready.generation == proposal.generation
    )


def find_lost(world: GroupWorld, connected: Iterable[Node]) -> set[Key]:
    """Members that are gone although nobody knows that their workers are.

    One that had ended well is not missed.
    """
    return world.places.keys() - {node.key for node in connected} - world.out - world.done


def find_break(
    world: GroupWorld, connected: Collection[Node], *, now: float
) -> Break | None:
    """How a generation ended, for the budget of failures; None if it did not break."""
    lost = world.lost | find_lost(world, connected)
    if not lost and not world.is_broken:
        return None
    gone = frozenset(lost - {node.key for node in connected})
    return Break(world.generation, now, lost=gone, has_left=world.has_left)


def must_be_hard(world: GroupWorld | None, connected: Collection[Node]) -> bool:
    """Whether the running group cannot reach a step boundary any more."""
    # With no worker in it there is nobody to stop in whichever way.
    if (
        world is None
        or world.is_over
        or not any(node.group == world.generation for node in connected)
    ):
        return False
    return world.is_broken or not world.is_up or bool(find_lost(world, connected))


def is_intact(world: GroupWorld, members: Sequence[Node]) -> bool:
    """Whether ``members`` are exactly those that run, with as many workers each."""
    wanted = {node.key: node.workers for node in members}
    return wanted == {
        key: place.workers for key, place in world.places.items() if key not in world.done
    }


def holds_its_place(world: GroupWorld, node: Node) -> bool:
    """Whether a member that has come back still has the ranks it was given."""
    had = node.had
    return (
        had is not None
        and had.generation == world.generation
        and RankPlacement(had.first_rank, had.workers) == world.places[node.key]
    )


def is_growth(world: GroupWorld, members: Sequence[Node]) -> bool:
    """Whether every running worker stays and only some are added."""
    wanted = {node.key: node.workers for node in members}
    return all(wanted.get(key, 0) >= place.workers for key, place in world.places.items())


def assign_places(members: Sequence[Node]) -> dict[Key, RankPlacement]:
    """Give out consecutive ranks, in the order of ``members``."""
    places, first = {}, 0
    for node in members:
        workers = node.ready.workers if node.ready else node.workers
        places[node.key] = RankPlacement(first, workers)
        first += workers
    return places


def build_go(
    generation: int, members: Sequence[Node], places: dict[Key, RankPlacement]
) -> list[tuple[Node, Go]]:
    """Build the messages that start a group; the store is that of its first node."""
    # Each node has opened a store before its ``ready``: the first one's is there before anybody connects.
    first = members[0]
    if first.ready is None:
        raise ValueError(f"node {first.name}: no store before it is ready")
    world_size = sum(place.workers for place in places.values())
    return [
        (
            node,
            Go(
                generation=generation,
                first_rank=places[node.key].first_rank,
                workers=places[node.key].workers,
                world_size=world_size,
                node_rank=number,
                num_nodes=len(members),
                address=first.address,
                port=first.ready.port,
            ),
        )
        for number, node in enumerate(members)
    ]


def find_running(
    nodes: Iterable[Node], *, generation: int
) -> dict[Key, RankPlacement] | None:
    """The places of ``generation`` as its nodes report them; None unless they cover every rank
    exactly once."""
    members = [
        node for node in nodes if node.had is not None and node.had.generation == generation
    ]
    places = {
        node.key: RankPlacement(node.had.first_rank, node.had.workers)
        for node in members
        if node.had
    }
    sizes = {node.had.world_size for node in members if node.had}

    # A gap is a member that is not here, an overlap two processes that claim one place.
    first = 0
    for place in sorted(places.values(), key=lambda one: one.first_rank):
        if place.first_rank != first or place.workers < 1:
            return None
        first += place.workers
    return places if sizes == {first} else None


def find_newest_running(
    nodes: Collection[Node],
) -> tuple[int, dict[Key, RankPlacement]] | None:
    """The newest generation whose members are all here, and their places; None if there is none."""
    # Downwards: of two that are whole the older one has lost its lease, as ``adoption`` explains.
    for generation in sorted(
        {node.had.generation for node in nodes if node.had is not None}, reverse=True
    ):
        if places := find_running(nodes, generation=generation):
            return generation, places
    return None


def may_run_unseen(settings: GroupSettings, generation: int) -> bool:
    """Whether a coordinator that starts, knowing ``generation``, may have a group of its run somewhere.

    A later epoch follows another coordinator, whose journal may be lost with its pod. That nothing runs was
    true when this epoch began, and no more once it has numbers of its own.
    """
    has_own = settings.epoch > 0 and generation >> 32 == settings.epoch
    return (generation > 0 or settings.epoch > 0) and (has_own or not settings.nothing_runs)


def choose_saver(
    leavers: Sequence[Node], *, staying: Sequence[Node], saved_step: int
) -> Node | None:
    """The leaving node that saves: the newest state, lowest index among equals, if nobody in ``staying`` goes
    on with a state."""
    # A state that goes on needs no save: each one costs a leaver its grace period.
    if any(node.step is not None and node.step >= 0 for node in staying):
        return None

    # A state that is not newer than what was saved is in no danger.
    newest = max((node.step for node in leavers if node.step is not None), default=-1)
    if newest < 0 or newest <= saved_step:
        return None
    return min(
        (node for node in leavers if node.step == newest),
        key=lambda node: node_order(node.name),
    )


def choose_patience(proposal: Proposal, settings: GroupSettings) -> float:
    """How long the running group may go on for a save in flight: a newcomer can wait; a node that leaves, or
    was lost, cannot."""
    # At most half of the limit: the rest is for the step boundary that comes after the save.
    if proposal.hard or proposal.cause != "node_joined":
        return 0.0
    return min(settings.save_patience_seconds, settings.soft_limit_seconds / 2)


def describe_change(
    world: GroupWorld | None, members: Sequence[Node], nodes: Iterable[Node]
) -> tuple[ChangeCause, str]:
    """Cause and reason (for people) of a plan that makes ``members`` out of ``world``."""
    nodes = list(nodes)
    # The first that applies explains those below: a loss a break, and a break a change of capacity.
    if world is None or world.is_over:
        return "node_joined", f"{len(members)} nodes are here"
    if lost := find_lost(world, nodes):
        return "node_lost", f"{_name(lost)} lost"
    if world.is_broken:
        return world.break_cause, world.broken_by or f"generation {world.generation} broke"
    if leaving := [
        node.key for node in nodes if node.is_leaving and node.key in world.places
    ]:
        return "node_left", f"{_name(leaving)} leaving"
    if joined := [node.key for node in members if node.key not in world.places]:
        return "node_joined", f"{_name(joined)} joined"
    return "capacity_changed", "the number of workers changed"


def _name(keys: Iterable[Key]) -> str:
    # Eight at most: the text goes to every node, into the log and into an Event.
    names = sorted((name for name, _ in keys), key=node_order)
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return f"node{'s' if len(names) > 1 else ''} {shown}"
