"""Reads the messages of a conversation as many tools write them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from evergrad_trainer.data.preparation.documents import RowError

Message = dict[str, Any]
"""A role, any of content (a text or a list of texts as parts), tool calls and reasoning, and whatever else
its row gives the template."""
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, as transformers knows them."""
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
"""Types of parts that are a text: of chat completions, and of OpenAI's responses."""
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
"""Names of speakers under ``from``, and the role that each of them has."""
_CALL: Final = "function_call"


def read_message(place: str, message: Mapping[str, Any]) -> Message:
    """A message under the names that templates know. ``place``: where it stands. Raises RowError.

    Keys without a value are left out and reasoning is given under all of its names, both as transformers'
    ``apply_chat_template`` does.
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
        what = f"{place} has a role and nothing else"
        raise RowError(what, "a message has content, tool calls or reasoning")

    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _from_speaker(place: str, message: Message) -> Message:
    """A message of ``from`` and ``value`` as one of ``role`` and ``content``."""
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
    """The calls that the text of a speaker ``function_call`` is: an object or a list of them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            why = "a function_call is JSON with a name and arguments"
            raise RowError(f"{place} is no call of a function", why)
    return [{"type": "function", "function": call} for call in calls]


def _read_content(place: str, content: Any) -> str | list[dict[str, str]]:
    """A text, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{place} is no text", "it is a JSON string or a list of parts")
    parts = []
    for at, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in _TEXT_TYPES or not isinstance(text, str):
            what = f"{place}[{at}] is a part of the type {str(kind)[:40]!r}"
            if kind in _TEXT_TYPES:
                what = f"{place}[{at}] is no text"
            raise RowError(what, "only parts that are texts can be trained on")
        parts.append({"type": "text", "text": text})
    return parts


def _names(message: Mapping[str, Any]) -> str:
    # A few names, cut short: the message is for a person.
    return ", ".join(repr(name[:40]) for name in list(message)[:5]) or "none"
