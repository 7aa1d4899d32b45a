"""``spec.script``: the user's own training command, with the same nodes, volume and status as a typed run;
and its rules. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import FreeMapping, LocalPath, Section, check_local_path
from evergrad_manifest.model.environment import check_source, is_reserved
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import View
from evergrad_manifest.training.common import Metrics, check_endpoint
from evergrad_manifest.values.numbers import NumberError, Whole, show

MODULE: Final = "-m"
SCRIPT: Final = "spec.script"
"""Path of the command's section in the file."""
_COMMAND: Final = f"{SCRIPT}.command"
_FIRST: Final = f"{_COMMAND}[0]"
_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MODULE_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PYTHON: Final = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Program:
    """The program that a command starts.

    ``name``: the path of a Python file, the dotted name of a module, or the name or path of an executable.
    """

    kind: Literal["file", "module", "executable"]
    name: str
    arguments: tuple[str, ...]


class Script(Section):
    """A command that torchrun could start; it is started once a worker, with torchrun's variables set."""

    command: tuple[str, ...] = Field(min_length=1, max_length=1000)
    """The words after ``torchrun``, one in each item: a Python file (``train.py``), ``-m`` and a module, or
    an executable."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the workers, which is part of the recipe. Set variables that can change between starts
    in the shell or in ``template.env``."""
    working_directory: LocalPath = Field(default=".", min_length=1)
    """Directory in which the workers start. For ``evergrad run`` it is relative to the manifest. On a cluster
    it is an absolute path in the pod."""
    value_from: FreeMapping = Field(default_factory=dict)
    """Further variables, each from one of ``secretKeyRef``, ``configMapKeyRef``, ``fieldRef`` and
    ``resourceFieldRef``. For ``evergrad run``, set them in the shell."""
    grace_period_seconds: Whole = Field(default=30, ge=0, le=86400)
    """Seconds that a worker has to save and leave when it must stop. Then it is killed."""
    finish_grace_period_seconds: Whole = Field(default=300, ge=0, le=86400)
    """Seconds that a worker can be idle after another worker has ended with 0. Then its stacks are logged,
    and it is ended. A worker that uses a processor, reads, writes or prints is not idle. 0: no limit."""
    metrics: Metrics = Metrics()
    """The Prometheus endpoint."""

    @property
    def program(self) -> Program:
        """The program and the arguments of the command. Its first word decides the kind of program."""
        return program_of(self.command)


def check_command(view: View) -> Iterator[Problem]:
    """Check that the command is a program and its arguments, as after ``torchrun``, without a launcher."""
    # A command that is not a list of words has its own problem.
    command = view.get(_COMMAND)
    if not isinstance(command, Sequence) or not command:
        return
    for index, word in enumerate(command):
        if "\0" in word:
            yield Problem(
                f"{_COMMAND}[{index}]",
                "has a NUL character",
                "no argument can contain one",
                "Remove it",
            )

    # A launcher inside ours would start its own workers, which Evergrad would not count, save or restart.
    if (launcher := _launcher_in(command)) is not None:
        index, name = launcher
        why = "the run starts its workers itself; nodes and workersPerNode set their number"
        # Name the first word that looks like the program in the remedy.
        rest = command[index + 1 :]
        looks = (word for word in rest if word.endswith(".py") or word == MODULE)
        remedy = f"Begin with what follows its options: {show(next(looks, 'train.py'))}"
        yield Problem(f"{_COMMAND}[{index}]", f"{show(name)} is a launcher", why, remedy)
    elif command[0].startswith("-") and command[0] != MODULE:
        why = "options of the launcher are not given: the run sets them from nodes and workersPerNode"
        yield Problem(
            _FIRST,
            f"{show(command[0])} is an option, not a program",
            why,
            "Begin with the program, such as train.py",
        )
    else:
        yield from _check_program(program_of(command))


def _launcher_in(command: Sequence[str]) -> tuple[int, str] | None:
    """Return index and name of a launcher in the command: the program, a module, or either after
    ``python``."""
    # `python -u -m torch.distributed.run …` hides the launcher behind options of the interpreter.
    is_python = _PYTHON.fullmatch(PurePosixPath(command[0]).name) is not None
    start = 1 if is_python else 0
    while (
        is_python
        and start < len(command)
        and command[start].startswith("-")
        and command[start] != MODULE
    ):
        start += 1
    if start + 1 < len(command) and command[start] == MODULE:
        return (start + 1, command[start + 1]) if command[start + 1] in _LAUNCHERS else None
    if start < len(command) and PurePosixPath(command[start]).name in _LAUNCHERS:
        return start, command[start]
    return None


def _check_program(program: Program) -> Iterator[Problem]:
    if program.kind == "module":
        yield from _check_module(program)
    else:
        yield from _check_file(program)


def _check_module(program: Program) -> Iterator[Problem]:
    # Check only the spelling of a module's name: the available packages depend on the interpreter that will
    # run it.
    if not program.name:
        yield Problem(
            _COMMAND,
            "names no module",
            f"one must follow {MODULE}",
            f"Write it as [{MODULE}, package.module]",
        )
    elif _MODULE_NAME.fullmatch(program.name) is None:
        remedy = (
            "Remove -m to run a file"
            if program.name.endswith(".py") or "/" in program.name
            else "Write it as in an import"
        )
        yield Problem(
            f"{_COMMAND}[1]",
            f"{show(program.name)} is not a module's name",
            "it is words with dots between them",
            remedy,
        )


def _check_file(program: Program) -> Iterator[Problem]:
    # `["train.py --epochs 3"]`, a shell's line in one item, is the most common mistake. The path of an
    # executable may contain spaces, so a slash makes the item valid, unless its first word is a Python file.
    words = program.name.split()
    if not words:
        yield Problem(
            _FIRST,
            "names no program",
            "",
            "Write a Python file, -m and a module, or an executable",
        )
    elif (
        len(words) > 1
        and program.kind == "executable"
        and ("/" not in program.name or words[0].endswith(".py"))
    ):
        why = "no shell splits a command into words"
        items = ", ".join([*map(show, words[:4]), *(["…"] if len(words) > 4 else [])])
        yield Problem(
            _FIRST,
            f"{show(program.name)} contains several words",
            why,
            f"Write each word as an item: [{items}]",
        )
    else:
        try:
            check_local_path(program.name)
        except NumberError as error:
            yield Problem(_FIRST, error.what, error.why, error.remedy)


def check_environment(view: View) -> Iterator[Problem]:
    """Check that variables have names that every shell can use, and that the run does not set them itself."""
    # Read the file itself, so that a variable with a wrong value does not hide problems of others.
    values = view.raw("spec", "script", "env")
    texts = values if isinstance(values, Mapping) else {}
    sources = view.raw("spec", "script", "valueFrom")
    references = sources if isinstance(sources, Mapping) else {}
    found = [("env", *one) for one in texts.items()]
    found += [("valueFrom", *one) for one in references.items()]
    for kind, key, value in found:
        name, path = str(key), format_path(("spec", "script", kind, str(key)))
        if _VARIABLE_NAME.fullmatch(name) is None:
            why = "letters, digits, '_', '-' and '.' are allowed, no digit first"
            yield Problem(path, f"{show(name)} is not a variable's name", why, "Rename it")
        elif is_reserved(name):
            yield Problem(
                path,
                f"{show(name)} is reserved",
                "the run sets it for each of its processes",
                "Remove it",
            )
        if isinstance(value, str) and "\0" in value:
            yield Problem(
                path, "has a NUL character", "no variable can contain one", "Remove it"
            )

    # A pod has only one variable of a name, so the order would decide silently which of two is used.
    given = view.raw("spec", "template", "env")
    in_pod = {
        item.get("name")
        for item in (given if isinstance(given, list | tuple) else ())
        if isinstance(item, Mapping)
    }
    for name, source in references.items():
        place = ("spec", "script", "valueFrom", str(name))
        yield from check_source(place, source)
        twin = "spec.script.env" if name in texts else "spec.template.env"
        if name in texts or name in in_pod:
            what, remedy = f"{show(name)} is in {twin} already", "Remove one of them"
            yield Problem(format_path(place), what, "a variable has one value", remedy)


def check_metrics(view: View) -> Iterator[Problem]:
    """Check that a metrics endpoint that does not exist is not configured to stay."""
    if view.get(SCRIPT) is not None:
        yield from check_endpoint(view, f"{SCRIPT}.metrics")


def program_of(command: Sequence[str]) -> Program:
    """Return the program of a command: ``[train.py, …]`` → a file, ``[-m, package.train, …]`` → a module, any
    other → an executable."""
    first, rest = command[0], tuple(command[1:])
    if first == MODULE:
        return Program("module", rest[0] if rest else "", rest[1:])
    return Program("file" if first.endswith(".py") else "executable", first, rest)


def working_directory_of(script: Script, base_directory: Path) -> Path:
    """Return the folder in which the workers start. ``base_directory``: the start of relative paths."""
    return base_directory / script.working_directory


def program_path(program: Program, base_directory: Path) -> Path | None:
    """Return the file that a program names; None if it is looked up, as a module or an executable without a
    slash."""
    is_path = program.kind == "file" or (
        program.kind == "executable" and "/" in program.name
    )
    return base_directory / program.name if is_path else None


def worker_command(script: Script, *, base_directory: Path, python: str) -> tuple[str, ...]:
    """Return the words that start one worker.

    ``python``: the interpreter for files and modules, unbuffered as torchrun starts it.
    """
    program = script.program
    if program.kind == "module":
        return (python, "-u", MODULE, program.name, *program.arguments)
    path = program_path(program, base_directory)
    name = program.name if path is None else str(path)
    return (
        (python, "-u", name, *program.arguments)
        if program.kind == "file"
        else (name, *program.arguments)
    )


RULES: Final = (check_command, check_environment, check_metrics)
