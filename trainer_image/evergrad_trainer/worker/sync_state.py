"""Brings all members of a new world to one state: that of the newest step that a member holds, else that of a
checkpoint or of the beginning."""

import uuid

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
    """Bring all ranks to one state; whether it came from the disk (or from nowhere) instead of from a rank.

    All ranks call this. ``life.held`` is whole at the end, and dirty wherever an error has cut this short.
    """
    world, progress, checkpoints = session.world, session.progress, run.checkpoints
    held_step = progress.finished_steps if life.held == StateStatus.WHOLE else -1
    # Collective: one exchange, and what each rank holds and knows decides what all of them do next.
    rows = world.gather_json(
        {
            **describe_rank(progress, checkpoints, held_step=held_step),
            "is_comparing": run.limits.compare_every is not None,
            "frozen": dict(machinery.frozen),
            "observers_off": sorted(run.lasting.switched_off),
            **session.describe_beginning(),
        }
    )
    steps = [int(row["step"]) for row in rows]
    _check_frozen(world, [row["frozen"] for row in rows], steps)
    # A newcomer's observers are all on.
    run.lasting.agree_switched_off({name for row in rows for name in row["observers_off"]})
    checkpoints.enter_world(failures=max(int(row["failures"]) for row in rows))

    is_fresh = max(steps) < 0
    if is_fresh:
        _begin_again(session, machinery, checkpoints, life)
    else:
        # Point to point: those with the newest step give it to the others, who hold nothing until all of it
        # has arrived.
        for transfer in plan_transfers(steps):
            if world.rank == transfer.stale_rank:
                life.held = StateStatus.DIRTY
            if world.rank in (transfer.source, transfer.stale_rank):
                transfer_state(machinery.state(), transfer, world)
        # Collective: a source may have died with part of it still on its way.
        world.confirm()
        # Collective: what belongs to those tensors, as one of the ranks that had them remembers it.
        registry, source = machinery.registry, choose_source(rows)
        registry.load_values(world.broadcast_json(registry.values(), source=source))
        adopt(progress, rows)
        session.adopt_beginning(rows[source])

    # Collective, before the first step of a world: what was transferred has arrived and, where that is asked
    # for, all replicas are equal. Rank 0's wish counts: a comparison that only some make would wait for ever.
    state, newest = machinery.own_state(), max(steps)
    if rows[0]["is_comparing"]:
        compare_states(
            state,
            world,
            step=progress.finished_steps,
            holders=[rank for rank, step in enumerate(steps) if step == newest >= 0],
            shards=machinery.shards,
            replicated=machinery.replicated(),
        )
    elif transfers := plan_transfers(steps):
        compare_transferred(state, world, transfers)
    life.held = StateStatus.WHOLE
    _name_run(session)
    settle_snapshots(session, machinery)  # collectives: what is in none of its tensors
    return is_fresh


def _name_run(session: Session) -> None:
    """Give the run its id, where neither a rank nor a checkpoint has one: all ranks know the same."""
    if session.progress.run_id:
        return
    proposed = ""
    if session.world.is_main:
        # A start that ended before its first checkpoint has left it in the directory.
        recorded = session.directory.read_resolved() or {}
        proposed = str(recorded.get("runId") or uuid.uuid4().hex[:16])
    # Collective: rank 0's proposal becomes part of the state.
    session.progress.run_id = str(session.world.broadcast_json(proposed))


def _check_frozen(
    world: World,
    frozen: list[dict[str, str]],
    steps: list[int],
) -> None:
    """Frozen modules are no part of what is transferred: this rank has built the same ones as those whose
    state it would continue with."""
    newest = max(steps)
    holders = [rank for rank, step in enumerate(steps) if step == newest]
    # As numbers, since a majority is looked for; which ones they are says nothing.
    numbers = [frozen.index(own) for own in frozen]
    if world.rank in find_suspects(numbers, holders=holders):
        raise HostError(
            "the frozen modules that build has made here are not those of the other ranks; the files that "
            "they are made from differ between hosts. Give all hosts the same files."
        )


def _begin_again(
    session: Session, machinery: Machinery, checkpoints: CheckpointManager, life: Life
) -> None:
    """No rank holds a state: load the newest checkpoint or, without one, begin with the initial weights."""
    had_held = life.held
    # The memory of this process belongs to a state that is gone; a load that is cut short leaves neither.
    session.progress.reset()
    session.is_announced = False
    life.held = StateStatus.DIRTY
    # Collective: a volume may show a new checkpoint to some hosts later than to others.
    are_there = not session.world.all_agree(not has_checkpoints(session.directory))
    if machinery.is_sharded:
        # Shards that were built without weights, since a checkpoint was to follow, cannot be made again here.
        are_there = are_there or had_held == StateStatus.DIRTY
    is_initial = had_held == StateStatus.FRESH
    restore(
        session, machinery, checkpoints, has_checkpoints=are_there, is_initial=is_initial
    )
    session.mark("checkpoint")
