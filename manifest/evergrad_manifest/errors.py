"""Errors of input that every package raises, and the value that describes a problem.

The whole tree of errors is in evergrad_trainer.base.errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evergrad_common.contract import ErrorKind, ExitCode


@dataclass(frozen=True)
class Problem:
    """One mistake in the user's input.

    ``path`` is the place (the path of a field or of a file, with its line), ``what`` and ``why`` are the
    mistake and its reason, ``remedy`` is the correction. Rendered as ``path: what; why. Remedy.`` For
    example, ``spec.nodes.max: 2 is below nodes.min 3. Raise max to at least 3, or lower min.``
    """

    path: str
    what: str
    why: str = ""
    remedy: str = ""
    is_of_host: bool = False
    """The problem is specific to this host or temporary: another host, or a later attempt, may not have
    it."""

    def __str__(self) -> str:
        sentence = f"{self.path}: {self.what}" if self.path else self.what
        if self.why:
            sentence += f"; {self.why}"
        sentence = _ended(sentence)
        return f"{sentence} {_ended(self.remedy)}" if self.remedy else sentence


def describe_problem(problem: Problem) -> dict[str, str]:
    """Return the parts of a problem by their names, as in JSON documents."""
    return {
        "path": problem.path,
        "what": problem.what,
        "why": problem.why,
        "remedy": problem.remedy,
    }


def _ended(sentence: str) -> str:
    # Parts have no full stop, so that any of them may be the last. Some quote a whole sentence.
    return sentence if sentence.endswith((".", "?", "!")) else sentence + "."


class EvergradError(Exception):
    """A failure whose cause is not the user's input."""

    code = "internal"
    """The kind of the error, for programs: a family and a name, separated by dots. Its meaning never
    changes."""
    exit_code: ExitCode = ExitCode.INTERNAL
    kind: ErrorKind = ErrorKind.INTERNAL


class InputError(EvergradError):
    """The user's input cannot be used. Carries every problem found, not only the first."""

    code = "input"
    exit_code = ExitCode.USER_ERROR
    kind = ErrorKind.INPUT

    def __init__(self, *problems: Problem) -> None:
        self.problems: tuple[Problem, ...] = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class ConfigurationError(InputError):
    """The manifest is wrong."""

    code = "input.configuration"


def raise_if(problems: Sequence[Problem], error: type[InputError]) -> None:
    """Raise ``error`` with all ``problems``, or return if there are none."""
    if problems:
        raise error(*problems)
