"""Pairs of completions of one prompt: JSON object → two marked texts → marked tokens of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evergrad_trainer.data.marked_text import MarkedText, join_marks
from evergrad_trainer.data.preparation.documents import (
    LineCounts,
    LineProblem,
    RowError,
    SkipReason,
)
from evergrad_trainer.data.preparation.rows import (
    Encoded,
    RowFormat,
    count_dropped,
    encode_text,
    join_rows,
    keep_too_long,
)
from evergrad_trainer.data.tokenizers import TextTokenizer, smallest_dtype

_CHOSEN: Final = "chosen_field"
"""Key of a format's JSON that only that of pairs has."""
_SAID: Final = {"role", "content"}
"""Keys that each message has."""


class PairText(str):
    """The text of the chosen row, with both as they are learned."""

    __slots__ = ("rows",)
    rows: tuple[MarkedText, MarkedText]

    def __new__(cls, chosen: MarkedText, rejected: MarkedText) -> "PairText":
        """The pair of two rows."""
        made = super().__new__(cls, chosen)
        made.rows = (chosen, rejected)
        return made


@dataclass(frozen=True)
class PairFormat:
    """How pairs are read: each as two rows of one prompt. ``rows``: how those are read."""

    rows: RowFormat
    chosen_field: str
    rejected_field: str

    def of_rendering(self, rendering: int) -> "PairFormat":
        """How an earlier version read these pairs."""
        return replace(self, rows=self.rows.of_rendering(rendering))

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        fields = {_CHOSEN: self.chosen_field, "rejected_field": self.rejected_field}
        return {**self.rows.to_json(), **fields}

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of a row that mean something."""
        own = (self.rows.prompt_field, self.chosen_field, self.rejected_field)
        unused = (self.rows.messages_field, self.rows.completion_field)
        further = (key for key in self.rows.keys if key not in (*own, *unused))
        return (*own, *further)

    @property
    def has_template(self) -> bool:
        """Whether a conversation can become a text."""
        return self.rows.has_template

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """Whether the completions of a pair are messages, of which only a chat template makes a text."""
        fields = (self.chosen_field, self.rejected_field)
        return all(isinstance(row.get(field), list) for field in fields)

    def render(self, row: Mapping[str, Any]) -> PairText:
        """Both texts of a row, with what is learned of them. Raises RowError."""
        fields = (self.chosen_field, self.rejected_field)
        for field in fields:
            if field not in row:
                # A few names, cut short: the message is for a person.
                names = ", ".join(repr(name[:40]) for name in list(row)[:5]) or "none"
                raise RowError(f"the row has no field {field!r}", f"its fields are {names}")
        chosen, rejected = (row[field] for field in fields)
        if chosen == rejected:
            what = f"the fields {fields[0]!r} and {fields[1]!r} are the same"
            raise RowError(what, "neither of them can be preferred")
        if isinstance(chosen, list) or isinstance(rejected, list):
            return self._render_messages(row)
        prompt = self.rows.prompt_field
        texts = [
            form.render(
                {key: row[key] for key in (prompt, form.completion_field) if key in row}
            )
            for form in self._forms
        ]
        return PairText(*texts)

    @cached_property
    def _forms(self) -> tuple[RowFormat, RowFormat]:
        """How the two rows are read where prompt and completions are texts."""
        chosen, rejected = (
            replace(self.rows, completion_field=field)
            for field in (self.chosen_field, self.rejected_field)
        )
        return chosen, rejected

    def _render_messages(self, row: Mapping[str, Any]) -> PairText:
        fields, prompt = (self.chosen_field, self.rejected_field), self.rows.prompt_field
        completions = [self.rows.read_messages(field, row[field]) for field in fields]
        if isinstance(row.get(prompt), str):
            # Many public pairs have the text of the first message beside two whole conversations.
            what = f"the field {prompt!r} is a text, and {fields[0]!r} a list of messages"
            raise RowError(
                what,
                "a prompt is messages, too; if the lists begin with it, let rows.promptField "
                "name a key that no row has",
            )
        before = self.rows.read_messages(prompt, row[prompt]) if prompt in row else []
        # Without a prompt of its own it is what both conversations begin with.
        shared = 0
        for chosen, rejected in zip(*completions, strict=False):
            if before or chosen != rejected:
                break
            shared += 1
        texts = []
        for field, messages in zip(fields, completions, strict=True):
            if shared == len(messages):
                what = f"the field {field!r} is the beginning of the other one"
                raise RowError(what, "nothing in it can be compared")
            # An answer may be a call of a tool, or whatever else its template writes out.
            if not any(
                one.get("content") or one.keys() - _SAID for one in messages[shared:]
            ):
                raise RowError(f"the field {field!r} is empty", "there is nothing to learn")
            num_before = len(before) + shared
            texts.append(
                self.rows.render_conversation(
                    [*before, *messages], row, num_before=num_before
                )
            )
        return PairText(*texts)

    def dtype(self, tokenizer: TextTokenizer) -> np.dtype[Any]:
        """The type of ids with their marks, and of what stands between two rows."""
        return smallest_dtype(2 * tokenizer.vocab_size + 1)

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        lines: Sequence[int],
        tally: LineCounts,
    ) -> Encoded:
        """Marked tokens of all pairs: of the chosen row, an id that no text has, and of the rejected row.

        Pairs in which nothing is learned, and those of which a row is too long, are counted in ``tally``.
        """
        dtype, longest = self.dtype(tokenizer), self.rows.longest
        found: list[npt.NDArray[Any]] = []
        kept: list[int] = []
        for text, line in zip(texts, lines, strict=True):
            # Rendered in this process, by the reader of the same job.
            assert isinstance(text, PairText)  # noqa: S101
            rows = [encode_text(tokenizer, one) for one in text.rows]
            count_dropped(tally, *text.rows)
            # The first token is never a label.
            if not all(marks[1:].any() for _, marks in rows):
                why = "one of its completions is empty"
                problem = LineProblem(line, "the pair has no token to compare", why)
                tally.pass_over(problem, SkipReason.NO_COMPLETION)
                continue
            # Texts may differ in what the tokenizer drops, and messages in what their template leaves out.
            if np.array_equal(rows[0][0], rows[1][0]):
                what = "both completions become the same tokens"
                problem = LineProblem(line, what, "neither of them can be preferred")
                tally.pass_over(problem, SkipReason.NO_COMPLETION)
                continue
            length = max(len(ids) for ids, _ in rows)
            rows = [(ids[:longest], marks[:longest]) for ids, marks in rows]
            if length > longest:
                # The rest of two prompts, or of completions that differ behind the cut, compares nothing.
                differ = not np.array_equal(rows[0][0], rows[1][0])
                can_be_cut = differ and all(marks[1:].any() for _, marks in rows)
                if not keep_too_long(self.rows, line, length, tally, can_be_cut=can_be_cut):
                    continue
            chosen, rejected = (join_marks(ids.astype(dtype), marks) for ids, marks in rows)
            between = np.array([2 * tokenizer.vocab_size], dtype=dtype)
            found.append(np.concatenate([chosen, between, rejected]))
            kept.append(line)
        return join_rows(found, kept, dtype)


def read_format(value: Mapping[str, Any]) -> RowFormat | PairFormat:
    """The inverse of both ``to_json``."""
    if _CHOSEN not in value:
        return RowFormat.from_json(value)
    names = (_CHOSEN, "rejected_field")
    rows = {key: one for key, one in value.items() if key not in names}
    return PairFormat(RowFormat.from_json(rows), *(value[name] for name in names))
