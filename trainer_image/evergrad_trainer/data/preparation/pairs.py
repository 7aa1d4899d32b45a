"""Reads pairs of completions of one prompt: JSON object → two marked texts → marked tokens of both."""

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
"""A key that only the JSON of a PairFormat has."""
_SAID: Final = {"role", "content"}
"""The keys that every message has."""


class PairText(str):
    """The text of the chosen row. ``rows``: the marked texts of the chosen row and of the rejected row."""

    __slots__ = ("rows",)
    rows: tuple[MarkedText, MarkedText]

    def __new__(cls, chosen: MarkedText, rejected: MarkedText) -> "PairText":
        """Create a pair from two rows."""
        made = super().__new__(cls, chosen)
        made.rows = (chosen, rejected)
        return made


@dataclass(frozen=True)
class PairFormat:
    """Describes how pairs are read. ``rows``: the format of the two rows, which share a prompt."""

    rows: RowFormat
    chosen_field: str
    rejected_field: str

    def of_rendering(self, rendering: int) -> "PairFormat":
        """Return the format with which an earlier version read these pairs."""
        return replace(self, rows=self.rows.of_rendering(rendering))

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        fields = {_CHOSEN: self.chosen_field, "rejected_field": self.rejected_field}
        return {**self.rows.to_json(), **fields}

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of a row that are used."""
        own = (self.rows.prompt_field, self.chosen_field, self.rejected_field)
        unused = (self.rows.messages_field, self.rows.completion_field)
        further = (key for key in self.rows.keys if key not in (*own, *unused))
        return (*own, *further)

    @property
    def has_template(self) -> bool:
        """Whether a conversation can be rendered."""
        return self.rows.has_template

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """Whether the completions of a pair are messages, which can only be rendered with a chat template."""
        fields = (self.chosen_field, self.rejected_field)
        return all(isinstance(row.get(field), list) for field in fields)

    def render(self, row: Mapping[str, Any]) -> PairText:
        """Render both texts of a row, with the parts to learn marked. Raises RowError if it is malformed."""
        fields = (self.chosen_field, self.rejected_field)
        for field in fields:
            if field not in row:
                # Shorten the list of names, because a row may have many long ones.
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
        """The formats of the two rows, if prompt and completions are texts."""
        chosen, rejected = (
            replace(self.rows, completion_field=field)
            for field in (self.chosen_field, self.rejected_field)
        )
        return chosen, rejected

    def _render_messages(self, row: Mapping[str, Any]) -> PairText:
        fields, prompt = (self.chosen_field, self.rejected_field), self.rows.prompt_field
        completions = [self.rows.read_messages(field, row[field]) for field in fields]
        if isinstance(row.get(prompt), str):
            # Many public data sets have the text of the first message next to two whole conversations.
            what = f"the field {prompt!r} is a text, and {fields[0]!r} a list of messages"
            raise RowError(
                what,
                "a prompt is messages, too; if the lists begin with it, let rows.promptField "
                "name a key that no row has",
            )
        before = self.rows.read_messages(prompt, row[prompt]) if prompt in row else []
        # If there is no prompt field, the prompt is the common beginning of both conversations.
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
            # An answer without content may be a tool call, or another key that its template writes.
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
        """Return the type of ids with their marks, which also holds the separator between two rows."""
        return smallest_dtype(2 * tokenizer.vocab_size + 1)

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        lines: Sequence[int],
        tally: LineCounts,
    ) -> Encoded:
        """Encode all pairs: tokens of the chosen row, a separator, and tokens of the rejected row.

        The separator is a value that no marked token has. Pairs without tokens to compare, and pairs with a
        row that is too long, are counted in ``tally``.
        """
        dtype, longest = self.dtype(tokenizer), self.rows.longest
        found: list[npt.NDArray[Any]] = []
        kept: list[int] = []
        for text, line in zip(texts, lines, strict=True):
            # The reader of the same job rendered the text in this process.
            assert isinstance(text, PairText)  # noqa: S101
            rows = [encode_text(tokenizer, one) for one in text.rows]
            count_dropped(tally, *text.rows)
            # The first token is never a label.
            if not all(marks[1:].any() for _, marks in rows):
                why = "one of its completions is empty"
                problem = LineProblem(line, "the pair has no token to compare", why)
                tally.pass_over(problem, SkipReason.NO_COMPLETION)
                continue
            # Different texts may give the same tokens, because the tokenizer drops characters or the template
            # omits parts.
            if np.array_equal(rows[0][0], rows[1][0]):
                what = "both completions become the same tokens"
                problem = LineProblem(line, what, "neither of them can be preferred")
                tally.pass_over(problem, SkipReason.NO_COMPLETION)
                continue
            length = max(len(ids) for ids, _ in rows)
            rows = [(ids[:longest], marks[:longest]) for ids, marks in rows]
            if length > longest:
                # Do not truncate if only prompts would remain, or completions without a difference.
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
    """Build a format from its JSON values. The inverse of both ``to_json`` methods."""
    if _CHOSEN not in value:
        return RowFormat.from_json(value)
    names = (_CHOSEN, "rejected_field")
    rows = {key: one for key, one in value.items() if key not in names}
    return PairFormat(RowFormat.from_json(rows), *(value[name] for name in names))
