"""Parses a line of JSON with numbers of any length and nesting of any depth."""

import json
import re
import sys
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, Final, cast

_MOST_DIGITS: Final = 4300
"""Maximum digits of an integer, the default limit of Python. The time to read it grows with their square."""
_NUMBER: Final = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WHITE: Final = re.compile(r"[ \t\n\r]*")
_WORDS: Final = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


class LongNumber:
    """An integer with more digits than Python converts. ``digits``: its number of digits."""

    def __init__(self, digits: int) -> None:
        self.digits = digits


def _whole_number(text: str) -> int | LongNumber:
    digits = len(text.removeprefix("-"))
    return int(text) if digits <= _MOST_DIGITS else LongNumber(digits)


_scan: Callable[[str, int], tuple[Any, int]] = cast(Any, scanner).make_scanner(
    json.JSONDecoder(parse_int=_whole_number)
)
_scan_string: Callable[[str, int], tuple[str, int]] = cast(Any, decoder).scanstring


def parse_json(text: str) -> Any:
    """Return the JSON value of ``text``, ignoring white space around it.

    The result is the same as the result of ``json.loads``, except that an integer with too many digits is a
    :class:`LongNumber`, and that nesting is not limited by the stack. Raises json.JSONDecodeError if the text
    is not valid JSON.
    """
    begin = cast(re.Match[str], _WHITE.match(text)).end()
    try:
        value, end = _scan(text, begin)
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None
    except RecursionError:
        value, end = _scan_deep(text, begin)
    end = cast(re.Match[str], _WHITE.match(text, end)).end()
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _scan_deep(text: str, begin: int) -> tuple[Any, int]:
    """Return the value that starts at ``begin`` and its end, without recursion."""
    # Each entry is an open container, and the key under which its next value is stored.
    stack: list[tuple[list[Any] | dict[str, Any], str]] = []
    key, at = "", begin
    while True:
        value, at, is_open = _begin_value(text, at)
        if is_open:
            key, at, is_empty = _first_key(text, at, value)
            if not is_empty:
                stack.append((value, key))
                continue
        # The value is complete. Store it in its container, which may then be complete too.
        while True:
            if not stack:
                return value, at
            holder, key = stack.pop()
            if isinstance(holder, dict):
                holder[key] = value
            else:
                holder.append(value)
            at = _skip(text, at)
            if text[at : at + 1] == ",":
                key, at = _next_key(text, at + 1, holder)
                stack.append((holder, key))
                break
            if text[at : at + 1] != ("}" if isinstance(holder, dict) else "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            value, at = holder, at + 1


def _begin_value(text: str, at: int) -> tuple[Any, int, bool]:
    """Return a scalar and its end, or an empty container and the start of its content.

    The third value is true for a container.
    """
    first = text[at : at + 1]
    if first == "{":
        return {}, at + 1, True
    if first == "[":
        return [], at + 1, True
    if first == '"':
        said, end = _scan_string(text, at + 1)
        return said, end, False
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word), False
    found = _NUMBER.match(text, at)
    if found is None:
        raise json.JSONDecodeError("Expecting value", text, at)
    whole, fraction, exponent = found.groups()
    if fraction or exponent:
        return float(found.group()), found.end(), False
    return _whole_number(whole), found.end(), False


def _first_key(
    text: str, at: int, value: list[Any] | dict[str, Any]
) -> tuple[str, int, bool]:
    """Return the first key of a container, the start of its value, and whether the container is empty."""
    at = _skip(text, at)
    if text[at : at + 1] == ("}" if isinstance(value, dict) else "]"):
        return "", at + 1, True
    key, at = _next_key(text, at, value)
    return key, at, False


def _next_key(text: str, at: int, value: list[Any] | dict[str, Any]) -> tuple[str, int]:
    """Return the next key of an object ("" for a list), and the start of its value."""
    at = _skip(text, at)
    if isinstance(value, list):
        return "", at
    if text[at : at + 1] != '"':
        what = "Expecting property name enclosed in double quotes"
        raise json.JSONDecodeError(what, text, at)
    key, at = _scan_string(text, at + 1)
    at = _skip(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
    return sys.intern(key), _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    return cast(re.Match[str], _WHITE.match(text, at)).end()


def find_nested(value: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Return whether an object has a field, and its value.

    ``field`` is a key or a path of keys joined with dots. For example, ``meta.text`` is the key ``text`` in
    the object under the key ``meta``.
    """
    if field in value:
        return True, value[field]
    found: Any = value
    for key in field.split("."):
        if not isinstance(found, dict) or key not in found:
            return False, None
        found = found[key]
    return True, found
