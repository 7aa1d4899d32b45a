"""Opens a run's recipe: its task, its sources as streams of micro-batches, and what it measures between
steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.data.build import Data, build_data
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.observers.lasting import Lasting
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.own import Code
from evergrad_trainer.task import Evaluator, Task


@dataclass(frozen=True)
class Opened:
    """A task with everything it reads. One a process: files and tokenizer are opened once."""

    task: Task
    code: Code
    data: Data
    evaluators: Mapping[str, Evaluator]
    observers: Lasting = field(default_factory=lambda: Lasting(()))


def open_recipe(
    training: Training, prepared: Prepared, base_directory: Path, *, has_trained: bool = False
) -> Opened:
    """The recipe of ``training`` over prepared data.

    ``has_trained``: the run has made steps, so that its code is known to work. Raises DataError,
    ConfigurationError, TaskInputError, TaskError.
    """
    task, code = load_task(training, base_directory, has_trained=has_trained)
    with code.guarding("its stages and evaluators"):
        evaluators, stages = task.evaluators(prepared), task.stages(prepared)
    sets = {name: evaluator.sources for name, evaluator in evaluators.items()}
    with code.guarding("its observers"):
        observers = Lasting(task.observers())
    try:
        data = build_data(training, stages, sets)
    except ValueError as error:
        if not code.is_own:
            raise
        why, remedy = "the task's stages and evaluators say so", "Correct them"
        raise code.explain(Problem("spec.training.recipe", str(error), why, remedy)) from error
    return Opened(task, code, data, evaluators, observers)
