"""Sides of a benchmark that alternate: each is a separate process, in the environment of its users.

A process receives a line for each turn, and answers with one line of JSON. It computes nothing while it
waits.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast


class Side:
    """One side, started by ``command``."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._words = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )
        self._input = cast(TextIO, self._process.stdin)
        self._output = cast(TextIO, self._process.stdout)

    def take_turn(self) -> Any:
        """Let the side take one turn, and return its answer. Raises RuntimeError with its output if it has
        ended."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write("\n")
            self._input.flush()
        answer = self._output.readline()
        if not answer:
            self._words.seek(0)
            raise RuntimeError(f"{self._name} ended: {self._words.read()[-2000:]}")
        return json.loads(answer)

    def end(self) -> None:
        """End the side: close its input, and kill it if it does not exit."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._words.close()


@contextlib.contextmanager
def start_sides(
    names: Sequence[str], script: str, arguments: Sequence[str]
) -> Iterator[dict[str, Side]]:
    """Start a process for each of ``names``: ``script --side NAME`` with ``arguments``."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(name, [sys.executable, script, "--side", name, *arguments])
        yield sides
    finally:
        for side in sides.values():
            side.end()


def take_turns(sides: dict[str, Side], *, num_turns: int) -> dict[str, list[Any]]:
    """Return the answers of ``num_turns`` turns of each side, by name.

    The order alternates, because the second side finds other cache contents.
    """
    answers: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(num_turns):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            answers[name].append(side.take_turn())
    return answers


class Turns:
    """The other end of the connection, in the process of a side."""

    def __init__(self) -> None:
        # Libraries print, too. Redirect their output to stderr.
        self._answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Wait for the next turn. Returns False if there is none."""
        return bool(sys.stdin.readline())

    def answer(self, value: Any) -> None:
        """Send the answer of a turn."""
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()

    def serve(self, turn: Callable[[], Any]) -> None:
        """Call ``turn`` for each turn."""
        while self.wait():
            self.answer(turn())
