"""Prepares the state that a run starts or resumes with: from its newest checkpoint, from given weights, or
from the seed."""

from collections.abc import Callable, Mapping

import torch

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.base.records import EventType
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.restore import load_of_step
from evergrad_trainer.checkpoint.search import Search
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.observers.history import last_step
from evergrad_trainer.run.resume import compare_models
from evergrad_trainer.state.registry import (
    COUNTERS,
    CURSOR,
    DESCRIPTION,
    FROZEN,
    OBSERVERS,
    RECIPE,
    SNAPSHOTS,
    TASK,
    Agreement,
    Values,
    from_extra,
)
from evergrad_trainer.task import Snapshot
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.worker.init_from import begin
from evergrad_trainer.worker.session import Session


def register_state(session: Session, machinery: Machinery) -> None:
    """Register the parts of the run's state that are not tensors of ``machinery``: values to load, and values
    that must agree."""
    plan = session.plan
    machinery.registry.register(COUNTERS, session.progress)

    def check_cursor(stored: Values) -> None:
        # The cursor depends only on the step. A different cursor means that another sample order was used.
        expected = session.data.train.cursor(session.progress.finished_steps)
        if stored != expected:
            what = f"the checkpoint's cursor is {stored} and this version's is {expected}"
            why = "the sample order is not the one the run began with"
            remedy = "Go on with the version of Evergrad that began this run"
            raise CheckpointError(Problem(_where(session), what, why, remedy))

    cursor = Agreement(
        value=lambda: session.data.train.cursor(session.progress.finished_steps),
        check=check_cursor,
    )
    # Register this after the counters, because the cursor depends on the step that they load.
    machinery.registry.register(CURSOR, cursor)
    # The checkpoint's tensors may fit a model that computes a different function.
    description = Agreement(
        value=plan.model.describe,
        check=lambda stored: raise_if(
            compare_models(stored, plan.model.describe(), where=_where(session)),
            CheckpointError,
        ),
    )
    machinery.registry.register(DESCRIPTION, description)
    machinery.registry.register(OBSERVERS, session.opened.observers)

    def check_frozen(stored: Values) -> None:
        # The trained weights depend on the frozen modules. All ranks have the same ones: they agreed when
        # they met.
        now = machinery.frozen
        changed = [name for name in {**stored, **now} if stored.get(name) != now.get(name)]
        if changed:
            what = (
                f"the frozen modules {', '.join(changed)} are not those the run began with"
            )
            why = (
                "a checkpoint has only their hashes, and the task's build makes others now"
            )
            remedy = (
                "Restore what they are made from, or give the changed run a name of its own"
            )
            raise CheckpointError(Problem(_where(session), what, why, remedy))

    frozen = Agreement(value=lambda: machinery.frozen, check=check_frozen)
    machinery.registry.register(FROZEN, frozen)
    machinery.registry.register(SNAPSHOTS, machinery.snapshots)
    task = Agreement(value=lambda: dict(plan.task_files), check=session.note_task)
    machinery.registry.register(TASK, task)
    recipe = session.identity.recipe
    machinery.registry.register(RECIPE, Agreement(value=lambda: recipe))


def restore(
    session: Session,
    machinery: Machinery,
    checkpoints: CheckpointManager,
    *,
    has_checkpoints: bool,
    is_initial: bool = True,
) -> None:
    """Load the newest checkpoint, or the state that a fresh run begins with.

    ``is_initial``: the tensors already have their initial values. Otherwise they get these values if no
    checkpoint is loaded.
    """
    session.state_from = ""
    # Collective: all ranks choose the same checkpoint, or none.
    restored = checkpoints.restore(machinery.state(), ahead=session.plan.ahead)
    # The tensors were built without weights for a checkpoint that does not exist, or a transfer left them
    # dirty.
    if restored is None and not has_checkpoints and not is_initial:
        machinery.registry.reset()
    if restored is not None:
        machinery.registry.load_values(from_extra(restored.extra))
        session.progress.saved_step = session.progress.resumed_step = (
            session.progress.finished_steps
        )
    elif has_checkpoints:
        raise CheckpointError(
            Problem(
                str(session.directory.checkpoints),
                "checkpoints were there at the start and are gone",
                "",
                "Start again",
            )
        )
    else:
        _warn_of_lost_steps(session)
        # Collectives: all ranks begin with the same state.
        begin(session, machinery)


def _warn_of_lost_steps(session: Session) -> None:
    """Warn that an earlier process trained steps of this run and saved none of them."""
    if not session.world.is_main:
        return
    trained = last_step(session.directory)
    if trained > 0:
        steps = "step 1 is" if trained == 1 else f"steps 1 to {trained} are"
        message = (
            f"no checkpoint was saved before the last process of this run ended: training starts again at "
            f"step 1, and {steps} trained again on the same samples. To lose less, lower "
            "spec.training.checkpoint.every"
        )
        session.emit(EventType.WARNING, {"message": message})


def settle_snapshots(session: Session, machinery: Machinery) -> None:
    """Give this rank, and all others, the snapshots that belong to the state. All ranks call this.

    Raises CheckpointError if neither a member nor a checkpoint has them.
    """
    plan = session.plan

    def read(
        snapshot: Snapshot,
        tensors: Mapping[str, torch.Tensor],
        is_right: Callable[[], bool],
    ) -> None:
        search = Search(
            open_store(session.directory.checkpoints),
            checksums=plan.run.training.checkpoint.verify == "always",
            identity=session.identity,
            prefix=f"{snapshot.of}.",
        )
        load_of_step(
            search, tensors, step=snapshot.after, world=session.world, is_right=is_right
        )

    machinery.snapshots.settle(session.progress.finished_steps, session.world, read)


def _where(session: Session) -> str:
    return session.state_from or str(session.directory.checkpoints)
