"""The values of a script's report, read from the objects that the script passes.

Nothing here raises; standard library only.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

_MAX_WHOLE = 2**52
"""Largest whole number that a coordinator accepts."""
_LEAST = {"step": -1, "total_steps": 0, "checkpoint_step": -1}
"""Whole numbers of a report, each with its smallest valid value."""
FIELDS = (*_LEAST, "loss", "tokens_per_second")


def read_values(
    values: Mapping[str, object],
) -> tuple[dict[str, int | float], dict[str, str]]:
    """Split a report into plain numbers and, by name, the reason for each value that is left out.

    Numbers, one-element tensors and arrays, numpy scalars and other objects that can be converted to a finite
    number are reported. None means that the value is not given.
    """
    found: dict[str, int | float] = {}
    left_out: dict[str, str] = {}
    for name in FIELDS:
        value = values.get(name)
        if value is None:
            continue
        # A finite number, kept as an int if it is one; anything else is left out. An object of the script
        # may raise any exception, and training must continue.
        number: int | float | None = None
        with contextlib.suppress(Exception):
            # A tensor, an array or a numpy scalar; more than one element is refused by all of them.
            item = getattr(value, "item", None)
            plain: Any = item() if callable(item) else value
            is_text = isinstance(plain, (bool, str, bytes, bytearray))
            # A whole number that is too large for a float is not a measurement.
            if not is_text and math.isfinite(plain):
                number = int(plain) if isinstance(plain, int) else float(plain)
        if name in _LEAST and number is not None:
            # A whole number may arrive as a float; it must be in the range that a coordinator accepts.
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
        left_out[name] = f"{name}: {shown} is not a {kind} number; it is left out"
    return found, left_out
