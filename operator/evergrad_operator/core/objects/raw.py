"""Reads values of raw objects without errors: a value that is missing or has a wrong type counts as absent.
Pure."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_HOST: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}")


def get_map(raw: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at ``path``, or an empty one."""
    # Check for dict first: nearly all mappings are dicts, and a check against an abstract class is slow.
    value: Any = raw
    for key in path:
        is_map = type(value) is dict or isinstance(value, Mapping)
        value = value.get(key) if is_map else None
    is_map = type(value) is dict or isinstance(value, Mapping)
    return value if is_map else NOTHING


def get_maps(raw: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list ``key``."""
    value = raw.get(key)
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if type(item) is dict or isinstance(item, Mapping)]


def get_pairs(raw: Mapping[str, Any], key: str) -> list[Any]:
    """Return the items of the list ``key`` that are lists of two."""
    value = raw.get(key)
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, list) and len(item) == 2]


def get_text(raw: Mapping[str, Any], key: str) -> str:
    """Return the text ``key``, or an empty text."""
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def get_hosts(
    raw: Mapping[str, Any],
    key: str,
    *,
    most: int,
) -> list[tuple[str, int]]:
    """Return the pairs of a host name and an integer from 0 to ``most`` in the list ``key``."""
    found = []
    for host, value in get_pairs(raw, key):
        number = to_int(value, most=most)
        if is_host(host) and number is not None and number >= 0:
            found.append((host, number))
    return found


def is_host(value: Any) -> bool:
    """Return whether a host can have this name. The API server would refuse a pod with an invalid name."""
    return isinstance(value, str) and _HOST.fullmatch(value) is not None


def to_int(value: Any, *, most: int = 2**63 - 1) -> int | None:
    """Return the value if it is an integer whose absolute value is at most ``most``, or None."""
    # In Python, a bool is an int; in JSON, it is not a number.
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if -most <= value <= most else None


def get_int(
    raw: Mapping[str, Any],
    key: str,
    *,
    most: int = 2**63 - 1,
) -> int | None:
    """Return the integer ``key`` if its absolute value is at most ``most``, or None."""
    return to_int(raw.get(key), most=most)


def get_natural(
    raw: Mapping[str, Any],
    key: str,
    *,
    most: int = 2**53,
) -> int | None:
    """Return the integer ``key`` if it is from 0 to ``most``, or None."""
    value = get_int(raw, key, most=most)
    if value is None or value < 0:
        return None
    return value


def get_float(
    raw: Mapping[str, Any],
    key: str,
    *,
    least: float = float("-inf"),
    most: float = float("inf"),
) -> float | None:
    """Return the finite number ``key``, also if it is written as a text, if it is within these bounds, or
    None."""
    value = raw.get(key)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # JSON does not limit integers, but floats are limited.
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and least <= number <= most else None


def keep_end(text: str, most: int) -> str:
    """Return the end of ``text``, which names the cause of a failure, within ``most`` bytes of UTF-8.

    Characters that UTF-8 cannot encode become ``?``. For example, ``keep_end("error: no space", 5)`` returns
    ``space``.
    """
    data = text.encode("utf-8", errors="replace")
    if len(data) <= most:
        return data.decode()
    # If the cut splits a character, drop the rest of the character.
    return data[-most:].decode("utf-8", errors="ignore")


def keep_start(text: str, most: int) -> str:
    """Return the start of ``text`` within ``most`` bytes of UTF-8."""
    data = text.encode("utf-8", errors="replace")
    return data[:most].decode("utf-8", errors="ignore")
