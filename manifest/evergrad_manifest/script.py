"""``spec.script``: a training command of the user's own, with the same nodes, volume and status as a typed
run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from evergrad_manifest.base import LocalPath, Section
from evergrad_manifest.training.common import Metrics
from evergrad_manifest.values.numbers import Whole

MODULE: Final = "-m"


@dataclass(frozen=True)
class Program:
    """The program that a command starts.

    ``name``: a Python file's path, a module's dotted name, an executable's name or path.
    """

    kind: Literal["file", "module", "executable"]
    name: str
    arguments: tuple[str, ...]


class Script(Section):
    """A command that torchrun could start; it is started once a worker, with torchrun's variables set."""

    command: tuple[str, ...] = Field(min_length=1, max_length=1000)
    """Words that would follow ``torchrun``, each an item: a Python file (``train.py``), ``-m`` and a module,
    or an executable."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the workers, part of the recipe; what may change between starts belongs in the shell or
    in template.env."""
    working_directory: LocalPath = Field(default=".", min_length=1)
    """Where the workers start; relative to the manifest for ``evergrad run``, absolute inside the pod on a
    cluster."""
    grace_period_seconds: Whole = Field(default=30, ge=0, le=86400)
    """Seconds a worker has to save and leave after it was asked to stop; then it is killed."""
    metrics: Metrics = Metrics()
    """The Prometheus endpoint."""

    @property
    def program(self) -> Program:
        """The command taken apart; its first word decides."""
        return program_of(self.command)


def program_of(command: Sequence[str]) -> Program:
    """``[train.py, …]`` → a file, ``[-m, package.train, …]`` → a module, anything else → an executable."""
    first, rest = command[0], tuple(command[1:])
    if first == MODULE:
        return Program("module", rest[0] if rest else "", rest[1:])
    return Program("file" if first.endswith(".py") else "executable", first, rest)


def working_directory_of(script: Script, base_directory: Path) -> Path:
    """Where the workers start. ``base_directory``: what relative paths of the manifest are relative to."""
    return base_directory / script.working_directory


def program_path(program: Program, base_directory: Path) -> Path | None:
    """The file a command names, or None where it is looked up: a module, or an executable without a slash."""
    is_path = program.kind == "file" or (program.kind == "executable" and "/" in program.name)
    return base_directory / program.name if is_path else None


def worker_command(script: Script, *, base_directory: Path, python: str) -> tuple[str, ...]:
    """The words that start one worker.

    ``python``: the interpreter for files and modules, unbuffered as torchrun starts them.
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
