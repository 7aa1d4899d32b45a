"""Finds the assistant's turns in the text of a conversation if its template does not mark them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from evergrad_trainer.data.marked_text import MarkedSpan

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders some messages as text. With True, the text also contains the prompt for the answer."""
_SENTINEL: Final = "\ue0a7\uf8ff\ue0a7"
"""A unique content of private-use characters. Its position in a text is the position of the content."""


class TurnNotFoundError(Exception):
    """The text of a turn cannot be separated from the text around it. ``at``: the index of its message."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def find_plain_turn(
    render: Render, messages: Sequence[Message], at: int, whole: str, *, end_token: str = ""
) -> MarkedSpan:
    """Find a turn if the text of a shorter conversation is the beginning of the text of a longer one.

    Raises TurnNotFoundError otherwise. See :func:`find_turn`.
    """
    del end_token
    prompt = render(messages[:at], True)
    until = render(messages[: at + 1], False)
    if until.startswith(prompt) and whole.startswith(until):
        return MarkedSpan(len(prompt), len(until))
    raise TurnNotFoundError(at)


def find_turn(
    render: Render, messages: Sequence[Message], at: int, whole: str, *, end_token: str
) -> MarkedSpan:
    """Find the characters of the turn ``messages[at]`` in ``whole``, the text of all messages.

    They start after the prompt for the turn, and end before the text that depends on following messages.
    Raises TurnNotFoundError if the span is not certain.
    """
    try:
        return find_plain_turn(render, messages, at, whole)
    except TurnNotFoundError:
        prompt = render(messages[:at], True)

    # Some templates render the last turn differently from earlier turns, or end each text with a token. Then
    # a shorter conversation is not the beginning of a longer one. Replace the content of the turn with a
    # unique text, and find the turn around this text.
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
    """Return the text that a prompt adds after the messages before it, or "" if it adds none."""
    without = render(before, False)
    if not prompt.startswith(without) and end_token:
        # Remove the token at the end of each text that is not a prompt.
        without = without.removesuffix(end_token)
    return prompt[len(without) :] if prompt.startswith(without) else ""


def _find_start(whole: str, variant: str, prompt: str, header: str) -> int | None:
    """Return the position in ``whole`` at which the turn starts, after its header; None if it is unclear."""
    if whole.startswith(prompt):
        return len(prompt)
    # Either the prompt renders the earlier messages differently, or the prompt contains the beginning of the
    # answer, for example <think>, and the turn does not begin with it.
    before = variant[: variant.index(_SENTINEL)]
    for length in range(len(header), len(header) // 2, -1):
        place = before.rfind(header[:length])
        if place < 0:
            continue
        start = place + length
        # Start within the header only after a tag or a line break, so that no token is split.
        is_boundary = (
            length == len(header) or start == len(before) or header[length - 1] in ">\n"
        )
        return start if is_boundary and whole[:start] == variant[:start] else None
    return None


def _find_end(
    render: Render, until: Sequence[Message], header: str, variant: str, whole: str
) -> int | None:
    """Return the end of the turn in ``whole``, if messages follow it; None if the end is unclear.

    ``until``: the messages up to and including the turn.
    """
    following = render(until, True)
    if not header or not following.endswith(header) or following.count(_SENTINEL) != 1:
        return None
    # The text between the content of this turn and the prompt for the next turn.
    tail = following[: -len(header)].partition(_SENTINEL)[2]
    rest = variant.partition(_SENTINEL)[2]
    if not rest.startswith(tail):
        return None
    behind = rest[len(tail) :]
    return len(whole) - len(behind) if whole.endswith(behind) else None
