"""Finds the tokens with which a run has learned to end a text, at which a server must stop."""

from typing import Any, Final

from evergrad_trainer.data.chat_template import ASSISTANT
from evergrad_trainer.data.marked_text import MarkedText, marks_of
from evergrad_trainer.data.preparation.documents import RowError
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.tokenizers import TextTokenizer

_ANSWER: Final = "evergrad"
"""Content of an answer, which is searched in the rendered text of a conversation."""


def find_ends(
    tokenizer: TextTokenizer, form: RowFormat | PairFormat | None
) -> tuple[int, ...]:
    """Return the ids that end a learned text: the end of a document, and the end of an assistant's turn.

    ``form``: how rows are read; None if the run reads documents, which have no turns. No id for the end of a
    turn is added if the template cannot render a simple conversation, or ends a turn without an added token.
    """
    ends = [tokenizer.end_of_document]
    rows = form.rows if isinstance(form, PairFormat) else form
    if rows is None or rows.template is None:
        return tuple(ends)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": ASSISTANT, "content": _ANSWER},
    ]
    # The template for conversations with tools may end its turns with another token.
    rows_of_two_kinds: tuple[dict[str, Any], ...] = ({}, {"tools": []})
    for row in rows_of_two_kinds:
        try:
            text = rows.render_conversation(messages, row)
        except RowError:
            continue
        end = _end_of_turn(tokenizer, text)
        if end is not None and end not in ends:
            ends.append(end)
    return tuple(ends)


def _end_of_turn(tokenizer: TextTokenizer, text: MarkedText) -> int | None:
    """Return the first added token after the answer that is learned, or None."""
    begin = text.rfind(_ANSWER)
    if begin < 0:
        return None
    ids, offsets = tokenizer.encode_with_offsets(text)
    marks = marks_of(text, offsets)
    for one, (start, _), is_learned in zip(ids, offsets, marks, strict=True):
        if start >= begin + len(_ANSWER) and is_learned and one in tokenizer.added_ids:
            return one
    return None
