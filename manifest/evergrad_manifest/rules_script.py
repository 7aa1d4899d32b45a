"""A run is typed or a script; and what a script's command and environment must satisfy."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from evergrad_coordinator.contract import OUR_VARIABLE_PREFIXES, OUR_VARIABLES
from evergrad_manifest.base import check_local_path
from evergrad_manifest.envelope import KINDS
from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import format_path
from evergrad_manifest.script import MODULE, Program, program_of
from evergrad_manifest.training.common import check_endpoint
from evergrad_manifest.values.numbers import NumberError, show
from evergrad_manifest.view import UNKNOWN, View

SCRIPT: Final = "spec.script"
_COMMAND: Final = f"{SCRIPT}.command"
_FIRST: Final = f"{_COMMAND}[0]"
_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MODULE_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PYTHON: Final = re.compile(r"python[0-9.]*")


def check_kind(view: View) -> Iterator[Problem]:
    """A run has either a typed recipe or a script."""
    if view.get("spec") is UNKNOWN:
        return
    given = [key for key in KINDS if view.is_given(f"spec.{key}")]
    why = "a run is exactly one of them"
    if len(given) == 2:
        yield Problem("spec", "training and script are both set", why, "Remove one of them")
    elif not given:
        remedy = "Add training (the typed recipe), or script with a command such as [train.py]"
        yield Problem("spec", "neither training nor script is set", why, remedy)


def check_command(view: View) -> Iterator[Problem]:
    """The command is what would follow torchrun: a program and its arguments, and nothing that launches."""
    command = view.get(_COMMAND)
    if not isinstance(command, Sequence) or not command:
        return
    for index, word in enumerate(command):
        if "\0" in word:
            yield Problem(
                f"{_COMMAND}[{index}]",
                "has a NUL character",
                "no argument can hold one",
                "Remove it",
            )
    if (launcher := _launcher_in(command)) is not None:
        index, name = launcher
        why = "the run starts its workers itself, as many as nodes and workersPerNode say"
        # The first word that looks like the program, for the remedy.
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
    """Where the command names a launcher of its own: as the program, as a module, or both after
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
        yield from _check_module(program.name)
        return

    # `["train.py --epochs 3"]` is the commonest mistake: a shell's line in one item.
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
        why = "no shell takes the words of a command apart"
        items = ", ".join([*map(show, words[:4]), *(["…"] if len(words) > 4 else [])])
        yield Problem(
            _FIRST,
            f"{show(program.name)} holds several words",
            why,
            f"Write each word as an item: [{items}]",
        )
    else:
        try:
            check_local_path(program.name)
        except NumberError as error:
            yield Problem(_FIRST, error.what, error.why, error.remedy)


def _check_module(name: str) -> Iterator[Problem]:
    if not name:
        yield Problem(
            _COMMAND,
            "names no module",
            f"one must follow {MODULE}",
            f"Write it as [{MODULE}, package.module]",
        )
    elif _MODULE_NAME.fullmatch(name) is None:
        remedy = (
            "Remove -m to run a file"
            if name.endswith(".py") or "/" in name
            else "Write it as in an import"
        )
        yield Problem(
            f"{_COMMAND}[1]",
            f"{show(name)} is not a module's name",
            "it is words with dots between them",
            remedy,
        )


def check_environment(view: View) -> Iterator[Problem]:
    """Variables have names that every shell can say, and none is one that the run sets."""
    values = view.raw("spec", "script", "env")
    for name, value in values.items() if isinstance(values, Mapping) else ():
        yield from _check_variable(str(name), value)


def _check_variable(name: str, value: Any) -> Iterator[Problem]:
    path = format_path(("spec", "script", "env", name))
    if _VARIABLE_NAME.fullmatch(name) is None:
        why = "letters, digits, '_', '-' and '.' are allowed, no digit first"
        yield Problem(path, f"{show(name)} is not a variable's name", why, "Rename it")
    elif name in OUR_VARIABLES or name.startswith(OUR_VARIABLE_PREFIXES):
        yield Problem(
            path,
            f"{show(name)} is reserved",
            "the run sets it for each of its processes",
            "Remove it",
        )
    if isinstance(value, str) and "\0" in value:
        yield Problem(path, "has a NUL character", "no variable can hold one", "Remove it")


def check_metrics(view: View) -> Iterator[Problem]:
    """An endpoint that does not exist cannot stay."""
    if view.get(SCRIPT) is not None:
        yield from check_endpoint(view, f"{SCRIPT}.metrics")


RULES: Final = (check_kind, check_command, check_environment, check_metrics)
