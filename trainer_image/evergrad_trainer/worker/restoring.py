"""Where the state of a run begins: its newest checkpoint, weights it starts from, or the seed."""

from collections.abc import Callable
from typing import Any

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.weights import load_weights
from evergrad_trainer.errors import CheckpointError
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.optim.adamw import set_updates
from evergrad_trainer.resume import compare_models
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.worker.session import Session


def restore(
    session: Session,
    machinery: Machinery,
    checkpoints: CheckpointManager,
    *,
    has_checkpoints: bool,
    rebuild: Callable[[], None] | None = None,
) -> None:
    """Load the newest checkpoint, or the weights a fresh run begins with.

    ``rebuild`` gives the tensors their initial values where no checkpoint is loaded; None where they have them already.
    """
    init_from = session.plan.run.training.init_from
    restored = checkpoints.restore(machinery.state())
    if restored is None and not has_checkpoints and rebuild is not None:
        rebuild()
    if restored is not None:
        extra = restored.extra
        progress = session.progress
        progress.finished_steps = progress.saved_step = progress.resumed_step = int(extra["step"])
        progress.remember(extra)
        set_updates(machinery.optimizer, progress.updates)
        _check_cursor(session, extra)
        _check_model(session, extra)
    elif has_checkpoints:
        raise CheckpointError(
            Problem(
                str(session.directory.checkpoints),
                "checkpoints were there at the start and are gone",
                "",
                "Start again",
            )
        )
    elif init_from is not None:
        path = session.plan.base_directory / init_from.path
        if (path / "config.json").is_file():
            load_model_directory(path, machinery.state(), config=session.plan.model.config)
        else:
            load_weights(path, machinery.state(), world=session.world)


def _check_cursor(session: Session, extra: dict[str, Any]) -> None:
    """The cursor is a pure function of the step; a checkpoint that disagrees was written with another order."""
    expected = session.data.train.cursor(session.progress.finished_steps)
    if extra["cursor"] != expected:
        raise CheckpointError(
            Problem(
                str(session.directory.checkpoints),
                f"the checkpoint's cursor is {extra['cursor']} and this version's is {expected}",
                "the sample order is not the one the run began with",
                "Go on with the version of Evergrad that began this run",
            )
        )


def _check_model(session: Session, extra: dict[str, Any]) -> None:
    """The checkpoint's tensors may fit a model that computes something else with them. Older checkpoints do not say."""
    if "model" in extra:
        where = str(session.directory.checkpoints)
        raise_if(compare_models(extra["model"], session.plan.model.describe(), where=where), CheckpointError)
