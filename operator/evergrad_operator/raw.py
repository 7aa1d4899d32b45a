"""Reads of raw objects that never fail: what is missing or of another type counts as absent. Pure."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def get_map(raw: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at ``path``, or an empty one."""
    value: Any = raw
    for key in path:
        # Nearly all are dicts, and asking an abstract class takes longer than all else here.
        value = value.get(key) if type(value) is dict or isinstance(value, Mapping) else None
    return value if type(value) is dict or isinstance(value, Mapping) else NOTHING


def get_maps(raw: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The mappings in the list ``key``."""
    value = raw.get(key)
    if not isinstance(value, (list, tuple)):
        return []
    return [item for item in value if type(item) is dict or isinstance(item, Mapping)]


def get_text(raw: Mapping[str, Any], key: str) -> str:
    """The text ``key``, or an empty one."""
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def get_int(raw: Mapping[str, Any], key: str, *, most: int = 2**63 - 1) -> int | None:
    """The whole number ``key``, of at most this size."""
    value = raw.get(key)
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and -most <= value <= most
        else None
    )


def get_natural(raw: Mapping[str, Any], key: str, *, most: int = 2**53) -> int | None:
    """The whole number ``key``, from 0 to ``most``."""
    value = get_int(raw, key, most=most)
    return None if value is None or value < 0 else value


def get_float(
    raw: Mapping[str, Any],
    key: str,
    *,
    least: float = float("-inf"),
    most: float = float("inf"),
) -> float | None:
    """The finite number ``key``, which may be written as a text, within these bounds."""
    value = raw.get(key)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and least <= number <= most else None


def keep_end(text: str, most: int) -> str:
    """The end of ``text``, where the cause of a failure stands, within so many bytes of UTF-8; what is no
    text becomes ``?``."""
    data = text.encode("utf-8", errors="replace")
    return data.decode() if len(data) <= most else data[-most:].decode("utf-8", errors="ignore")


def keep_start(text: str, most: int) -> str:
    """The beginning of ``text`` within so many bytes of UTF-8."""
    return text.encode("utf-8", errors="replace")[:most].decode("utf-8", errors="ignore")
