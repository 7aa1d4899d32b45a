"""Handles the messages of a joined node, and updates the state of the group. Pure functions."""

from collections.abc import Iterable

from evergrad_common.causes import specify_break
from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Capacity,
    Done,
    Finished,
    Finishing,
    Leaving,
    Left,
    Message,
    Progress,
    Ready,
    Restoring,
    Result,
    Up,
)  # fmt: skip
from evergrad_coordinator.rules.budget import GenerationFailure, describe_worker
from evergrad_coordinator.rules.changes import (
    break_world,
    drop_node,
    finish,
    start_if_ready,
)
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.state import MOST_SETS, GroupWorld, Node


def handle_report(group: Group, node: Node, message: Message, now: float) -> None:
    """Handle a report of ``node``. A report about another generation than the newest group's is ignored."""
    # If the group may still be adopted, keep its reports until the decision. A node repeats a report only on
    # its next connection, so an ignored report would be lost. A final failure ends the run in any case.
    if (
        find_phase(group) is GroupPhase.ADOPTING
        and node.had is not None
        and isinstance(message, Up | Broken | Done | Boundary | Progress)
        and node.had.generation == message.generation
        and not (isinstance(message, Broken) and message.is_final)
    ):
        # Keep only the newest report of each kind, which also bounds the memory for a node.
        node.early.pop(type(message), None)
        node.early[type(message)] = message
        return

    match message:
        case Capacity():
            node.workers = message.workers
            # The wait of a start begins with the first node that could train, not with the first connection.
            if (
                group.rendezvous
                and group.rendezvous.first_seen is None
                and node.is_candidate
            ):
                group.rendezvous.first_seen = now
            group.change(now)
        case Ready():
            _on_ready(group, node, message, now)
        case Leaving() if not node.is_leaving:
            node.is_leaving = True
            group.log("leaving", node=node.name, reason=message.reason[:100])
            group.change(now)
        case Left():
            _on_left(group, node, message, now)
        case Broken():
            _on_broken(group, node, message, now)
        case Result():
            _on_result(group, node, message, now)
        case Up() | Restoring() | Boundary() | Done() | Finished() | Progress():
            # Ignore reports about an older group, or about a group of which the node is not a member.
            if world := _find_world(group, node, message.generation):
                _note_course(group, world, node, message, now)


def _find_world(group: Group, node: Node, generation: int) -> GroupWorld | None:
    """Return the newest group if ``generation`` is its number and the node is a member, otherwise None."""
    world = group.world
    return (
        world
        if world and world.generation == generation and node.key in world.places
        else None
    )


def _on_left(group: Group, node: Node, message: Left, now: float) -> None:
    node.is_leaving = True
    if group.world and node.key in group.world.places:
        group.world.out.add(node.key)
    # Record the save before the node is dropped, because the drop clears the saver.
    if message.is_saved and group.departures.saver == node.key:
        group.departures.note_saved(node)
        training, step = group.training, group.departures.saved_step
        training.checkpoint_step = max(training.checkpoint_step, step)
        training.step = max(training.step, step)
        group.budget.progress.note_step(step, is_whole=False)
    drop_node(group, node, "left", now)


def _on_ready(group: Group, node: Node, message: Ready, now: float) -> None:
    # This coordinator has not issued a higher number, so the answer belongs to the plan of another one.
    if message.generation > group.generation:
        return

    # The answer to any plan proves that the node's workers have left every older group.
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
        # A step needs every rank, so training stops when the first member has left the group.
        if proposal and not world.is_over:
            group.accounting.begin(proposal.cause, at=now)

    # The answer to a replaced plan does not make the node ready. But a leaving node that is out may go.
    if proposal is None or message.generation != proposal.generation:
        if node.is_leaving:
            group.change(now)
        return
    node.ready, node.workers = message, message.workers
    if node.key in proposal.waits_for:
        proposal.waits_for.discard(node.key)
        start_if_ready(group, now)


def _note_course(
    group: Group, world: GroupWorld, node: Node, message: Message, now: float
) -> None:
    """Record the progress of the newest group from a report of one of its members."""
    match message:
        case Up() if not world.is_over:
            _on_up(group, world, node, message, now)
        case Restoring():
            # Only growth counts: a worker that repeats its number may hang.
            if not world.is_up and message.num_bytes > world.moved.get(node.key, 0):
                world.moved[node.key] = message.num_bytes
                world.moved_at = now
        case Boundary():
            # Waiting joins may happen now: directly after a checkpoint, fresh workers lose no step.
            training = group.training
            training.checkpoint_step = max(training.checkpoint_step, message.step)
            group.budget.observe(training, is_whole=group.is_whole)
            group.joins.has_boundary = True
            group.change(now)
        case Finished() if group.settings.recovery == "fresh":
            # Accept only the node's own ranks.
            place = world.places[node.key]
            if place.first_rank <= message.rank < place.first_rank + place.workers:
                _note_finished(group, world, [message.rank])
        case Done() if group.settings.recovery == "fresh":
            _on_done(group, world, node, now)
        case Progress():
            _on_progress(group, message, now)


def _on_up(group: Group, world: GroupWorld, node: Node, message: Up, now: float) -> None:
    # A node repeats ``up`` on each new connection, when training may be far beyond that step. Only the first
    # ``up`` may lower the step, to the checkpoint that the group has loaded.
    training, is_again = group.training, node.key in world.up
    training.step = max(training.step, message.step) if is_again else message.step
    world.up.add(node.key)
    node.step = max(message.step, node.step if node.step is not None else -1)
    # The step was finished before the group started, so it is not progress.
    group.budget.progress.note_step(message.step, is_whole=False)
    # An outage lasts until the last member is up, because no step can finish before.
    if not world.is_up and len(world.up) == len(world.places):
        world.up_at, world.up_step = now, message.step
        group.accounting.end(now=now)
        group.log("up", step=message.step)
        group.change(now)


def _on_done(group: Group, world: GroupWorld, node: Node, now: float) -> None:
    # The node has no work left. The other members continue without it.
    world.done.add(node.key)
    world.out.add(node.key)
    node.is_done, node.group = True, 0
    place = world.places[node.key]
    ranks = range(place.first_rank, place.first_rank + place.workers)
    _note_finished(group, world, ranks)
    if len(world.done) == len(world.places):
        finish(group, ExitCode.DONE, "Complete", "all workers ended well")
    else:
        group.change(now)


def _on_progress(group: Group, message: Progress, now: float) -> None:
    # Keep the old value if a report has none, because reports are sent at different points of a step.
    training = group.training
    training.step, training.updated_at = message.step, now
    for name in (
        "total_steps", "loss", "tokens_per_second", "eta_seconds", "checkpoint_step",
    ):  # fmt: skip
        value = getattr(message, name)
        if value is not None:
            setattr(training, name, value)
    if message.failed_saves is not None:
        training.failed_saves = message.failed_saves
        training.save_trouble = message.save_trouble
        training.save_message = message.save_message
    # These numbers are only displayed; no decision depends on them. Keep evaluations that are missing in the
    # report: rank 0 may be on another node now, which has not seen every evaluation.
    training.values = message.values
    for name, one in message.evaluations.items():
        if name in training.evaluations or len(training.evaluations) < MOST_SETS:
            training.evaluations[name] = one
    group.budget.observe(training, is_whole=group.is_whole)
    group.ledger.close_interval(now=now)
    group.ledger.note_progress(message)


def _note_finished(group: Group, world: GroupWorld, ranks: Iterable[int]) -> None:
    """Record ranks whose workers have ended with 0.

    If they are the first, send ``finishing`` to the members whose workers have not all ended.
    """
    is_first = not world.finished
    world.finished.update(ranks)
    if not is_first or len(world.finished) == world.size:
        return
    group.log("finishing", ranks=sorted(ranks))
    for node in group.nodes.values():
        if node.key in world.places and not node.is_done:
            group.send(node.peer, Finishing(world.generation))


def _on_broken(group: Group, node: Node, message: Broken, now: float) -> None:
    # A final failure is not kept until the adoption. The place in the node's hello shows that the node was a
    # member of this generation.
    is_early = (
        find_phase(group) is GroupPhase.ADOPTING
        and node.had is not None
        and node.had.generation == message.generation
    )
    world = _find_world(group, node, message.generation)
    if not is_early and (world is None or world.is_over):
        return
    group.log(
        "broken",
        node=node.name,
        rank=message.rank,
        cause=specify_break(message.cause, message.trouble),
        exitCode=message.exit_code,
        step=message.step,
    )

    # Record the failure before it ends the run, so that /status names it.
    failure = GenerationFailure(node.name, now - message.time_since, message)
    break_world(group, failure, now=now)
    if message.is_final:
        text = message.message or (
            f"{describe_worker(message)} (node {node.name}) ended with exit code "
            f"{message.exit_code}: a retry cannot fix it"
        )
        is_internal = message.exit_code == ExitCode.INTERNAL
        finish(
            group,
            ExitCode.INTERNAL if is_internal else ExitCode.USER_ERROR,
            "InternalError" if is_internal else "UserError",
            text,
        )


def _on_result(group: Group, node: Node, message: Result, now: float) -> None:
    world = _find_world(group, node, message.generation)
    # Compare with the newest number, not with the place in the node's hello: fresh workers may have completed
    # the run while no coordinator was running, and their node then has no place any more.
    is_adoptable = (
        find_phase(group) is GroupPhase.ADOPTING
        and message.generation == group.newest_known
    )
    if world is None and not is_adoptable:
        return

    # Workers that stop because of a lost lease also report a stop, although no stop was requested.
    is_stop = message.exit_code in (ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED)
    if (
        world
        and is_stop
        and group.settings.recovery == "fresh"
        and node.key in world.unwatched
    ):
        world.out.add(node.key)
        world.is_broken = True
        group.log("lease_lost", node=node.name)
        group.change(now)
        return
    group.training.step = max(group.training.step, message.step)
    # Ignore a number that is not a valid exit code.
    if 0 <= message.exit_code <= 255:
        finish(group, message.exit_code, message.reason[:100] or "complete")
