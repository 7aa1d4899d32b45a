"""Reads rows of chat messages, or of a prompt and a completion: JSON object → marked text → marked tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import CONVERSATIONS, MESSAGES
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.chat_template import (
    ASSISTANT,
    FIRST_RENDERING,
    FOR_TEMPLATES,
    FORMS_OF_CONTENT,
    RENDERING,
    ChatTemplate,
    ChatTemplateError,
    DateNeededError,
)
from evergrad_trainer.data.marked_text import MarkedSpan, MarkedText, join_marks, marks_of
from evergrad_trainer.data.preparation.documents import (
    OF_DROPPED,
    LineCounts,
    LineProblem,
    RowError,
    SkipReason,
)
from evergrad_trainer.data.preparation.json_values import LongNumber
from evergrad_trainer.data.preparation.messages import Message, read_message
from evergrad_trainer.data.tokenizers import (
    TextTokenizer,
    replace_lone_surrogates,
    smallest_dtype,
)

DATE_FIELD: Final = "spec.training.rows.date"
NO_TEMPLATE: Final = "the tokenizer has no chat template, and the manifest gives none"
"""The reason why a conversation cannot be read if the problem is in the manifest and not in the row."""
Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""The values of all rows in one array, the number of values of each row, and the line of each row."""


@dataclass(frozen=True)
class RowFormat:
    """Describes how rows are read.

    ``longest``: maximum number of tokens of a row in a sample. ``template``: the chat template of
    conversations. ``tool_template``: the chat template of conversations with tools, if it differs.
    ``rendering``: number of the rule that renders texts. ``date``: the date that templates can write.
    """

    messages_field: str
    prompt_field: str
    completion_field: str
    longest: int
    too_long: Literal["refuse", "skip", "truncate"]
    template: str | None
    variables: tuple[tuple[str, str], ...]
    tool_template: str | None = None
    rendering: int = RENDERING
    date: str | None = None

    def of_rendering(self, rendering: int) -> "RowFormat":
        """Return the format with which an earlier version read these rows, by the number of its rule.

        The first versions used one template for all conversations. The date was added with the third rule.
        """
        tool_template = self.tool_template if rendering > FIRST_RENDERING else None
        date = self.date if rendering >= FORMS_OF_CONTENT else None
        return replace(self, rendering=rendering, tool_template=tool_template, date=date)

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        value = {**asdict(self), "variables": [list(pair) for pair in self.variables]}
        if self.tool_template is None:
            # Omit keys with default values, so that fingerprints from earlier versions stay the same.
            del value["tool_template"]
        if self.date is None:
            del value["date"]
        if self.rendering == RENDERING:
            del value["rendering"]
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "RowFormat":
        """The inverse of ``to_json``."""
        variables = tuple((name, text) for name, text in value["variables"])
        return RowFormat(**{**value, "variables": variables})

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of a row that are used."""
        named = (self.messages_field, self.prompt_field, self.completion_field)
        further = (CONVERSATIONS, *FOR_TEMPLATES)
        return (*named, *(key for key in further if key not in named))

    @property
    def has_template(self) -> bool:
        """Whether any conversation can be rendered, possibly only conversations with tools."""
        return self.template is not None or self.tool_template is not None

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has messages, which can only be rendered with a chat template."""
        if self.prompt_field in row or self.completion_field in row:
            return False
        has_messages = isinstance(row.get(self.messages_field), list)
        return has_messages or self._has_conversations(row)

    def render(self, row: Mapping[str, Any]) -> MarkedText:
        """Render a row as text, with the parts to learn marked. Raises RowError if the row is malformed."""
        keys = (self.prompt_field, self.completion_field)
        has_messages = self.messages_field in row
        given = [key for key in keys if key in row]
        if has_messages and given:
            what = f"the row has {self.messages_field!r} and {given[0]!r}"
            raise RowError(what, "it is a conversation, or a prompt with a completion")
        if has_messages:
            messages = self.read_messages(self.messages_field, row[self.messages_field])
            return self.render_conversation(messages, row)
        if not given and self._has_conversations(row):
            messages = self.read_messages(CONVERSATIONS, row[CONVERSATIONS])
            return self.render_conversation(messages, row)
        if len(given) == 2:
            prompt, completion = (_text_in(row, key, f"the field {key!r}") for key in keys)
            if not completion:
                what = f"the field {self.completion_field!r} is empty"
                raise RowError(what, "there is nothing to learn")
            span = MarkedSpan(len(prompt), len(prompt) + len(completion))
            return MarkedText(prompt + completion, (span,), is_open=True)
        if given:
            (missing,) = set(keys) - set(given)
            raise RowError(f"the row has no field {missing!r}", f"it has {given[0]!r}")
        # Shorten the list of names, because a row may have many long ones.
        names = ", ".join(repr(name[:40]) for name in list(row)[:5]) or "none"
        what = (
            f"the row has neither {self.messages_field!r} nor {keys[0]!r} and {keys[1]!r}"
        )
        raise RowError(what, f"its fields are {names}")

    def _has_conversations(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has its messages under the key of ShareGPT, and the manifest sets no other key."""
        is_default = self.messages_field == MESSAGES and self.rendering >= FORMS_OF_CONTENT
        return is_default and isinstance(row.get(CONVERSATIONS), list)

    def read_messages(self, field: str, value: Any) -> list[Message]:
        """Read the messages of a conversation or of a part of one. Raises RowError if one is malformed."""
        value = _without_lone_surrogates(value)
        if not isinstance(value, list) or not value:
            raise RowError(
                f"the field {field!r} is not a list of messages",
                "a conversation contains messages",
            )
        messages: list[Message] = []
        for at, message in enumerate(value):
            place = f"{field}[{at}]"
            if not isinstance(message, dict):
                raise RowError(
                    f"{place} is not an object", "a message has a role and content"
                )
            if self.rendering >= FORMS_OF_CONTENT:
                messages.append(read_message(place, message))
                continue
            role = _text_in(message, "role", f"{place}.role")
            content = _text_in(message, "content", f"{place}.content")
            messages.append({**message, "role": role, "content": content})
        return messages

    def render_conversation(
        self, messages: Sequence[Message], row: Mapping[str, Any], *, num_before: int = 0
    ) -> MarkedText:
        """Render a conversation, and mark the assistant's turns after the first ``num_before`` messages.

        ``row``: contains the other values for the template, such as ``tools``. Raises RowError if the
        conversation cannot be rendered, and DataError if the template needs a date.
        """
        # Replace surrogates in the whole values, because a template may write any key of them.
        extra = {
            key: _without_lone_surrogates(row[key]) for key in FOR_TEMPLATES if key in row
        }
        if not any(message["role"] == ASSISTANT for message in messages[num_before:]):
            roles = ", ".join(sorted({one["role"][:20] for one in messages[num_before:]}))
            raise RowError(f"no message has the role {ASSISTANT!r}", f"there are {roles}")
        source = self.template
        if extra.get("tools") is not None and self.tool_template is not None:
            source = self.tool_template
        if source is None:
            raise RowError("a conversation cannot be made a text", NO_TEMPLATE)
        try:
            chat = ChatTemplate(source, self.variables, self.rendering, self.date)
            text = chat.render(messages, extra, num_before=num_before)
        except DateNeededError as error:
            # Raise DataError, not RowError: the problem is in the manifest, and would skip every row.
            why = (
                "the same rows always become the same text, so that templates have no clock"
            )
            remedy = "Set the date that the samples show, such as `date: 2025-06-01`"
            raise DataError(
                Problem(DATE_FIELD, f"missing; {error}", why, remedy)
            ) from error
        except ChatTemplateError as error:
            raise RowError("the conversation cannot be made a text", str(error)) from error
        if not text:
            raise RowError(
                "the conversation becomes an empty text", "the chat template says so"
            )
        return text

    def dtype(self, tokenizer: TextTokenizer) -> np.dtype[Any]:
        """Return the type of ids with their marks."""
        return smallest_dtype(2 * tokenizer.vocab_size)

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        lines: Sequence[int],
        tally: LineCounts,
    ) -> Encoded:
        """Encode all rows as marked tokens.

        Rows without tokens to learn, and rows that are too long, are counted in ``tally``.
        """
        dtype = self.dtype(tokenizer)
        found: list[npt.NDArray[Any]] = []
        kept: list[int] = []
        for text, line in zip(texts, lines, strict=True):
            # The reader of the same job rendered the text in this process.
            assert isinstance(text, MarkedText)  # noqa: S101
            ids, marks = encode_text(tokenizer, text)
            count_dropped(tally, text)
            # The first token is never a label.
            if not marks[1:].any():
                problem = LineProblem(
                    line, "the row has no token to learn", "its completions are empty"
                )
                tally.pass_over(problem, SkipReason.NO_COMPLETION)
                continue
            if len(ids) > self.longest:
                # Do not truncate a row if its prompt alone is too long: no token to learn would remain.
                can_be_cut = bool(marks[1 : self.longest].any())
                if not keep_too_long(self, line, len(ids), tally, can_be_cut=can_be_cut):
                    continue
                ids, marks = ids[: self.longest], marks[: self.longest]
            found.append(join_marks(ids.astype(dtype), marks))
            kept.append(line)
        return join_rows(found, kept, dtype)


def _text_in(owner: Mapping[str, Any], key: str, place: str) -> str:
    value = owner.get(key)
    if not isinstance(value, str):
        what = f"{place} is missing" if key not in owner else f"{place} is not a text"
        raise RowError(what, "it is a JSON string")
    return replace_lone_surrogates(value)


def _without_lone_surrogates(value: Any) -> Any:
    """Call :func:`_replace_lone_surrogates`. Raises RowError if ``value`` is nested too deeply."""
    try:
        return _replace_lone_surrogates(value)
    except RecursionError:
        raise RowError("the row cannot be read", "it is nested too deeply") from None


def _replace_lone_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD for each lone surrogate, in texts and keys.

    Raises RowError for a number with more digits than Python converts to text.
    """
    if isinstance(value, LongNumber):
        what = (
            f"the row has a number of {value.digits} digits in what its template is given"
        )
        raise RowError(what, "Python reads up to 4300; write it as a text")
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [_replace_lone_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {
            replace_lone_surrogates(key): _replace_lone_surrogates(one)
            for key, one in value.items()
        }
    return value


def join_rows(
    rows: Sequence[npt.NDArray[Any]], lines: Sequence[int], dtype: np.dtype[Any]
) -> Encoded:
    """Join the values of all rows in one array, and return it with the lengths and lines of the rows."""
    values = np.concatenate(rows) if rows else np.empty(0, dtype=dtype)
    lengths = np.array([len(one) for one in rows], dtype=np.int64)
    return values, lengths, np.array(lines, dtype=np.int64)


def encode_text(
    tokenizer: TextTokenizer, text: MarkedText
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the ids of a text, and a mark for each id that is learned. Both have shape (tokens,)."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    marks = marks_of(text, offsets)
    if text.is_open:
        ids, marks = [*ids, tokenizer.end_of_document], np.append(marks, True)
    return np.array(ids, dtype=np.int64), marks


def count_dropped(tally: LineCounts, *texts: MarkedText) -> None:
    """Count a row if its template omitted parts of its messages."""
    for kind in frozenset[str]().union(*(text.dropped for text in texts)):
        tally.skipped[OF_DROPPED[kind]] += 1


def keep_too_long(
    form: RowFormat, line: int, length: int, tally: LineCounts, *, can_be_cut: bool
) -> bool:
    """Count a row that is too long, and return whether it is truncated. Otherwise it is skipped."""
    if form.too_long == "refuse":
        what = f"the row has {length} tokens, and a sample holds {form.longest}"
        why = "spec.training.data.sequenceLength and one more, which is predicted only"
        tally.pass_over(LineProblem(line, what, why, is_too_long=True), SkipReason.TOO_LONG)
        return False
    is_cut = form.too_long == "truncate" and can_be_cut
    tally.skipped[SkipReason.TRUNCATED if is_cut else SkipReason.LEFT_OUT] += 1
    return is_cut
