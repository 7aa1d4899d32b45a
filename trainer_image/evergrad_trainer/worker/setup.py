"""Opens and builds what a process needs before its first step: recipe, checkpoints, and the loop's
components."""

import functools

from evergrad_manifest.files.task_files import hash_task, task_path
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.observers.history import last_step
from evergrad_trainer.recipes.setup import Opened, open_recipe
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.training.build import (
    Machinery,
    build_comparison,
    build_evaluations,
    build_stepper,
)
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.limits import build_best, build_limits
from evergrad_trainer.training.task_adapter import build_finish
from evergrad_trainer.worker.run_records import announce_first_step
from evergrad_trainer.worker.session import Session, SessionPlan


def open_plan(plan: SessionPlan) -> Opened:
    """Return the run's recipe over its prepared data, from the plan, or opened here.

    Raises HostError if the files of a task have changed since the plan was made, because the node has
    reported the earlier version to the other nodes.
    """
    has_trained = has_steps(RunDirectory(plan.run_directory))
    if plan.opened is None:
        if hash_task(plan.run.training, plan.base_directory) != plan.task_hash:
            where = (
                task_path(plan.run.training, plan.base_directory)
                or plan.run.training.recipe
            )
            raise HostError(
                f"{where}: it, or a module beside it that it imports, has changed since this node started; "
                "two versions never train together. Change it back, or start all nodes again."
            )
        opened = open_recipe(
            plan.run.training,
            plan.prepared,
            plan.base_directory,
            has_trained=has_trained,
            run_directory=plan.run_directory,
        )
        return opened.starting_at(plan.start, plan.run.training)
    if has_trained:
        plan.opened.code.note_trained()
    return plan.opened


def build_checkpoints(session: Session, machinery: Machinery) -> CheckpointManager:
    """Build the object that saves and restores this session's state."""
    plan = session.plan
    checkpoints = CheckpointManager(
        session.directory.checkpoints,
        membership=session.membership,
        settings=plan.run.training.checkpoint,
        identity=session.identity,
        on_event=session.emit,
        store=open_store(session.directory.checkpoints, keep_waiting=plan.keep_waiting),
    )
    checkpoints.anchors = machinery.snapshots.steps
    return checkpoints


def has_checkpoints(directory: RunDirectory) -> bool:
    return any(directory.checkpoints.glob("step-*"))


def has_steps(directory: RunDirectory) -> bool:
    """Return whether any process of the run has made a step."""
    return has_checkpoints(directory) or last_step(directory) > 0


def _follow_first_step(session: Session, checkpoints: CheckpointManager) -> None:
    announce_first_step(session)
    checkpoints.note_announced()


def _most_workers(session: Session) -> int:
    """Return how many workers may train together, according to the file and this process's world."""
    spec = session.plan.run.spec
    named = spec.nodes.largest * (spec.workers_per_node or 1)
    return max(named, session.membership.world.size)


def build_run(
    session: Session, machinery: Machinery, checkpoints: CheckpointManager
) -> TrainingComponents:
    training, numbers = session.plan.run.training, session.plan.numbers
    # If pods evaluate, this run evaluates only the sets that the file assigns to it.
    named = {one.name: one.while_training for one in training.evaluation.sets}
    is_default = session.plan.keep_waiting == 0
    left_out = {
        one.name
        for one in session.data.evaluation
        if not (is_default if named.get(one.name) is None else named[one.name])
    }
    return TrainingComponents(
        limits=build_limits(
            training,
            total_steps=numbers.total_steps,
            stop_after_steps=session.plan.stop_after_steps,
            anchors=machinery.snapshots.steps,
        ),
        membership=session.membership,
        stepper=build_stepper(
            training,
            machinery,
            session.data.train,
            total_steps=numbers.total_steps,
            may_share=_most_workers(session) > 1,
        ),
        stream=session.data.train,
        checkpoints=checkpoints,
        state=machinery.registry,
        evaluator=build_evaluations(
            machinery,
            code=session.plan.task_hash,
            is_averaged=training.ema is not None and training.ema.evaluate,
        ),
        evaluation_sets=tuple(
            one for one in session.data.evaluation if one.name not in left_out
        ),
        best=build_best(training),
        observers=session.observers,
        directory=session.directory,
        tokens_per_step=numbers.tokens_per_step,
        is_signalled=session.is_signalled,
        compare=build_comparison(machinery, session.membership),
        on_first_step=functools.partial(_follow_first_step, session, checkpoints),
        finish_state=build_finish(
            machinery.opened,
            machinery.modules,
            seed=training.reproducibility.seed,
            frozen=machinery.held_frozen,
            cut=machinery.cut(),
            average=machinery.average,
        ),
        snapshots=machinery.snapshots,
        progress=session.progress,
        lasting=session.opened.observers,
    )
