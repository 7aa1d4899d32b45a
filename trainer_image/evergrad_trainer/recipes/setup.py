"""Opens a run's recipe: its task, its sources as streams of micro-batches, and its evaluators and
observers."""

import hashlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.files.task_files import hash_task
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.training import METRICS_OF_ALL, Training
from evergrad_trainer.base.lock import exclusive
from evergrad_trainer.data.build import DataStreams, build_data
from evergrad_trainer.data.preparation.disk_errors import disk_errors
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.start_positions import DataStart
from evergrad_trainer.observers.build import build_lasting
from evergrad_trainer.observers.monitors import check_watched
from evergrad_trainer.observers.stateful_observers import Lasting
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Evaluator, Task

_EVALUATION: Final = "spec.training.evaluation"
_BEST: Final = "spec.training.checkpoint.best.metric"


@dataclass(frozen=True)
class Opened:
    """A task with everything that it reads.

    Each process has one instance, so that files and the tokenizer are opened once.
    """

    task: Task
    code: Code
    data: DataStreams
    evaluators: Mapping[str, Evaluator]
    observers: Lasting = field(default_factory=lambda: Lasting(()))
    prepared: Prepared | None = None
    """The prepared data that the sources read, including the data that the task itself has prepared."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the task's stages, as they are part of the fingerprint of the data."""
        stages = self.data.train.stages
        return {name: value for one in stages for name, value in one.facts.items()}

    def starting_at(self, start: DataStart | None, training: Training) -> "Opened":
        """Return a copy whose data begin at ``start`` if ``start`` continues another run's data.

        Raises ConfigurationError if the data cannot begin there.
        """
        if start is None or not start.goes_on:
            return self
        return replace(self, data=self.data.starting_at(start, training))


def open_recipe(
    training: Training,
    prepared: Prepared,
    base_directory: Path,
    *,
    has_trained: bool = False,
    prepared_directory: Path | None = None,
    run_directory: Path | None = None,
) -> Opened:
    """Open the recipe of ``training`` with prepared data.

    ``has_trained``: whether the run has made steps, which shows that the task's code works.
    ``prepared_directory`` is the directory in which the task prepares its own data, once for each node; it is
    None if these data are already prepared. ``run_directory`` is used by observers that write on every rank,
    and to find the state that the run began with.

    Raises DataError if data cannot be read, ConfigurationError if the manifest does not fit the task, and
    TaskInputError or TaskError if the task's code fails.
    """
    task, code = load_task(
        training, base_directory, has_trained=has_trained, run_directory=run_directory
    )
    if prepared_directory is not None and (code.is_own or not training.data.sources):
        prepared = _prepare_own(
            task, code, training, prepared, base_directory, prepared_directory
        )
    with code.guarding("its stages and evaluators"):
        evaluators = task.evaluators(prepared)
        stages = task.stages(prepared)
    measured = {
        name: (*METRICS_OF_ALL, *(task.metrics if one.metrics is None else one.metrics))
        for name, one in evaluators.items()
    }
    _check_names(training, measured)
    check_watched(training, task.metrics, measured)
    sets = {name: evaluator.sources for name, evaluator in evaluators.items()}
    with code.guarding("its observers"):
        own_observers = list(task.observers())
    observers = build_lasting(training, own_observers, run_directory)
    try:
        with code.guarding("its sources"):
            data = build_data(training, stages, sets)
    except ValueError as error:
        if not code.is_own:
            raise
        why = "the task's stages and evaluators say so"
        problem = Problem("spec.training.recipe", str(error), why, "Correct them")
        raise code.explain(problem) from error
    return Opened(task, code, data, evaluators, observers, prepared)


def _check_names(training: Training, measured: Mapping[str, Sequence[str]]) -> None:
    """Check the evaluation sets and the metric that the manifest names.

    Names of a task's own sets and metrics are not available earlier. Raises ConfigurationError.
    """
    problems = []
    for index, one in enumerate(training.evaluation.sets):
        if one.name not in measured:
            where = f"{_EVALUATION}.sets[{index}].name"
            what = f"{one.name!r} is not an evaluation set"
            problems.append(_unknown(where, what, one.name, measured))
    if (best := training.checkpoint.best) is not None:
        metrics = [f"{name}/{metric}" for name, own in measured.items() for metric in own]
        if best.metric not in metrics:
            what = f"{best.metric!r} is not a metric of this run"
            problems.append(_unknown(_BEST, what, best.metric, metrics))
    raise_if(problems, ConfigurationError)


def _unknown(where: str, what: str, name: str, known: Collection[str]) -> Problem:
    """Return the problem for an unknown name, with the nearest known name as a suggestion."""
    near = nearest(name, list(known))
    why = (
        f"did you mean `{near}`?"
        if near
        else "nothing that the task measures has this name"
    )
    return Problem(where, what, why, f"Known here: {', '.join(known) or 'none'}")


def _prepare_own(
    task: Task,
    code: Code,
    training: Training,
    prepared: Prepared,
    base_directory: Path,
    prepared_directory: Path,
) -> Prepared:
    """Let the task prepare its data.

    The folder is named after a hash of the task's files or package and of its options, or after the recipe.
    """
    prepare = getattr(task, "prepare", None)
    if prepare is None:
        # A task without one of Evergrad's base classes may be older than this method.
        return prepared
    name = f"recipe-{training.recipe}"
    if code.is_own:
        content = [hash_task(training, base_directory), dict(training.options)]
        text = json.dumps(content, sort_keys=True)
        name = f"task-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder = prepared_directory.absolute() / name
    waiting: list[str] = []

    def note_wait() -> None:
        if not waiting:
            waiting.append(f"waiting: another process prepares the task's data in {folder}")
            print(waiting[0], file=sys.stderr, flush=True)

    with ExitStack() as held:
        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Nodes share a volume: the lock ensures that the second node finds complete data.
            lock = exclusive(
                folder.with_suffix(".lock"), is_done=lambda: False, on_wait=note_wait
            )
            is_alone = held.enter_context(lock)
            # Create the folder under the lock, because the process that held it may have removed the folder.
            folder.mkdir(exist_ok=True)
        # Keep this outside of ``disk_errors``: an OSError of the task's own code does not mean that the data
        # are wrong, and a later start may succeed.
        with code.guarding("prepare"):
            facts = prepare(prepared, folder)
        if not facts:
            with disk_errors(folder):
                is_empty = not any(folder.iterdir())
                # Without a lock, another process may have created the folder but no file yet.
                if is_empty and is_alone:
                    folder.rmdir()
            if is_empty:
                return prepared
    return replace(prepared, folder=folder, facts=_convert_facts(code, facts))


def _convert_facts(code: Code, facts: Any) -> dict[str, Any]:
    """Return the facts as another process receives them.

    Facts that are not valid JSON therefore fail on every node.
    """
    try:
        converted: dict[str, Any] = json.loads(
            json.dumps(dict(facts or {}), allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        why = f"{error}; it is given to other processes"
        remedy = (
            "Return texts, numbers, lists and mappings, and write the rest into the folder"
        )
        problem = Problem(
            "spec.training.recipe", "prepare returns what is no JSON", why, remedy
        )
        raise code.explain(problem) from error
    return converted
