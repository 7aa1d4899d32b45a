"""Gives all members of a new world the same state: the newest step that a member holds, or else a checkpoint
or the initial state."""

import uuid
from typing import Any

from evergrad_trainer.base.errors import HostError
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.replicas import (
    compare_states,
    compare_transferred,
    find_suspects,
)
from evergrad_trainer.state.transfer import plan_transfers, transfer_state
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.progress import adopt, choose_source, describe_rank
from evergrad_trainer.worker.session import Session
from evergrad_trainer.worker.setup import has_checkpoints
from evergrad_trainer.worker.start_state import restore, settle_snapshots
from evergrad_trainer.worker.states import Life, StateStatus


def settle(
    session: Session, machinery: Machinery, run: TrainingComponents, life: Life
) -> bool:
    """Give all ranks the same state. Return whether it was loaded or initialised instead of received from a
    rank.

    All ranks call this. Afterwards ``life.held`` is whole, or dirty if an error interrupted the call.
    """
    world, progress, checkpoints = session.world, session.progress, run.checkpoints
    held_step = progress.finished_steps if life.held == StateStatus.WHOLE else -1
    # Collective: exchange once what each rank holds; the result decides what all ranks do next.
    rows = world.gather_json(
        {
            **describe_rank(progress, checkpoints, held_step=held_step),
            "is_comparing": run.limits.compare_every is not None,
            "frozen": dict(machinery.frozen),
            "observers_off": sorted(run.lasting.switched_off),
            **session.describe_beginning(),
        }
    )
    steps = _steps_of(rows)
    _check_frozen(world, [row["frozen"] for row in rows], steps)
    # On a joining rank, all observers are still active.
    run.lasting.agree_switched_off({name for row in rows for name in row["observers_off"]})
    checkpoints.enter_world(failures=max(int(row["failures"]) for row in rows))

    is_fresh = max(steps) < 0
    if is_fresh:
        _begin_again(session, machinery, checkpoints, life)
    else:
        _receive_newest(session, machinery, life, rows)
    _compare_replicas(session, machinery, rows)
    life.held = StateStatus.WHOLE
    _name_run(session)
    settle_snapshots(session, machinery)  # collectives: what is in none of its tensors
    return is_fresh


def _receive_newest(
    session: Session, machinery: Machinery, life: Life, rows: list[dict[str, Any]]
) -> None:
    """Bring every rank to the newest step that a rank holds. ``rows``: what each rank holds."""
    world = session.world
    # From rank to rank: holders of the newest step send it to the others, whose state is dirty until all of
    # it has arrived.
    for transfer in plan_transfers(_steps_of(rows)):
        if world.rank == transfer.stale_rank:
            life.held = StateStatus.DIRTY
        if world.rank in (transfer.source, transfer.stale_rank):
            transfer_state(machinery.state(), transfer, world)
    # Collective: a source may have died while a part was still in transit.
    world.confirm()
    # Collective: send the values that belong to these tensors, from one of the ranks that had them.
    registry, source = machinery.registry, choose_source(rows)
    registry.load_values(world.broadcast_json(registry.values(), source=source))
    adopt(session.progress, rows)
    session.adopt_beginning(rows[source])


def _compare_replicas(
    session: Session, machinery: Machinery, rows: list[dict[str, Any]]
) -> None:
    """Check, before the first step of a world, that the transfer is complete and, if requested, that all
    replicas are equal.

    Collective. The request of rank 0 counts: a comparison that only some ranks make would wait forever.
    """
    state, steps = machinery.own_state(), _steps_of(rows)
    newest = max(steps)
    if rows[0]["is_comparing"]:
        compare_states(
            state,
            session.world,
            step=session.progress.finished_steps,
            holders=[rank for rank, step in enumerate(steps) if step == newest >= 0],
            shards=machinery.shards,
            replicated=machinery.replicated(),
        )
    elif transfers := plan_transfers(steps):
        compare_transferred(state, session.world, transfers)


def _steps_of(rows: list[dict[str, Any]]) -> list[int]:
    """Return the step that each rank holds; -1 if a rank holds none."""
    return [int(row["step"]) for row in rows]


def _name_run(session: Session) -> None:
    """Give the run an id, the same on all ranks, unless a rank or a checkpoint has one."""
    if session.progress.run_id:
        return
    proposed = ""
    if session.world.is_main:
        # A start that ended before its first checkpoint has recorded the id in the directory.
        recorded = session.directory.read_resolved() or {}
        proposed = str(recorded.get("runId") or uuid.uuid4().hex[:16])
    # Collective: rank 0's proposal becomes a part of the state.
    session.progress.run_id = str(session.world.broadcast_json(proposed))


def _check_frozen(
    world: World,
    frozen: list[dict[str, str]],
    steps: list[int],
) -> None:
    """Raise HostError if this rank's frozen modules, which are not transferred, differ from the modules of
    the ranks whose state it would continue with."""
    newest = max(steps)
    holders = [rank for rank, step in enumerate(steps) if step == newest]
    # Convert the hashes to numbers to find a majority; the numbers themselves have no meaning.
    numbers = [frozen.index(own) for own in frozen]
    if world.rank in find_suspects(numbers, holders=holders):
        raise HostError(
            "the frozen modules that build has made here are not those of the other ranks; the files that "
            "they are made from differ between hosts. Give all hosts the same files."
        )


def _begin_again(
    session: Session, machinery: Machinery, checkpoints: CheckpointManager, life: Life
) -> None:
    """Without a state on any rank, load the newest checkpoint, or begin with the initial weights."""
    had_held = life.held
    # This process's progress belongs to a lost state. An interrupted load must leave neither.
    session.progress.reset()
    session.is_announced = False
    life.held = StateStatus.DIRTY
    # Collective: a volume may show a new checkpoint to some hosts later than to others.
    are_there = not session.world.all_agree(not has_checkpoints(session.directory))
    if machinery.is_sharded:
        # Shards that were built without weights, for a checkpoint, cannot be initialised here.
        are_there = are_there or had_held == StateStatus.DIRTY
    is_initial = had_held == StateStatus.FRESH
    restore(
        session, machinery, checkpoints, has_checkpoints=are_there, is_initial=is_initial
    )
    session.mark("checkpoint")
