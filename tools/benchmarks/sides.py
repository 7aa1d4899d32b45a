"""Sides of a benchmark that take turns: each is a process of its own, in the environment that its users have.

A process gets a line for each turn and answers with one line of JSON; while it waits it computes nothing.
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
        """Let it take one turn; returns its answer. Raises RuntimeError with its words where it ended."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write("\n")
            self._input.flush()
        answer = self._output.readline()
        if not answer:
            self._words.seek(0)
            raise RuntimeError(f"{self._name} ended: {self._words.read()[-2000:]}")
        return json.loads(answer)

    def end(self) -> None:
        """End it: its input ends, and it is killed where that is not enough."""
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
    """Answers of ``num_turns`` turns of each, by name.

    The order is turned round each time: the one that comes second finds other caches.
    """
    answers: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(num_turns):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            answers[name].append(side.take_turn())
    return answers


class Turns:
    """The other end: within the process of a side."""

    def __init__(self) -> None:
        # Libraries print, too: their words go to the standard error.
        self._answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Wait for the next turn; False where there is none."""
        return bool(sys.stdin.readline())

    def answer(self, value: Any) -> None:
        """Send the answer of a turn."""
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()

    def serve(self, turn: Callable[[], Any]) -> None:
        """Take every turn by calling ``turn``."""
        while self.wait():
            self.answer(turn())
