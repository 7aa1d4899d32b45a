"""Chooses the members of the next group, their ranks, and the leaving node that saves. Pure functions."""

from collections.abc import Collection, Iterable, Sequence

from evergrad_common.causes import ChangeCause
from evergrad_common.text import plural
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
    """Choose at most ``max_nodes`` members, sorted by index.

    Members of the running group have priority, then members of the pending plan, then spares.

    If some members have finished with exit code 0 (fresh workers), the next group contains only members that
    have not finished. If none of them is connected but their work is not done, one other node takes it over.
    """
    candidates = [node for node in nodes if node.is_candidate]
    in_world = world.places.keys() if world else frozenset[Key]()
    planned = frozenset(proposal.members) if proposal else frozenset[Key]()
    # A new node in a group whose members are finishing would repeat work that is already done.
    if world and world.done:
        remaining = [node for node in candidates if node.key in in_world]
        is_work_lost = not world.places.keys() <= world.done
        candidates = remaining or candidates[: int(is_work_lost)]

    # A training node continues, and a repeated plan has the same members. Neither a spare nor a new node with
    # a lower index takes their place.
    def priority(node: Node) -> tuple[int, tuple[int, int, str]]:
        return (0 if node.key in in_world else 1 if node.key in planned else 2), node_order(
            node.name
        )

    chosen = sorted(candidates, key=priority)[:max_nodes]
    # Sort by index, not by arrival, so that the same nodes get the same ranks again.
    return tuple(sorted(chosen, key=lambda node: node_order(node.name)))


def takes_part(node: Node, proposal: Proposal) -> bool:
    """Return whether a member can start with the plan: its workers are ready for exactly this generation."""
    return (
        node.is_candidate
        and node.ready is not None
        and node.ready.generation == proposal.generation
    )


def find_lost(world: GroupWorld, connected: Iterable[Node]) -> set[Key]:
    """Return the members that are disconnected and whose workers are not known to have left the group.

    Members that have finished with exit code 0 are not lost.
    """
    return world.places.keys() - {node.key for node in connected} - world.out - world.done


def find_break(
    world: GroupWorld, connected: Collection[Node], *, now: float
) -> Break | None:
    """Return how a generation ended, for the failure budget, or None if it did not break."""
    lost = world.lost | find_lost(world, connected)
    if not lost and not world.is_broken:
        return None
    gone = frozenset(lost - {node.key for node in connected})
    return Break(world.generation, now, lost=gone, has_left=world.has_left)


def must_be_hard(world: GroupWorld | None, connected: Collection[Node]) -> bool:
    """Return whether the running group can no longer reach a step boundary."""
    # If no worker is in the group, there is nothing to stop, neither hard nor soft.
    if (
        world is None
        or world.is_over
        or not any(node.group == world.generation for node in connected)
    ):
        return False
    return world.is_broken or not world.is_up or bool(find_lost(world, connected))


def is_intact(world: GroupWorld, members: Sequence[Node]) -> bool:
    """Return whether ``members`` are exactly the running members, with the same numbers of workers."""
    wanted = {node.key: node.workers for node in members}
    return wanted == {
        key: place.workers for key, place in world.places.items() if key not in world.done
    }


def holds_its_place(world: GroupWorld, node: Node) -> bool:
    """Return whether a member that has reconnected still has its assigned ranks."""
    had = node.had
    return (
        had is not None
        and had.generation == world.generation
        and RankPlacement(had.first_rank, had.workers) == world.places[node.key]
    )


def is_growth(world: GroupWorld, members: Sequence[Node]) -> bool:
    """Return whether every running worker stays and workers are only added."""
    wanted = {node.key: node.workers for node in members}
    return all(wanted.get(key, 0) >= place.workers for key, place in world.places.items())


def assign_places(members: Sequence[Node]) -> dict[Key, RankPlacement]:
    """Assign consecutive ranks in the order of ``members``.

    For example, two members with 4 and 2 workers get the ranks 0 to 3 and 4 to 5.
    """
    places, first = {}, 0
    for node in members:
        workers = node.ready.workers if node.ready else node.workers
        places[node.key] = RankPlacement(first, workers)
        first += workers
    return places


def build_go(
    generation: int, members: Sequence[Node], places: dict[Key, RankPlacement]
) -> list[tuple[Node, Go]]:
    """Build the messages that start a group. All members use the store of the first node."""
    # Each node opens a store before its ``ready``, so the first node's store exists before workers connect.
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
    """Return the places of ``generation`` as its nodes report them.

    Returns None unless the places cover every rank exactly once.
    """
    members = [
        node for node in nodes if node.had is not None and node.had.generation == generation
    ]
    places = {
        node.key: RankPlacement(node.had.first_rank, node.had.workers)
        for node in members
        if node.had
    }
    sizes = {node.had.world_size for node in members if node.had}

    # A gap means that a member is not connected. An overlap means that two processes claim the same rank.
    first = 0
    for place in sorted(places.values(), key=lambda one: one.first_rank):
        if place.first_rank != first or place.workers < 1:
            return None
        first += place.workers
    return places if sizes == {first} else None


def find_newest_running(
    nodes: Collection[Node],
) -> tuple[int, dict[Key, RankPlacement]] | None:
    """Return the newest generation whose members are all connected, and its places, or None."""
    # Start with the newest: of two complete groups, the older one has lost its lease (see ``adoption``).
    for generation in sorted(
        {node.had.generation for node in nodes if node.had is not None}, reverse=True
    ):
        if places := find_running(nodes, generation=generation):
            return generation, places
    return None


def may_run_unseen(settings: GroupSettings, generation: int) -> bool:
    """Return whether a group of the run may be running when a coordinator starts with ``generation``.

    An epoch above 0 may follow another coordinator, whose journal may be lost with its pod. The setting
    ``nothing_runs`` describes the start of this epoch. It no longer applies if the epoch has issued numbers.
    """
    has_own = settings.epoch > 0 and generation >> 32 == settings.epoch
    return (generation > 0 or settings.epoch > 0) and (has_own or not settings.nothing_runs)


def choose_saver(
    leavers: Sequence[Node], *, staying: Sequence[Node], saved_step: int
) -> Node | None:
    """Return the leaving node that saves, or None if no save is needed.

    This is the leaving node with the newest state; if several have it, the node with the lowest index. No
    save is needed if a node in ``staying`` holds a state or the newest state is already saved.
    """
    # If a staying node holds a state, no save is needed. A save would use up a leaving node's grace period.
    if any(node.step is not None and node.step >= 0 for node in staying):
        return None

    # A state that is not newer than the saved state is already safe.
    newest = max((node.step for node in leavers if node.step is not None), default=-1)
    if newest < 0 or newest <= saved_step:
        return None
    return min(
        (node for node in leavers if node.step == newest),
        key=lambda node: node_order(node.name),
    )


def choose_patience(proposal: Proposal, settings: GroupSettings) -> float:
    """Return for how many seconds the running group may continue so that a save in progress can end.

    It is above 0 only if nodes join. If a node leaves or is lost, the change cannot wait.
    """
    # Use at most half of the limit. The rest is for reaching the step boundary after the save.
    if proposal.hard or proposal.cause != "node_joined":
        return 0.0
    return min(settings.save_patience_seconds, settings.soft_limit_seconds / 2)


def describe_change(
    world: GroupWorld | None, members: Sequence[Node], nodes: Iterable[Node]
) -> tuple[ChangeCause, str]:
    """Return the cause and the readable reason of a plan that replaces ``world`` by ``members``.

    For example, ``("node_lost", "node 3 lost")``.
    """
    nodes = list(nodes)
    # The first cause that applies explains the later ones. For example, a loss causes a break, and a break
    # causes a change of capacity.
    if world is None or world.is_over:
        return "node_joined", f"{plural(len(members), 'node')} connected"
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
    # List at most eight names, because the text is sent to every node, the log and an Event.
    names = sorted((name for name, _ in keys), key=node_order)
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return f"node{'s' if len(names) > 1 else ''} {shown}"
