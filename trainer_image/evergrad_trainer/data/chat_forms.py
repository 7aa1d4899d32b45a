"""Forms of message contents for chat templates, and checks that a rendered text contains the contents."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Message = Mapping[str, Any]
PROBE: Final = "\ue0a8\uf8ff\ue0a8"
"""A text of private-use characters, which no template handles specially."""
SHORT: Final = 8
"""Number of characters below which a text may occur in another text by chance."""
CONTENT: Final = "content"
REASONING: Final = "reasoning"
TOOL_CALLS: Final = "toolCalls"
PARTS: Final = {CONTENT: "content", REASONING: "reasoning", TOOL_CALLS: "tool calls"}
"""Kinds of parts of a message, with their names for messages to users."""


def forms_of_content(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages without changes, and then in other forms with the same meaning.

    The other forms are: lists of parts joined as one text, texts as a list of one part, and an empty text for
    each missing content.
    """
    yield list(messages)
    texts = [one for one in messages if isinstance(one.get("content"), str)]
    if any(isinstance(one.get("content"), list) for one in messages):
        yield [_as_text(one) for one in messages]
    if texts:
        yield [_as_parts(one) for one in messages]
    if any("content" not in one for one in messages):
        yield [{**_as_text(one), "content": content_of(one)} for one in messages]


def content_of(message: Message) -> str:
    """Return the whole content of a message as one text; "" if it has no content."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def _as_text(message: Message) -> Message:
    return {**message, "content": content_of(message)} if "content" in message else message


def _as_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def shows_contents(messages: Sequence[Message], text: str) -> bool:
    """Whether ``text`` contains the contents of all messages, as texts."""
    # Check each part separately, because a template may strip white space from each part.
    said = (
        part["text"] if isinstance(part, dict) else part
        for one in messages
        for part in _parts(one.get("content", ""))
    )
    return not writes_parts(messages, text) and all(is_shown(one, text) for one in said)


def _parts(content: str | list[dict[str, str]]) -> list[Any]:
    return content if isinstance(content, list) else [content]


def writes_parts(messages: Sequence[Message], text: str) -> bool:
    """Whether a list of parts was written as a Python or JSON list."""
    lists = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return any(
        str(parts) in text or json.dumps(parts, ensure_ascii=False) in text
        for parts in lists
        if parts
    )


def is_shown(said: str, text: str) -> bool:
    """Whether the text of a conversation contains ``said``, ignoring white space around it."""
    said = said.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def parts_of(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message, as pairs of the kind and a text that a rendered part contains."""
    if said := content_of(message):
        yield CONTENT, said
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        yield REASONING, reasoning
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            yield TOOL_CALLS, name


def replace_part(message: Message, kind: str, probe: str) -> Message:
    """Return the message with one of its parts replaced by a unique text."""
    if kind == REASONING:
        return {
            **message,
            "reasoning_content": probe,
            "thinking": probe,
            "reasoning": probe,
        }
    if kind == CONTENT:
        is_text = isinstance(message["content"], str)
        part = probe if is_text else [{"type": "text", "text": probe}]
        return {**message, "content": part}
    calls = []
    for call in message["tool_calls"]:
        is_wrapped = isinstance(call, dict) and isinstance(call.get("function"), dict)
        if is_wrapped:
            calls.append({**call, "function": {**call["function"], "name": probe}})
        else:
            calls.append({**call, "name": probe} if isinstance(call, dict) else call)
    return {**message, "tool_calls": calls}
