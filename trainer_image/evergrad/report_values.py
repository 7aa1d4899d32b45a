"""The values of a script's report, read from whatever the script has.

Nothing here raises; standard library only.
"""

import math
from collections.abc import Mapping
from typing import Any

_MAX_WHOLE = 2**52
"""Largest whole number that a coordinator takes."""
_LEAST = {"step": -1, "total_steps": 0, "checkpoint_step": -1}
"""Whole numbers of a report, each with the smallest one that has a meaning."""
FIELDS = (*_LEAST, "loss", "tokens_per_second")


def read_values(values: Mapping[str, object]) -> tuple[dict[str, int | float], dict[str, str]]:
    """Split a report into plain numbers that can be told and, by name, the reason for each value that cannot.

    Numbers, one-element tensors and arrays, numpy's scalars and whatever else can be turned into a finite
    number are told. None stands for a value that is not given.
    """
    found: dict[str, int | float] = {}
    left_out: dict[str, str] = {}
    for name in FIELDS:
        value = values.get(name)
        if value is None:
            continue
        number = (
            _read_whole(value, least=_LEAST[name]) if name in _LEAST else _read_number(value)
        )
        if number is None:
            left_out[name] = (
                f"{name}: {_describe(value)} is no {'whole' if name in _LEAST else 'finite'} "
                "number; it is left out"
            )
        else:
            found[name] = number
    return found, left_out


def _read_whole(value: object, *, least: int) -> int | None:
    number = _read_plain(value)
    if isinstance(number, float):
        number = int(number) if number.is_integer() else None
    return number if number is not None and least <= number <= _MAX_WHOLE else None


def _read_number(value: object) -> float | None:
    number = _read_plain(value)
    try:
        number = None if number is None else float(number)
    except OverflowError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _read_plain(value: object) -> int | float | None:
    try:
        # A tensor, an array or a numpy scalar; more than one element is refused by all of them.
        item = getattr(value, "item", None)
        plain: Any = item() if callable(item) else value
        if isinstance(plain, (bool, str, bytes, bytearray)):
            return None
        return int(plain) if isinstance(plain, int) else float(plain)
    except Exception:  # noqa: BLE001 - an object of the script's: it may raise anything, and training must go on
        return None


def _describe(value: object) -> str:
    """A short name of the value: its own text may be long, or may be the reason why it cannot be read."""
    return repr(value) if type(value) is float else f"a value of type {type(value).__name__}"
