"""A task of the user's own: loads ``module:attr`` from beside the manifest, and names its errors by file and
line."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError

from evergrad_common.metrics import declare
from evergrad_manifest.errors import ConfigurationError, EvergradError, Problem, raise_if
from evergrad_manifest.files.task_files import (
    task_folder,
    task_path,
    task_problems,
    write_task,
)
from evergrad_manifest.reading.problems import problems_of
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import TaskError, TaskInputError
from evergrad_trainer.task import Section, Setup, Task

_RECIPE: Final = "spec.training.recipe"
_OPTIONS: Final = ("spec", "training", "options")
_OF_THE_HOST = (
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    EvergradError,
)
"""Errors that say by themselves what is wrong, whichever code they come from."""
_COLLECTIVES: Final = os.path.join("torch", "distributed", "")
"""Below it lies the code of torch that talks to other processes."""
_OF_ONE_PROCESS: Final = tuple(
    os.path.join("torch", "distributed", part, "") for part in ("tensor", "algorithms")
)
"""Parts of it that an operation on a weight that is cut, or in a wrapped block, runs through."""
_MIXED: Final = "mixed torch.Tensor and DTensor"
"""Torch's words for an operation on a part of a weight and a whole tensor, without another process.

Torch raises a plain RuntimeError for it, as for much else, so that only the text tells them apart."""


class Code:
    """Names the line of a task that an error comes from.

    Without a ``folder`` the task is ours, and so are its errors.
    """

    def __init__(self, folder: Path | None, *, has_trained: bool = False) -> None:
        """``has_trained``: the run has made steps, in this process or in others."""
        self._folder = None if folder is None else folder.resolve()
        self._has_trained = has_trained

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Run ``what`` of the task, and name errors of its code.

        Raises TaskInputError before the run's first step: no retry cures what cannot work at all. Raises
        TaskError afterwards: a newcomer for which it does not work must not end a run that does.
        """
        try:
            yield
        except _OF_THE_HOST:
            raise
        except Exception as error:
            where = self._find_line(error)
            if where is None:
                raise
            found = type(error).__name__
            remedy = "Correct the file"
            # On one line, cut short: the message travels to a status.
            said = " ".join(str(error).split())[:500]
            if _MIXED in said:
                found = (
                    "a weight that is cut (fsdp2) is whole only while its module is called"
                )
                remedy = (
                    "Compute with it in its module's forward, or read task.full_tensor(weight) in enter and "
                    "after_update; a frozen module that is named in Modules.replicated is held whole"
                )
            elif said:
                found = f"{found}: {said}"
            why = f"the task of spec.training.recipe failed in {what}"
            problem = Problem(where, found, why, remedy)
            raise self.explain(problem) from error

    @property
    def is_own(self) -> bool:
        """Whether the task is the user's own."""
        return self._folder is not None

    def explain(self, problem: Problem) -> TaskInputError | TaskError:
        """The error that ``problem`` of the task's code is at this moment."""
        if self._has_trained:
            return TaskError(str(problem))
        return TaskInputError(problem)

    def note_trained(self) -> None:
        """The run has made a step: the task can work."""
        self._has_trained = True

    def _find_line(self, error: Exception) -> str | None:
        """``file:line`` of the innermost frame in the user's files; of a syntax error the line it
        is about."""
        if (
            isinstance(error, SyntaxError)
            and error.filename
            and self._is_own(error.filename)
        ):
            return f"{error.filename}:{error.lineno}"
        # The innermost line of the task's own files: what torch or we call below it is not the user's.
        stack = traceback.extract_tb(error.__traceback__)
        own = [index for index, frame in enumerate(stack) if self._is_own(frame.filename)]
        if not own:
            return None
        # A sharded model gathers its weights under the task's calls: a peer is gone, or the network. The last
        # frame of such a collective may be that of torch's operators, which lie elsewhere.
        below = [frame.filename for frame in stack[own[-1] + 1 :]]
        is_collective = any(
            _COLLECTIVES in file
            and (at == len(below) or not any(part in file for part in _OF_ONE_PROCESS))
            for at, file in enumerate(below, start=1)
        )
        if is_collective and _MIXED not in str(error):
            return None
        return f"{stack[own[-1]].filename}:{stack[own[-1]].lineno}"

    def _is_own(self, file_name: str) -> bool:
        if self._folder is None:
            return False
        path = Path(file_name)
        is_below = path.is_absolute() and path.is_relative_to(self._folder)
        return is_below and "site-packages" not in path.parts


def load_own(
    training: Training,
    base_directory: Path,
    *,
    has_trained: bool = False,
    run_directory: Path | None = None,
) -> tuple[Task, Code]:
    """The task that ``recipe: module:attr`` names, made with its options.

    ``has_trained``: the run has made steps. ``run_directory``: as in ``Setup``. Raises ConfigurationError for
    a file that is not there, an attribute that is no task, or wrong options; TaskInputError or TaskError for
    an error of the file itself.
    """
    raise_if(task_problems(training, base_directory=base_directory), ConfigurationError)
    # Files that the manifest carries have to lie in a folder before Python can import them.
    write_task(training, base_directory)
    path = task_path(training, base_directory)
    folder = task_folder(training, base_directory)
    assert path is not None  # noqa: S101 - recipes of ours are not loaded here
    module_name, _, attribute = training.recipe.partition(":")
    code = Code(folder, has_trained=has_trained)
    with code.guarding("its import"):
        # First, as for a script: a package that is installed under the same name must not be trained instead.
        # Modules beside the file can be imported by it.
        if (beside := str(folder.resolve())) not in sys.path:
            sys.path.insert(0, beside)
        # The file may have been written a moment ago, by this process.
        importlib.invalidate_caches()
        module = importlib.import_module(module_name)
        # By the file and not by the name: in a pod some of the task's files are links.
        found = getattr(module, "__file__", None)
        if found is None or not os.path.samefile(found, path.resolve()):
            what = f"the module {module_name} is taken from {found or 'Python itself'}"
            why = f"a module of that name was loaded before {path.resolve()}"
            raise ConfigurationError(Problem(_RECIPE, what, why, "Rename the file"))
    made = getattr(module, attribute, None)
    options_model = getattr(made, "Options", None)
    is_typed = isinstance(options_model, type) and issubclass(options_model, Section)
    if not callable(made) or not is_typed or not hasattr(made, "loss"):
        what = f"{attribute} is no task of {path.name}"
        why = "it has no loss, or no Options (a Section)"
        if made is None:
            why = "there is nothing of this name"
        remedy = (
            "Derive a class from evergrad_trainer.recipes.pretrain.Pretrain, and name it"
        )
        raise ConfigurationError(Problem(_RECIPE, what, why, remedy))
    # Options before the task is made: a typing error in the file is no error of its code.
    options = parse_options(made.Options, training.options)
    with code.guarding("its making"):
        task: Task = made(Setup(training, options, base_directory, run_directory))
    try:
        declare(task.metrics)
    except ValueError as error:
        what = f"{attribute}.metrics: {error}"
        why = "a metric has a column, a label and a place of its own"
        problem = Problem(_RECIPE, what, why, "Rename it, or leave it out")
        raise ConfigurationError(problem) from None
    return task, code


def parse_options(model: type[Section], values: Mapping[str, Any]) -> Section:
    """The options as the task's model types them.

    Raises ConfigurationError with all problems, in the file's paths.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = problems_of(error, values, root=model, below=_OPTIONS)
        raise ConfigurationError(*found) from None
