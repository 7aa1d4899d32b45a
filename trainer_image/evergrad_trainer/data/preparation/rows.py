"""Rows of chat messages, or of a prompt and its completion: JSON object → marked text → marked tokens."""

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
"""Why a conversation cannot be read: of the manifest and not of the row."""
Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Values of all rows in one array, the number of each row's, and its line."""


@dataclass(frozen=True)
class RowFormat:
    """How rows are read.

    ``longest``: tokens of a row that fit into a sample. ``template``: of conversations; ``tool_template``: of
    those with tools, where these have one of their own. ``rendering``: number of the rule by which templates
    make texts. ``date``: the one that templates are given.
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
        """How an earlier version read these rows, by the number of its rule. The first versions had one
        template for all conversations, and a date came with the third rule."""
        tool_template = self.tool_template if rendering > FIRST_RENDERING else None
        date = self.date if rendering >= FORMS_OF_CONTENT else None
        return replace(self, rendering=rendering, tool_template=tool_template, date=date)

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        value = {**asdict(self), "variables": [list(pair) for pair in self.variables]}
        if self.tool_template is None:
            # Rows keep the fingerprint that they had before there was one.
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
        """All keys of a row that mean something."""
        named = (self.messages_field, self.prompt_field, self.completion_field)
        further = (CONVERSATIONS, *FOR_TEMPLATES)
        return (*named, *(key for key in further if key not in named))

    @property
    def has_template(self) -> bool:
        """Whether a conversation can become a text, if only one with tools."""
        return self.template is not None or self.tool_template is not None

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has messages, of which only a chat template makes a text."""
        if self.prompt_field in row or self.completion_field in row:
            return False
        has_messages = isinstance(row.get(self.messages_field), list)
        return has_messages or self._has_conversations(row)

    def render(self, row: Mapping[str, Any]) -> MarkedText:
        """The text of a row, with what is learned of it. Raises RowError."""
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
        # A few names, cut short: the message is for a person.
        names = ", ".join(repr(name[:40]) for name in list(row)[:5]) or "none"
        what = (
            f"the row has neither {self.messages_field!r} nor {keys[0]!r} and {keys[1]!r}"
        )
        raise RowError(what, f"its fields are {names}")

    def _has_conversations(self, row: Mapping[str, Any]) -> bool:
        """Whether a row names its messages as ShareGPT does, where the manifest does not name them."""
        is_default = self.messages_field == MESSAGES and self.rendering >= FORMS_OF_CONTENT
        return is_default and isinstance(row.get(CONVERSATIONS), list)

    def read_messages(self, field: str, value: Any) -> list[Message]:
        """The messages of a conversation, or of a part of one. Raises RowError."""
        value = _without_lone_surrogates(value)
        if not isinstance(value, list) or not value:
            raise RowError(
                f"the field {field!r} is no list of messages", "a conversation has some"
            )
        messages: list[Message] = []
        for at, message in enumerate(value):
            place = f"{field}[{at}]"
            if not isinstance(message, dict):
                raise RowError(f"{place} is no object", "a message has a role and content")
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
        """The text of a conversation, in which the assistant's turns behind ``num_before`` messages are
        marked.

        ``row``: has what the template is given besides. Raises RowError.
        """
        # The whole of what a template is given: it may write out any key of it.
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
            # Of the manifest and not of the row: to pass over the row would pass over all of them.
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
        """The type of ids with their marks."""
        return smallest_dtype(2 * tokenizer.vocab_size)

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        lines: Sequence[int],
        tally: LineCounts,
    ) -> Encoded:
        """Marked tokens of all rows.

        Rows in which nothing is learned, and those that are too long, are counted in ``tally``.
        """
        dtype = self.dtype(tokenizer)
        found: list[npt.NDArray[Any]] = []
        kept: list[int] = []
        for text, line in zip(texts, lines, strict=True):
            # Rendered in this process, by the reader of the same job.
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
                # The rest of a row whose prompt alone is too long would teach nothing.
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
        what = f"{place} is missing" if key not in owner else f"{place} is no text"
        raise RowError(what, "it is a JSON string")
    return replace_lone_surrogates(value)


def _without_lone_surrogates(value: Any) -> Any:
    """``value`` as :func:`_replace_lone_surrogates` gives it. Raises RowError."""
    try:
        return _replace_lone_surrogates(value)
    except RecursionError:
        raise RowError("the row cannot be read", "it is nested too deeply") from None


def _replace_lone_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for each half of a surrogate pair, in texts and in names of keys. Raises
    RowError for a number that has no exact text."""
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
    """The values of all rows in one array, with their lengths and lines."""
    values = np.concatenate(rows) if rows else np.empty(0, dtype=dtype)
    lengths = np.array([len(one) for one in rows], dtype=np.int64)
    return values, lengths, np.array(lines, dtype=np.int64)


def encode_text(
    tokenizer: TextTokenizer, text: MarkedText
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Ids of a text, and which of them are learned."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    marks = marks_of(text, offsets)
    if text.is_open:
        ids, marks = [*ids, tokenizer.end_of_document], np.append(marks, True)
    return np.array(ids, dtype=np.int64), marks


def count_dropped(tally: LineCounts, *texts: MarkedText) -> None:
    """Count a row whose template left parts of its messages out."""
    for kind in frozenset[str]().union(*(text.dropped for text in texts)):
        tally.skipped[OF_DROPPED[kind]] += 1


def keep_too_long(
    form: RowFormat, line: int, length: int, tally: LineCounts, *, can_be_cut: bool
) -> bool:
    """Whether a row that is too long is cut; otherwise it is passed over. Counts it in any case."""
    if form.too_long == "refuse":
        what = f"the row has {length} tokens, and a sample holds {form.longest}"
        why = "spec.training.data.sequenceLength and one more, which is predicted only"
        tally.pass_over(LineProblem(line, what, why, is_too_long=True), SkipReason.TOO_LONG)
        return False
    is_cut = form.too_long == "truncate" and can_be_cut
    tally.skipped[SkipReason.TRUNCATED if is_cut else SkipReason.LEFT_OUT] += 1
    return is_cut
