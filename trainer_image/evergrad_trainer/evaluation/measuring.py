"""Measures one checkpoint of an opened run on some of its sets, and goes on where an earlier try was cut."""

from collections.abc import Callable

from evergrad_manifest.errors import Problem
from evergrad_trainer.checkpoint.manifest import Candidate
from evergrad_trainer.checkpoint.restoring import Restored, load_newest
from evergrad_trainer.checkpoint.search import Search
from evergrad_trainer.checkpoint.store import Store
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.errors import CheckpointError
from evergrad_trainer.evaluation.opening import OpenedRun
from evergrad_trainer.state.registry import OPTIMIZER, from_extra
from evergrad_trainer.training.evaluation import EvaluationResult
from evergrad_trainer.training.tally import Tally


def load_checkpoint(opened: OpenedRun, store: Store, candidate: Candidate) -> Restored:
    """Load the weights of one checkpoint, validated, into the opened run; its optimizer is not read.

    Raises CheckpointError where it is damaged, gone, or of another run.
    """
    session, machinery = opened.session, opened.machinery
    state = {
        name: tensor
        for name, tensor in machinery.state().items()
        if not name.startswith(f"{OPTIMIZER}.")
    }
    # By the first part of their names, so that what the checkpoint holds beyond them is still an error.
    prefixes = tuple({f"{name.partition('.')[0]}." for name in state})
    search = Search(
        store, checksums=True, identity=session.identity, prefix=prefixes, only=candidate.name
    )
    found = load_newest(search, state, world=session.world)
    if found is None:
        raise CheckpointError(Problem(store.reader.locate(candidate.name), "is gone"))
    restored, _ = found
    machinery.registry.load_values(from_extra(restored.extra))
    return restored


def measure(
    opened: OpenedRun,
    one: EvaluationSet,
    tally: Tally,
    *,
    is_stopping: Callable[[], bool],
    on_progress: Callable[[int, int], None],
) -> EvaluationResult | None:
    """Measure what ``tally`` lacks of the loaded checkpoint; None where a stop has cut it short."""
    session = opened.session
    step = session.progress.finished_steps
    return opened.evaluator.run(
        one,
        session.world,
        tally,
        stage=session.data.train.stage(max(1, step)),
        is_stopping=is_stopping,
        on_progress=on_progress,
    )
