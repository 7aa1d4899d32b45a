"""The values of a script's report, read from whatever the script has.

Nothing here raises; standard library only.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

_MAX_WHOLE = 2**52
"""Largest whole number that a coordinator takes."""
_LEAST = {"step": -1, "total_steps": 0, "checkpoint_step": -1}
"""Whole numbers of a report, each with the smallest one that has a meaning."""
FIELDS = (*_LEAST, "loss", "tokens_per_second")


def read_values(
    values: Mapping[str, object],
) -> tuple[dict[str, int | float], dict[str, str]]:
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
        # A finite number, an int where it is one; anything else is left out. An object of the script's may
        # raise whatever it likes, and training must go on.
        number: int | float | None = None
        with contextlib.suppress(Exception):
            # A tensor, an array or a numpy scalar; more than one element is refused by all of them.
            item = getattr(value, "item", None)
            plain: Any = item() if callable(item) else value
            is_text = isinstance(plain, (bool, str, bytes, bytearray))
            # A whole number that no float can hold is none that anybody measures.
            if not is_text and math.isfinite(plain):
                number = int(plain) if isinstance(plain, int) else float(plain)
        if name in _LEAST and number is not None:
            # A whole number that came as a float, and within what a coordinator takes.
            is_whole = number == int(number) and _LEAST[name] <= number <= _MAX_WHOLE
            number = int(number) if is_whole else None
        if number is not None:
            found[name] = number if name in _LEAST else float(number)
            continue
        # Not the value's own text: that may be long, or be the reason why it cannot be read.
        shown = (
            repr(value)
            if type(value) is float
            else f"a value of type {type(value).__name__}"
        )
        kind = "whole" if name in _LEAST else "finite"
        left_out[name] = f"{name}: {shown} is no {kind} number; it is left out"
    return found, left_out
