"""Parses a line of JSON whatever its size: numbers of any length, and nesting of any depth."""

import json
import re
import sys
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, Final, cast

_MOST_DIGITS: Final = 4300
"""Digits of a number that Python reads: its default limit, since the time grows with their square."""
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
    """A whole number with more digits than Python makes a number of. ``digits``: how many."""

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
    """The value of ``text``, white space around it aside. Raises json.JSONDecodeError.

    A number with too many digits is a :class:`LongNumber`. The result is that of ``json.loads``, which also
    refuses what is nested more deeply than the stack of the moment has room for.
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
    """The value that begins at ``begin`` and its end, without recursion."""
    # The containers around the place that is read, and the key under which the inner one stands.
    stack: list[tuple[list[Any] | dict[str, Any], str]] = []
    key, at = "", begin
    while True:
        value, at, is_open = _begin_value(text, at)
        if is_open:
            key, at, is_empty = _first_key(text, at, value)
            if not is_empty:
                stack.append((value, key))
                continue
        # A value is complete: it goes into the container around it, which may be complete with it.
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
    """A scalar at ``at`` and its end, or an empty container and where its content begins."""
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
    """The first key of a container, where its value begins, and whether the container is empty."""
    at = _skip(text, at)
    if text[at : at + 1] == ("}" if isinstance(value, dict) else "]"):
        return "", at + 1, True
    key, at = _next_key(text, at, value)
    return key, at, False


def _next_key(text: str, at: int, value: list[Any] | dict[str, Any]) -> tuple[str, int]:
    """The next key of an object (none of a list), and where its value begins."""
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
    """Whether an object has a field, and its value: the key itself, or a path of keys joined with dots."""
    if field in value:
        return True, value[field]
    found: Any = value
    for key in field.split("."):
        if not isinstance(found, dict) or key not in found:
            return False, None
        found = found[key]
    return True, found
