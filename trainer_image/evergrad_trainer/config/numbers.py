"""Human numbers: ``20M``, ``1e-3``, ``5%`` and ``64Ki`` become ints and floats, wherever a number stands."""

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)")


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    return float(match[1].replace("_", "")), match[2]


def _scaled(value: Any, units: dict[str, int]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return value
    number, unit = _split(value)
    if unit not in units:
        raise ValueError(f"{value!r} has the unknown unit {unit!r}; known are {', '.join(u for u in units if u)}")
    return number * units[unit]


def parse_count(value: Any) -> int:
    """``20M`` → 20000000. Units k, M, G (or B), T are powers of ten. Raises ValueError for anything not a whole number."""
    number = _scaled(value, _DECIMAL)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def parse_real(value: Any) -> float:
    """``1e-3`` → 0.001, ``3k`` → 3000.0. Raises ValueError."""
    return float(_scaled(value, _DECIMAL))


def parse_fraction(value: Any) -> float:
    """``5%`` → 0.05, ``0.05`` → 0.05. Raises ValueError outside 0 to 1."""
    number = float(_scaled(value, {"": 1, "%": 1}))
    if isinstance(value, str) and value.strip().endswith("%"):
        number /= 100
    if not 0 <= number <= 1:
        raise ValueError(f"{value!r} is not a fraction between 0 and 1 (or 0% and 100%)")
    return number


def parse_bytes(value: Any) -> int:
    """``64Ki`` → 65536, ``20Gi``, ``1M`` → 1000000. Raises ValueError for anything not a whole number of bytes."""
    number = _scaled(value, _DECIMAL | _BINARY)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(number)


def parse_steps_or_fraction(value: Any) -> int | float:
    """``100`` → 100 steps, ``5%`` or ``0.05`` → a fraction of the horizon (a float)."""
    if isinstance(value, float) and 0 < value < 1 or isinstance(value, str) and value.strip().endswith("%"):
        return parse_fraction(value)
    return parse_count(value)


Count = Annotated[int, BeforeValidator(parse_count)]
Real = Annotated[float, BeforeValidator(parse_real)]
Fraction = Annotated[float, BeforeValidator(parse_fraction)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
StepsOrFraction = Annotated[int | float, BeforeValidator(parse_steps_or_fraction)]
