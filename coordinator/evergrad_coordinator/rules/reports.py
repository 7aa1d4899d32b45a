"""Takes the messages of a joined node: each changes what is known of the group. Pure functions."""

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Capacity,
    Done,
    Leaving,
    Left,
    Message,
    Progress,
    Ready,
    Restoring,
    Result,
    Up,
)  # fmt: skip
from evergrad_coordinator.rules.budget import Failure
from evergrad_coordinator.rules.changes import break_world, drop_node, finish, settle
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import Phase, find_phase
from evergrad_coordinator.rules.state import Node, World


def handle_report(group: Group, node: Node, message: Message, now: float) -> None:
    """Note what ``node`` says; what names another generation than the newest group's is ignored."""
    # Said of a group that may be adopted in a moment: kept until then. An end of the run waits for nothing.
    if (
        find_phase(group) is Phase.ADOPTING
        and node.had is not None
        and isinstance(message, Up | Broken | Done | Boundary | Progress)
        and node.had.generation == message.generation
        and not (isinstance(message, Broken) and message.is_final)
    ):
        node.early.pop(type(message), None)
        node.early[type(message)] = message
        return
    match message:
        case Capacity():
            node.workers = message.workers
            if group.rendezvous and group.rendezvous.first_seen is None and node.is_candidate:
                group.rendezvous.first_seen = now
            group.change(now)
        case Ready():
            _on_ready(group, node, message, now)
        case Up():
            _on_up(group, node, message, now)
        case Restoring():
            world = _find_world(group, node, message.generation)
            # Only growth counts: a worker that repeats its number is as silent as one that hangs.
            if world and not world.is_up and message.num_bytes > world.moved.get(node.key, 0):
                world.moved[node.key] = message.num_bytes
                world.moved_at = now
        case Broken():
            _on_broken(group, node, message, now)
        case Leaving() if not node.is_leaving:
            node.is_leaving = True
            group.log("leaving", node=node.name, reason=message.reason[:100])
            group.change(now)
        case Left():
            _on_left(group, node, message, now)
        case Boundary() if _find_world(group, node, message.generation):
            # Joins that wait for a checkpoint may happen now.
            training = group.training
            training.checkpoint_step = max(training.checkpoint_step, message.step)
            group.budget.observe(training)
            group.joins.has_boundary = True
            group.change(now)
        case Done():
            _on_done(group, node, message, now)
        case Result():
            _on_result(group, node, message, now)
        case Progress():
            _on_progress(group, node, message, now)


def _find_world(group: Group, node: Node, generation: int) -> World | None:
    """The newest group, if that is what the message names and the node is in it."""
    world = group.world
    return (
        world if world and world.generation == generation and node.key in world.places else None
    )


def _on_ready(group: Group, node: Node, message: Ready, now: float) -> None:
    if message.generation > group.generation:
        return
    node.step = message.step
    world, proposal = group.world, group.proposal
    if node.group < message.generation:
        node.group = 0
    if (
        world
        and world.generation < message.generation
        and node.key in world.places
        and node.key not in world.out
    ):
        world.out.add(node.key)
        if proposal and not world.is_over:
            group.accounting.begin(proposal.cause, at=now)
    if proposal is None or message.generation != proposal.generation:
        if node.is_leaving:
            group.change(now)
        return
    node.ready, node.workers = message, message.workers
    if node.key in proposal.waits_for:
        proposal.waits_for.discard(node.key)
        settle(group, now)


def _on_up(group: Group, node: Node, message: Up, now: float) -> None:
    world = _find_world(group, node, message.generation)
    if world is None or world.is_over:
        return
    world.up.add(node.key)
    node.step = max(message.step, node.step if node.step is not None else -1)
    group.training.step = message.step
    group.budget.observe(group.training)
    if not world.is_up and len(world.up) == len(world.places):
        world.up_at, world.up_step = now, message.step
        group.accounting.end(now=now)
        group.log("up", step=message.step)
        group.change(now)


def _on_broken(group: Group, node: Node, message: Broken, now: float) -> None:
    is_early = (
        find_phase(group) is Phase.ADOPTING
        and node.had is not None
        and node.had.generation == message.generation
    )
    world = _find_world(group, node, message.generation)
    if not is_early and (world is None or world.is_over):
        return
    # Also before the group is adopted: what its nodes report then belongs to it.
    group.log(
        "broken",
        node=node.name,
        rank=message.rank,
        cause=message.cause,
        exitCode=message.exit_code,
        step=message.step,
    )
    failure = Failure(node.name, now - message.time_since, message)
    break_world(group, failure, now=now)
    if message.is_final:
        who = f"rank {message.rank}" if message.rank >= 0 else "a worker without a rank"
        text = message.message or (
            f"{who} (node {node.name}) ended with exit code {message.exit_code}: no retry can cure it"
        )
        is_internal = message.exit_code == ExitCode.INTERNAL
        finish(
            group,
            ExitCode.INTERNAL if is_internal else ExitCode.USER_ERROR,
            "InternalError" if is_internal else "UserError",
            text,
        )


def _on_left(group: Group, node: Node, message: Left, now: float) -> None:
    node.is_leaving = True
    if group.world and node.key in group.world.places:
        group.world.out.add(node.key)
    if message.is_saved and group.departures.saver == node.key:
        group.departures.note_saved(node)
        training, step = group.training, group.departures.saved_step
        training.checkpoint_step = max(training.checkpoint_step, step)
        training.step = max(training.step, step)
    drop_node(group, node, "left", now)


def _on_done(group: Group, node: Node, message: Done, now: float) -> None:
    world = _find_world(group, node, message.generation)
    if world is None or group.settings.recovery != "fresh":
        return
    # It has nothing left to do, and is waited for by nobody: the others go on without it.
    world.done.add(node.key)
    world.out.add(node.key)
    node.is_done, node.group = True, 0
    if len(world.done) == len(world.places):
        finish(group, ExitCode.DONE, "Complete", "all workers ended well")
        return
    group.change(now)


def _on_result(group: Group, node: Node, message: Result, now: float) -> None:
    world = _find_world(group, node, message.generation)
    # Not what its node says that it has: fresh workers have ended with the run, while no coordinator was
    # there to hear of it.
    is_adoptable = (
        find_phase(group) is Phase.ADOPTING and message.generation == group.newest_known
    )
    if world is None and not is_adoptable:
        return
    is_stop = message.exit_code in (ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED)
    if world and is_stop and group.settings.recovery == "fresh" and node.key in world.unwatched:
        # Its workers were ended by their lost lease: nobody has asked the run to stop.
        world.out.add(node.key)
        world.is_broken = True
        group.log("lease_lost", node=node.name)
        group.change(now)
        return
    group.training.step = max(group.training.step, message.step)
    if 0 <= message.exit_code <= 255:
        finish(group, message.exit_code, message.reason[:100] or "complete")


def _on_progress(group: Group, node: Node, message: Progress, now: float) -> None:
    if _find_world(group, node, message.generation) is None:
        return
    # A value that is not given stays as it was: reports come from different places in a step.
    training = group.training
    training.step, training.updated_at = message.step, now
    for name in ("total_steps", "loss", "tokens_per_second", "eta_seconds", "checkpoint_step"):
        value = getattr(message, name)
        if value is not None:
            setattr(training, name, value)
    group.budget.observe(training)
