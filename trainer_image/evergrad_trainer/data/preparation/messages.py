"""Reads the messages of a conversation in the formats of several tools."""

import json
from collections.abc import Mapping
from typing import Any, Final

from evergrad_trainer.data.preparation.documents import RowError

Message = dict[str, Any]
"""A message: a role, optional content (a text or a list of parts), tool calls and reasoning, and any other
keys for the template."""
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning that transformers supports."""
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
"""Types of parts that are texts, in chat completions and in OpenAI's responses."""
_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Names of speakers under the key ``from``, and their roles."""
_CALL: Final = "function_call"


def read_message(place: str, message: Mapping[str, Any]) -> Message:
    """Convert a message to the keys that templates use.

    Null values are treated as missing keys, and reasoning is also set as ``thinking`` and
    ``reasoning_content``, as in ``apply_chat_template`` of transformers. ``place``: the position of the
    message in the row, for errors. Raises RowError if the message is malformed.
    """
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        found = _from_speaker(place, found)
    role = found.get("role")
    if not isinstance(role, str):
        what = f"{place}.role is {'no text' if 'role' in found else 'missing'}"
        why = f"a message has a role, or from and value; its keys are {_names(message)}"
        raise RowError(what, why)
    if "content" in found:
        found["content"] = _read_content(f"{place}.content", found["content"])
    elif not found.keys() - {"role"}:
        what = f"{place} has only a role"
        raise RowError(what, "a message has content, tool calls or reasoning")

    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _from_speaker(place: str, message: Message) -> Message:
    """Convert a message with ``from`` and ``value`` to a message with ``role`` and ``content``.

    For example, ``{"from": "human", "value": "Hi"}`` becomes ``{"role": "user", "content": "Hi"}``.
    """
    speaker = message["from"]
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = f"{place}.from is {str(speaker)[:40]!r}"
        raise RowError(what, f"speakers that are known are {', '.join(_ROLES)}")
    found = {key: one for key, one in message.items() if key not in ("from", "value")}
    if "value" not in message and "content" not in message:
        raise RowError(f"{place} has from and no value", f"its keys are {_names(message)}")
    said = message.get("value", message.get("content"))
    if speaker == _CALL and isinstance(said, str):
        return {"role": role, "tool_calls": _read_calls(f"{place}.value", said), **found}
    return {**found, "role": role, "content": said}


def _read_calls(place: str, text: str) -> list[dict[str, Any]]:
    """Parse the text of the speaker ``function_call``, a JSON object or a list of objects, as tool calls."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            why = "a function_call is JSON with a name and arguments"
            raise RowError(f"{place} is not a function call", why)
    return [{"type": "function", "function": call} for call in calls]


def _read_content(place: str, content: Any) -> str | list[dict[str, str]]:
    """Return a content that is a text or a list of text parts. Raises RowError for other contents."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{place} is not a text", "it is a JSON string or a list of parts")
    parts = []
    for at, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in _TEXT_TYPES or not isinstance(text, str):
            what = f"{place}[{at}] is a part of the type {str(kind)[:40]!r}"
            if kind in _TEXT_TYPES:
                what = f"{place}[{at}] is not a text"
            raise RowError(what, "only parts that are texts can be trained on")
        parts.append({"type": "text", "text": text})
    return parts


def _names(message: Mapping[str, Any]) -> str:
    # Shorten the list of names, because a message may have many long ones.
    return ", ".join(repr(name[:40]) for name in list(message)[:5]) or "none"
