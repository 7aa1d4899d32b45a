"""Loads a user's task, ``module:attr``, from a file next to the manifest, and reports its errors by file and
line."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
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
"""Errors whose messages need no file and line, whether the user's code or Evergrad's raises them."""
_COLLECTIVES: Final = os.path.join("torch", "distributed", "")
"""Folder of the torch code that communicates with other processes."""
_OF_ONE_PROCESS: Final = tuple(
    os.path.join("torch", "distributed", part, "") for part in ("tensor", "algorithms")
)
"""Folders in it whose code also runs in a single process, for operations on sharded weights or in wrapped
blocks."""
_MIXED: Final = "mixed torch.Tensor and DTensor"
"""Part of torch's message for an operation that mixes a sharded weight and a full tensor.

The error does not involve another process. Torch raises a plain RuntimeError for it and for many other
errors, so only the text distinguishes them."""


class Code:
    """Finds the line of a task's code that raised an error.

    If ``folder`` is None, the task is one of Evergrad's recipes, and its errors are not attributed to a user.
    """

    def __init__(self, folder: Path | None, *, has_trained: bool = False) -> None:
        """Attribute errors to files in ``folder``.

        ``has_trained``: whether the run has made steps, in this process or in another process.
        """
        self._folder = None if folder is None else folder.resolve()
        self._has_trained = has_trained

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Run the part ``what`` of the task, and add the file and line to errors of the user's code.

        Raises TaskInputError if the error occurs before the run's first step, because a retry would fail
        again. Raises TaskError afterwards: an error in one new process must not end a run that trains.
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
            # Put the message on one line and shorten it, because it becomes part of a Kubernetes status.
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
        """Whether the task is a user's task, not one of Evergrad's recipes."""
        return self._folder is not None

    def explain(self, problem: Problem) -> TaskInputError | TaskError:
        """Return the error for ``problem``: TaskError if the run has made a step, or else TaskInputError."""
        if self._has_trained:
            return TaskError(str(problem))
        return TaskInputError(problem)

    def note_trained(self) -> None:
        """Record that the run has made a step, which shows that the task works."""
        self._has_trained = True

    def _find_line(self, error: Exception) -> str | None:
        """Return ``file:line`` of the innermost frame in the user's files, or None.

        For a syntax error, this is the line of the error. The result is also None if a collective failed.
        """
        if (
            isinstance(error, SyntaxError)
            and error.filename
            and self._is_own(error.filename)
        ):
            return f"{error.filename}:{error.lineno}"
        # Use the innermost frame of the task's own files; frames of torch or Evergrad below it do not count.
        stack = traceback.extract_tb(error.__traceback__)
        own = [index for index, frame in enumerate(stack) if self._is_own(frame.filename)]
        if not own:
            return None
        # A sharded model gathers its weights inside the task's calls, so the cause may be a lost peer or the
        # network. The last frame of such a collective may be in torch's operators, outside of this folder.
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
    """Load the task that ``spec.training.recipe`` names as ``module:attr``, and create it with its options.

    For example, ``recipe: my_task:MyTask`` loads the class ``MyTask`` from ``my_task.py`` next to the
    manifest. ``has_trained``: whether the run has made steps; ``run_directory`` is passed to ``Setup``.

    Raises ConfigurationError if the file does not exist, the attribute is not a task, or the options are not
    valid. Raises TaskInputError or TaskError if the code of the file fails.
    """
    raise_if(task_problems(training, base_directory=base_directory), ConfigurationError)
    # Write the files that the manifest contains to a folder, so that Python can import them.
    write_task(training, base_directory)
    path = task_path(training, base_directory)
    folder = task_folder(training, base_directory)
    assert path is not None  # noqa: S101 - recipes of ours are not loaded here
    module_name, _, attribute = training.recipe.partition(":")
    code = Code(folder, has_trained=has_trained)
    with code.guarding("its import"):
        module = _import_from(folder, module_name, path)
    made: Any = getattr(module, attribute, None)
    check_made(made, f"{attribute} is no task of {path.name}")
    return make_task(made, training, base_directory, code, run_directory), code


def check_made(made: object, what: str) -> None:
    """Raise ConfigurationError with the text ``what`` if ``made`` is not the class of a task."""
    options_model = getattr(made, "Options", None)
    is_typed = isinstance(options_model, type) and issubclass(options_model, Section)
    if callable(made) and is_typed and hasattr(made, "loss"):
        return
    why = "it has no loss, or no Options (a Section)"
    if made is None:
        why = "there is nothing of this name"
    remedy = "Derive a class from evergrad_trainer.recipes.pretrain.Pretrain, and name it"
    raise ConfigurationError(Problem(_RECIPE, what, why, remedy))


def make_task(
    made: type[Task],
    training: Training,
    base_directory: Path,
    code: Code,
    run_directory: Path | None,
) -> Task:
    """Create the task of the class ``made``, with the options of the manifest.

    Raises ConfigurationError if the options or the names of the metrics are not valid. Raises TaskInputError
    or TaskError if the code of the class fails.
    """
    # Parse the options before the task is created: a wrong option is not an error of the task's code.
    options = parse_options(made.Options, training.options)
    with code.guarding("its making"):
        task = made(Setup(training, options, base_directory, run_directory))
    try:
        declare(task.metrics)
    except ValueError as error:
        what = f"{training.recipe.rpartition(':')[2]}.metrics: {error}"
        why = "a metric has a column, a label and a place of its own"
        problem = Problem(_RECIPE, what, why, "Rename it, or leave it out")
        raise ConfigurationError(problem) from None
    return task


def _import_from(folder: Path, module_name: str, path: Path) -> ModuleType:
    """Import the task's module. Raises ConfigurationError if Python imports another file than ``path``."""
    # Put the folder first, as Python does for a script: otherwise an installed package of the same name
    # would be used instead. The file can also import modules next to it.
    if (beside := str(folder.resolve())) not in sys.path:
        sys.path.insert(0, beside)
    # This process may have just written the file, so Python's cached directory listing may lack it.
    importlib.invalidate_caches()
    module = importlib.import_module(module_name)
    # Compare the files, not their names: in a pod, some of the task's files are links.
    found = getattr(module, "__file__", None)
    if found is None or not os.path.samefile(found, path.resolve()):
        what = f"the module {module_name} is taken from {found or 'Python itself'}"
        why = f"a module of that name was loaded before {path.resolve()}"
        raise ConfigurationError(Problem(_RECIPE, what, why, "Rename the file"))
    return module


def parse_options(model: type[Section], values: Mapping[str, Any]) -> Section:
    """Validate ``values`` with the task's options model, and return the options.

    Raises ConfigurationError with all problems if an option is not valid; each problem has its path in the
    manifest, for example ``spec.training.options.alpha``.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = problems_of(error, values, root=model, below=_OPTIONS)
        raise ConfigurationError(*found) from None
