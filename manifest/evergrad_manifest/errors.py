"""Errors of input that every package raises, and the value that says what is wrong.

The whole tree: evergrad_trainer.base.errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evergrad_common.contract import ErrorKind, ExitCode


@dataclass(frozen=True)
class Problem:
    """One mistake in the user's input.

    ``path`` is the place (a field's path or a file's, with its line), ``what`` and ``why`` are the mistake
    and its reason, ``remedy`` is the correction. Rendered as ``path: what; why. Remedy.``
    """

    path: str
    what: str
    why: str = ""
    remedy: str = ""
    is_of_host: bool = False
    """This host or this moment is to blame; another host, or a later attempt, may find nothing wrong."""

    def __str__(self) -> str:
        sentence = f"{self.path}: {self.what}" if self.path else self.what
        if self.why:
            sentence += f"; {self.why}"
        sentence = _ended(sentence)
        return f"{sentence} {_ended(self.remedy)}" if self.remedy else sentence


def describe_problem(problem: Problem) -> dict[str, str]:
    """The parts of a problem by their names, as JSON documents have them."""
    return {
        "path": problem.path,
        "what": problem.what,
        "why": problem.why,
        "remedy": problem.remedy,
    }


def _ended(sentence: str) -> str:
    # Parts are written without their full stop, so that any of them may be the last; some quote a whole
    # sentence.
    return sentence if sentence.endswith((".", "?", "!")) else sentence + "."


class EvergradError(Exception):
    """A failure whose cause is not the user's input."""

    code = "internal"
    """The kind of mistake, for programs: a family and a name with dots between. Never changes its meaning."""
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
