"""Finds the assistant's turns in the text of a conversation whose template marks none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from evergrad_trainer.data.marked_text import MarkedSpan

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""The text of some messages; with True, and of the prompt for the answer that follows them."""
_SENTINEL: Final = "\ue0a7\uf8ff\ue0a7"
"""A content of private characters, which no template looks for; where it comes out, the content does."""


class TurnNotFoundError(Exception):
    """The text of a turn cannot be told from what is around it. ``at``: the index of its message."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def find_plain_turn(
    render: Render, messages: Sequence[Message], at: int, whole: str, *, end_token: str = ""
) -> MarkedSpan:
    """As :func:`find_turn`, where a shorter conversation is the beginning of a longer one."""
    del end_token
    prompt = render(messages[:at], True)
    until = render(messages[: at + 1], False)
    if until.startswith(prompt) and whole.startswith(until):
        return MarkedSpan(len(prompt), len(until))
    raise TurnNotFoundError(at)


def find_turn(
    render: Render, messages: Sequence[Message], at: int, whole: str, *, end_token: str
) -> MarkedSpan:
    """The characters of ``whole``, the text of all messages, that are the turn ``messages[at]``.

    They begin behind the prompt for the turn, and end where the text ends that a following message does not
    change. Raises TurnNotFoundError where that is not certain.
    """
    try:
        return find_plain_turn(render, messages, at, whole)
    except TurnNotFoundError:
        prompt = render(messages[:at], True)

    # Some templates write the last turn in another way than those before it, or end each text with a token:
    # then a shorter conversation is not the beginning of a longer one. The turn is found around a content
    # that stands out.
    marked = {**messages[at], "content": _SENTINEL}
    variant = render([*messages[:at], marked, *messages[at + 1 :]], False)
    if _SENTINEL in whole or variant.count(_SENTINEL) != 1:
        raise TurnNotFoundError(at)
    header = _find_header(render, messages[:at], prompt, end_token)
    start = _find_start(whole, variant, prompt, header)
    end: int | None = len(whole)
    if at + 1 < len(messages):
        end = _find_end(render, [*messages[:at], marked], header, variant, whole)
    if start is None or end is None or not start <= end:
        raise TurnNotFoundError(at)
    return MarkedSpan(start, end)


def _find_header(
    render: Render, before: Sequence[Message], prompt: str, end_token: str
) -> str:
    """The text that a prompt has behind the messages before it, or "" where there is none."""
    without = render(before, False)
    if not prompt.startswith(without) and end_token:
        # A token at the end of each text that is no prompt.
        without = without.removesuffix(end_token)
    return prompt[len(without) :] if prompt.startswith(without) else ""


def _find_start(whole: str, variant: str, prompt: str, header: str) -> int | None:
    """Where the turn begins in ``whole``: behind its header."""
    if whole.startswith(prompt):
        return len(prompt)
    # The messages before the turn are written in another way in its prompt, or the prompt begins the answer,
    # as with <think>, where the turn has nothing of that or something else.
    before = variant[: variant.index(_SENTINEL)]
    for length in range(len(header), len(header) // 2, -1):
        place = before.rfind(header[:length])
        if place < 0:
            continue
        start = place + length
        # Within the header only behind a tag or a line: half a token belongs to neither side.
        is_boundary = (
            length == len(header) or start == len(before) or header[length - 1] in ">\n"
        )
        return start if is_boundary and whole[:start] == variant[:start] else None
    return None


def _find_end(
    render: Render, until: Sequence[Message], header: str, variant: str, whole: str
) -> int | None:
    """Where the turn ends in ``whole``, which has further messages: ``until`` are those up to the turn."""
    following = render(until, True)
    if not header or not following.endswith(header) or following.count(_SENTINEL) != 1:
        return None
    # What comes behind the content in a text of this turn and the prompt for another one.
    tail = following[: -len(header)].partition(_SENTINEL)[2]
    rest = variant.partition(_SENTINEL)[2]
    if not rest.startswith(tail):
        return None
    behind = rest[len(tail) :]
    return len(whole) - len(behind) if whole.endswith(behind) else None
