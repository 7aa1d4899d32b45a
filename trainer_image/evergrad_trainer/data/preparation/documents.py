"""Converts lines to texts. A line is a JSON object or plain text.

Lines that give no text are counted by reason.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from io import RawIOBase
from json import scanner
from typing import Any, BinaryIO, Final, cast

from evergrad_trainer.data.chat_forms import CONTENT, REASONING, TOOL_CALLS
from evergrad_trainer.data.preparation.json_values import (
    LongNumber,
    find_nested,
    parse_json,
)
from evergrad_trainer.data.tokenizers import replace_lone_surrogates

MOST_PROBLEMS: Final = 5
"""Maximum number of malformed lines that are listed. The same number of too long rows is listed too."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_WHITE: Final = " \t\r\n"
_scan: Callable[[str, int], tuple[Any, int]] = cast(Any, scanner).make_scanner(
    json.JSONDecoder()
)


class SkipReason(StrEnum):
    """The reason why a line gives no document, or only a part of its content."""

    NOT_UTF8 = "notUtf8"
    NOT_JSON = "notJson"
    NOT_AN_OBJECT = "notAnObject"
    NO_TEXT = "noText"
    NO_ROW = "noRow"
    NO_COMPLETION = "noCompletion"
    TOO_LONG = "tooLong"
    LEFT_OUT = "leftOut"
    TRUNCATED = "truncated"
    BLANK_LINE = "blankLine"
    EMPTY_TEXT = "emptyText"
    DROPPED_CONTENT = "droppedContent"
    DROPPED_REASONING = "droppedReasoning"
    DROPPED_TOOL_CALLS = "droppedToolCalls"


IN_WORDS: Final = {
    SkipReason.NOT_UTF8: "not UTF-8",
    SkipReason.NOT_JSON: "not JSON",
    SkipReason.NOT_AN_OBJECT: "not an object",
    SkipReason.NO_TEXT: "without a text",
    SkipReason.NO_ROW: "that are no rows",
    SkipReason.NO_COMPLETION: "with nothing to learn",
    SkipReason.TOO_LONG: "too long",
    SkipReason.LEFT_OUT: "too long, and left out",
    SkipReason.TRUNCATED: "too long, and cut",
    SkipReason.BLANK_LINE: "blank",
    SkipReason.EMPTY_TEXT: "with an empty text",
    SkipReason.DROPPED_CONTENT: "of which the chat template leaves out a content",
    SkipReason.DROPPED_REASONING: "of which the chat template leaves out a reasoning",
    SkipReason.DROPPED_TOOL_CALLS: "of which the chat template leaves out tool calls",
}
OF_DROPPED: Final = {
    CONTENT: SkipReason.DROPPED_CONTENT,
    REASONING: SkipReason.DROPPED_REASONING,
    TOOL_CALLS: SkipReason.DROPPED_TOOL_CALLS,
}
"""The reason to count a row under if its template omits a part of this kind."""
KEPT: Final = frozenset({SkipReason.TRUNCATED, *OF_DROPPED.values()})
"""Reasons of rows that are used for training although a part of them is omitted."""

HARMLESS: Final = frozenset(
    {SkipReason.BLANK_LINE, SkipReason.EMPTY_TEXT, SkipReason.LEFT_OUT, *KEPT}
)
"""Reasons that are not malformed: under every policy, the line is counted, and skipped or truncated."""


@dataclass(frozen=True)
class LineProblem:
    """A malformed line, or a row, or a file that is one document.

    ``line``: its number in the source. ``is_torn``: the file ends within the line.
    """

    line: int
    what: str
    why: str
    is_torn: bool = False
    is_too_long: bool = False


class RowError(Exception):
    """A row cannot be read. ``what`` describes the problem, and ``why`` explains it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)
        self.what, self.why = what, why


@dataclass
class LineCounts:
    """Counts the lines of a chunk that gave no text, and collects the first problems.

    The first malformed lines and the first rows that are too long are collected separately, because a policy
    may skip malformed lines but refuse rows that are too long. ``repaired``: number of texts in which a lone
    surrogate was replaced.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    problems: list[LineProblem] = field(default_factory=list)

    @property
    def malformed(self) -> int:
        """Number of lines that are an error under ``malformed: refuse``."""
        counts = [count for reason, count in self.skipped.items() if reason not in HARMLESS]
        return sum(counts)

    def pass_over(self, problem: LineProblem, reason: SkipReason) -> None:
        """Count a malformed line, and collect its problem."""
        self.skipped[reason] += 1
        # Keep only the first problems: every line of a file of the wrong format has one.
        known = sum(one.is_too_long == problem.is_too_long for one in self.problems)
        if known < MOST_PROBLEMS:
            self.problems.append(problem)

    def add(self, other: "LineCounts") -> None:
        """Add the counts and problems of another chunk."""
        self.skipped.update(other.skipped)
        self.repaired += other.repaired
        # Sort by line, because chunks finish in any order.
        problems = [*self.problems, *other.problems]
        problems.sort(key=lambda problem: problem.line)
        of_kind = [
            [one for one in problems if one.is_too_long == kind] for kind in (False, True)
        ]
        kept = [one for some in of_kind for one in some[:MOST_PROBLEMS]]
        self.problems = sorted(kept, key=lambda problem: problem.line)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "skipped": dict(self.skipped),
            "repaired": self.repaired,
            "problems": [asdict(problem) for problem in self.problems],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> "LineCounts":
        """The inverse of ``to_json``."""
        problems = [LineProblem(**problem) for problem in value["problems"]]
        return LineCounts(Counter(value["skipped"]), value["repaired"], problems)


@dataclass(frozen=True)
class Block:
    """Some whole lines. ``is_torn``: the last of these lines ends the file without a newline."""

    data: bytes
    is_torn: bool


def read_blocks(
    file: BinaryIO | RawIOBase, *, start: int, end: int, size: int
) -> Iterator[Block]:
    """Yield the bytes [start, end), which are whole lines, in blocks of whole lines of about ``size`` bytes.

    A byte-order mark at the start of the file is removed. Raises EOFError if the file ends before ``end``.
    """
    file.seek(start)
    pieces: list[bytes] = []
    mark = _BYTE_ORDER_MARK if start == 0 else b""
    left = end - start
    while left:
        data = file.read(min(size, left))
        if not data:
            raise EOFError
        left -= len(data)
        # Keep the bytes after the last newline for the next block. A line may be longer than a block.
        cut = data.rfind(b"\n") + 1
        if cut:
            lines = b"".join([*pieces, data[:cut]])
            yield Block(lines.removeprefix(mark), is_torn=False)
            pieces = []
            mark = b""
        pieces.append(data[cut:])
    rest = b"".join(pieces).removeprefix(mark)
    if rest:
        yield Block(rest, is_torn=True)


class DocumentReader:
    """Converts lines to texts.

    ``tally`` counts the skipped lines, and ``line`` is the number of the next line. ``text_field``: the field
    of an object that contains its text; None if each line is plain text. ``render``: converts an object that
    is a row to its text.
    """

    def __init__(
        self,
        *,
        text_field: str | None,
        first_line: int,
        tally: LineCounts | None = None,
        render: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self.tally = LineCounts() if tally is None else tally
        self.line = first_line
        self._text_field = text_field
        self._render = render

    def read(self, block: Block) -> tuple[list[str], list[int]]:
        """Return the texts of a block and their line numbers. Malformed lines are only counted."""
        # Only such an escape can give a lone surrogate, because valid UTF-8 contains none.
        has_surrogates = b"\\ud" in block.data or b"\\uD" in block.data
        texts, numbers = [], []

        # Split only at newlines, as in JSON Lines: splitlines would also split at characters inside a text.
        data = block.data
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        data = data.removesuffix(b"\n")
        lines: list[str | None]
        try:
            lines = [*data.decode().split("\n")]
        except UnicodeDecodeError:
            # If a byte is invalid, decode line by line, so that only its line is skipped.
            lines = []
            for one in data.split(b"\n"):
                try:
                    lines.append(one.decode())
                except UnicodeDecodeError:
                    lines.append(None)

        last = self.line + len(lines) - 1
        for number, line in enumerate(lines, self.line):
            is_torn = block.is_torn and number == last
            text = self._read_line(number, line, is_torn=is_torn)
            if not text:
                continue
            if has_surrogates and self._render is not None:
                # render has already replaced lone surrogates, so search the original line to count it.
                self.tally.repaired += _has_lone_surrogate(parse_json(line or "null"))
            elif has_surrogates:
                repaired = replace_lone_surrogates(text)
                self.tally.repaired += repaired != text
                text = repaired
            texts.append(text)
            numbers.append(number)
        self.line += len(lines)
        return texts, numbers

    def _read_line(self, number: int, line: str | None, *, is_torn: bool) -> str:
        """Return the text of one line, or ""."""
        value: Any = None
        if line is None:
            why = "a byte in it starts no character"
            problem = LineProblem(number, "the line is not UTF-8", why, is_torn)
            return self._pass_over(problem, SkipReason.NOT_UTF8)
        if self._text_field is None:
            return line if line.strip(_WHITE) else self._count(SkipReason.BLANK_LINE)
        # Call the scanner directly, which is faster than json.loads: most lines are one value without white
        # space around it.
        try:
            value, end = _scan(line, 0)
        except (StopIteration, ValueError, RecursionError):
            end = -1
        if end != len(line):
            # The value has white space around it, or the line is not valid JSON.
            line = line.strip(_WHITE)
            if not line:
                return self._count(SkipReason.BLANK_LINE)
            try:
                value = parse_json(line)
            except json.JSONDecodeError as error:
                why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                problem = LineProblem(number, "the line is not JSON", why, is_torn)
                return self._pass_over(problem, SkipReason.NOT_JSON)
        return self._text_of(number, value)

    def _text_of(self, number: int, value: Any) -> str:
        if type(value) is not dict:
            what = f"the line contains {_json_type(value)}"
            problem = LineProblem(number, what, "each line is one JSON object")
            return self._pass_over(problem, SkipReason.NOT_AN_OBJECT)
        if self._render is not None:
            try:
                return self._render(value)
            except RowError as error:
                problem = LineProblem(number, error.what, error.why)
                return self._pass_over(problem, SkipReason.NO_ROW)
        is_there, text = find_nested(value, str(self._text_field))
        if type(text) is str:
            return text or self._count(SkipReason.EMPTY_TEXT)
        if not is_there:
            # Shorten the list of names, because an object may have thousands of fields.
            names = [
                name if len(name) <= 40 else name[:39] + "…" for name in list(value)[:5]
            ]
            shown = ", ".join(map(repr, names)) or "none"
            if len(value) > 5:
                shown += ", …"
            what = f"the object has no field {self._text_field!r}"
            problem = LineProblem(number, what, f"it has {shown}")
        else:
            what = f"the field {self._text_field!r} contains {_json_type(text)}"
            problem = LineProblem(number, what, "a text is a JSON string")
        return self._pass_over(problem, SkipReason.NO_TEXT)

    def _pass_over(self, problem: LineProblem, reason: SkipReason) -> str:
        self.tally.pass_over(problem, reason)
        return ""

    def _count(self, reason: SkipReason) -> str:
        self.tally.skipped[reason] += 1
        return ""


def _has_lone_surrogate(value: Any) -> bool:
    """Whether any text or key in a JSON value, at any depth, contains a lone surrogate."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and replace_lone_surrogates(one) != one:
            return True
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return False


def _json_type(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        LongNumber: "a number",
    }
    return names.get(type(value), "null")
