"""Human numbers: ``20M``, ``1e-3``, ``5%`` and ``64Ki`` become ints and floats in every numeric field.

All arithmetic is exact: ``1.1k`` is 1100, not 1100.0000000000002. A value that cannot be represented is
refused, never rounded.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction as Ratio
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, GetJsonSchemaHandler, PlainSerializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

DECIMAL_UNITS: Final = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "B": 10**9,
    "T": 10**12,
}
BINARY_UNITS: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
BYTE_UNITS: Final = {
    unit: size for unit, size in DECIMAL_UNITS.items() if unit != "B"
} | BINARY_UNITS
PERCENT: Final = {"%": Ratio(1, 100)}
LARGEST_COUNT: Final = 2**63 - 1

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER_PATTERN = (
    rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?[0-9]{{1,4}})?"
)
_NUMBER = re.compile(rf"({_NUMBER_PATTERN})\s*([A-Za-z%]*)")
_POWER = re.compile(r"([0-9]{1,5})\s*(?:\^|\*\*)\s*(-?[0-9]{1,2})")
# No valid number needs more. A longer text or exponent is refused before any arithmetic, which would be slow.
_LONGEST_TEXT = 64
_LARGEST_EXPONENT = 400
_LONGEST_QUOTE = 60
_FIRST_WITH_EXPONENT = 1e21
"""Go's JSON writes smaller whole numbers without an exponent, so they are integers when they are read
again."""


class NumberError(ValueError):
    """A value is not a valid number. ``what`` (with the value), ``why`` and ``remedy`` are parts of a
    Problem."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(
            "; ".join(part for part in (what, why) if part)
            + (f". {remedy}" if remedy else "")
        )


def show(value: Any) -> str:
    """Return ``value`` as a message quotes it: short, printable and on one line, for a value of any type."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of more than {value.bit_length() // 4} digits"
    if isinstance(value, str) and len(value) > _LONGEST_QUOTE:
        return f"{value[: _LONGEST_QUOTE - 10]!r}… ({len(value)} characters)"
    return repr(value)


def with_whole_numbers(value: Any) -> Any:
    """Return ``value``, nested JSON values, with each number in the form that an API server stores.

    Each number has one form: 10000.0 and 1e4 become the integer 10000. A laptop reads a file in the same way,
    so that its values, and the identity of its run, are the same in both places.
    """
    if isinstance(value, Mapping):
        return {key: with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_whole_numbers(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value

    # Kubernetes keeps integers of 64 bits exactly, and stores every other number as a 64-bit float.
    if isinstance(value, int):
        if abs(value) <= LARGEST_COUNT or value == -(2**63):
            return value
        try:
            value = float(value)
        except OverflowError:
            return value
    if (
        not math.isfinite(value)
        or not value.is_integer()
        or abs(value) >= _FIRST_WITH_EXPONENT
    ):
        return value
    # Convert through the shortest decimal, as Go does: 2.0 ** 60 becomes 1152921504606847000.
    return int(Decimal(repr(value)))


def _exact(value: Any, units: dict[str, Any]) -> Ratio:
    # Check this first: in Python, true and false are numbers.
    if isinstance(value, bool):
        raise NumberError(
            f"{show(value)} is not a number",
            "YAML reads on, off, yes and no as true and false",
            "Write a number",
        )
    if value is None:
        raise NumberError(
            "is empty (null)",
            "a number is needed",
            "Write a number after the colon, or remove the key",
        )
    if isinstance(value, int):
        return Ratio(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NumberError(
                f"{value} is not a finite number", "", "Write a finite number"
            )
        # Convert through the shortest decimal of this float: 0.1 means one tenth, not the nearest binary
        # fraction.
        return Ratio(Decimal(repr(value)))
    if isinstance(value, str):
        return _exact_text(value, units)
    raise NumberError(
        f"{show(value)} is not a number", "", f"Write a number, such as {_example(units)}"
    )


def _exact_text(text: str, units: dict[str, Any]) -> Ratio:
    if len(text) > _LONGEST_TEXT:
        raise NumberError(
            f"a text of {len(text)} characters is not a number",
            "",
            "Write a shorter number, such as 20M",
        )

    # Limit the length before the text is parsed, and the exponent before it is expanded: 1e999999999 would
    # use all memory.
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        what = f"{show(text)} is not a number"
        remedy = f"Write a number, such as {_example(units)}"
        if text.strip().lower().lstrip("+-.") in ("nan", "inf", "infinity"):
            what = f"{show(text)} is not a finite number"
            raise NumberError(what, "", "Write a finite number")
        # Some users read 1,000 as one thousand, and others as one. Refuse it and offer both.
        plain = text.strip().replace(",", "")
        if "," in text and _NUMBER.fullmatch(plain):
            point = text.strip().replace(",", ".")
            remedy = f"Write {plain}, or {point} if the comma is a decimal point"
            # 0,003 cannot mean 3.
            if plain.lstrip("+-").startswith("0"):
                remedy = f"Write {point}"
            raise NumberError(what, "a number has no comma", remedy)
        if (power := _POWER.fullmatch(text.strip())) is not None:
            base, exponent = int(power[1]), int(power[2])
            value = f"1e{exponent}" if base == 10 else str(base ** max(0, exponent))
            remedy = f"Write {value}" if base == 10 or exponent >= 0 else "Write its value"
            raise NumberError(what, "powers are not calculated", remedy)
        raise NumberError(what, "", remedy)
    digits, unit = match[1], match[2]
    if unit and unit not in units:
        raise _unknown_unit(text, digits, unit, units)
    number = Decimal(digits.replace("_", ""))
    if number and abs(number.adjusted()) > _LARGEST_EXPONENT:
        size = "large" if number.adjusted() > 0 else "small"
        raise NumberError(
            f"{show(text)} is too {size}", "it cannot be represented", "Check the exponent"
        )
    return Ratio(number) * (units[unit] if unit else 1)


def _example(units: dict[str, Any]) -> str:
    if "Ki" in units:
        return "64Ki"
    return ("0.1" if "M" in units else "5%") if "%" in units else "20M"


def _unknown_unit(text: str, digits: str, unit: str, units: dict[str, Any]) -> NumberError:
    what = f"{show(text)} has the unit {unit}, which does not fit here"
    if unit in BINARY_UNITS:
        number = Ratio(Decimal(digits.replace("_", ""))) * BINARY_UNITS[unit]
        remedy = (
            f"Write {number.numerator}"
            if number.denominator == 1
            else "Write a plain number"
        )
        return NumberError(
            what,
            f"{unit} ({BINARY_UNITS[unit]}) is for sizes in bytes and this is not one",
            remedy,
        )
    if unit == "%":
        return NumberError(what, "this is not a share of something", "Write a plain number")
    if unit == "B" and "Ki" in units:
        return NumberError(
            what,
            "it could mean bytes or billions",
            f"Write {digits} for bytes, or {digits}G",
        )

    # For 20MB, 20mb and 20m, the user nearly always means the unit with the same letter.
    stem = unit.rstrip("bB") or unit
    near = next(
        (guess for guess in (stem, stem.upper(), stem.capitalize()) if guess in units), None
    )
    known = f"Known units: {', '.join(units)}"
    remedy = f"Did you mean {digits}{near}? {known}" if near else known
    return NumberError(f"{show(text)} has the unknown unit {unit}", "", remedy)


def _whole(number: Ratio, value: Any, noun: str) -> int:
    if abs(number) > LARGEST_COUNT:
        raise NumberError(
            f"{show(value)} is too large",
            f"the largest number here is {LARGEST_COUNT} (2^63 - 1)",
            "Lower it",
        )
    if number.denominator != 1:
        below = math.floor(number)
        raise NumberError(
            f"{show(value)} is not a whole number", noun, f"Write {below} or {below + 1}"
        )
    return number.numerator


def _float(number: Ratio, value: Any) -> float:
    # If a value became infinite or zero, the run would train wrongly without a message.
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if math.isinf(result) or (result == 0.0 and number != 0):
        size = "large" if math.isinf(result) else "small"
        raise NumberError(
            f"{show(value)} is too {size}",
            "it cannot be represented as a 64-bit float",
            "Check the exponent",
        )
    return result


def parse_count(value: Any) -> int:
    """Parse a count: ``20M`` → 20000000.

    The units k, M, G (or B) and T are powers of ten. Raises NumberError if the value is not a whole number.
    """
    return _whole(_exact(value, DECIMAL_UNITS), value, "this is a count")


def parse_whole(value: Any) -> int:
    """Parse a plain integer, as Kubernetes does, without unit and quotes: ``4`` and ``4.0`` → 4.

    Raises NumberError.
    """
    number = _exact(value, DECIMAL_UNITS)
    if isinstance(value, int):
        return value
    # An API server stores 4.0 and 4e0 as 4.
    if isinstance(value, float) or number.denominator != 1:
        return _whole(number, value, "")
    raise NumberError(
        f"{show(value)} is not a plain integer",
        "it takes no unit and no quotes",
        f"Write {number}",
    )


def parse_bytes(value: Any) -> int:
    """Parse a number of bytes: ``64Ki`` → 65536, ``1M`` → 1000000.

    Raises NumberError if the value is not a whole number of bytes.
    """
    return _whole(_exact(value, BYTE_UNITS), value, "this is a number of bytes")


def parse_real(value: Any) -> float:
    """Parse a real number: ``1e-3`` → 0.001, ``3k`` → 3000.0, ``5%`` → 0.05. Raises NumberError."""
    return _float(_exact(value, DECIMAL_UNITS | PERCENT), value)


def parse_fraction(value: Any) -> float:
    """Parse a fraction: ``5%`` → 0.05, ``0.05`` → 0.05. Raises NumberError outside 0 to 1."""
    # Refuse 5 instead of reading it as 5%: the user could also mean 0.5.
    number = _exact(value, PERCENT)
    if not 0 <= number <= 1:
        is_percent = 1 < number <= 100 and not (
            isinstance(value, str) and value.strip().endswith("%")
        )
        remedy = (
            f"Write {str(value).strip()}% if percent is meant"
            if is_percent
            else "Write 5% or 0.05, for example"
        )
        raise NumberError(
            f"{show(value)} is not a fraction",
            "a fraction lies between 0 and 1 (0% and 100%)",
            remedy,
        )
    return _float(number, value)


def parse_steps_or_fraction(
    value: Any, *, unit: str = "step", whole: str = "horizon"
) -> int | float:
    """Parse steps or a fraction: ``100`` → 100 steps; ``5%`` or ``0.05`` → a fraction of the horizon, a float
    in (0, 1]; ``0%`` → 0 steps.

    ``1.0`` is refused: 1 and 1.0 are equal in JSON, so it could mean one step or the whole horizon. ``unit``
    and ``whole``: in messages, the counted unit, and the whole of a fraction. Raises NumberError.
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        return parse_fraction(value) or 0
    number = _exact(value, DECIMAL_UNITS)
    if 0 < number < 1:
        return _float(number, value)
    if number == 1 and (
        isinstance(value, float) or (isinstance(value, str) and "." in value)
    ):
        raise NumberError(
            f"{show(value)} is ambiguous",
            f"it could be one {unit} or the whole {whole}",
            "Write 1 or 100%",
        )
    if number > 1 and number.denominator != 1:
        remedy = f"Write {math.floor(number)} for {unit}s, or a share such as 5%"
        raise NumberError(
            f"{show(value)} is neither whole {unit}s nor a fraction of the {whole}",
            "",
            remedy,
        )
    return _whole(number, value, f"this is a number of {unit}s")


_Kind = Literal[
    "count", "number", "fraction", "bytes", "steps or fraction", "samples or fraction"
]


@dataclass(frozen=True)
class Human:
    """Marks a field as a human number, for the reference page and for the schema that editors use."""

    kind: _Kind
    pattern: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # pydantic describes only the number to which a text is converted, so an editor would report every
        # `20M` as wrong.
        number = handler(schema)
        if "anyOf" in number:
            number = {"type": "number"}
        return {"anyOf": [number, {"type": "string", "pattern": self.pattern}]}


def _human(
    kind: _Kind,
    units: dict[str, Any],
) -> Human:
    return Human(kind, rf"^\s*{_NUMBER_PATTERN}\s*({'|'.join(units)})?\s*$")


def _parsed(parse: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(parse)


Count = Annotated[int, _parsed(parse_count), _human("count", DECIMAL_UNITS)]
PLAIN_INTEGER: Final = _parsed(parse_whole)
"""Marks a field as a plain integer."""
Whole = Annotated[int, PLAIN_INTEGER]
"""Nodes, processes and seconds: small numbers, whose bounds the API server checks."""
Real = Annotated[float, _parsed(parse_real), _human("number", DECIMAL_UNITS | PERCENT)]
Fraction = Annotated[float, _parsed(parse_fraction), _human("fraction", PERCENT)]
Bytes = Annotated[int, _parsed(parse_bytes), _human("bytes", BYTE_UNITS)]
# 1.0 is refused when it is read, so write a whole as a percentage.
_whole_as_share = PlainSerializer(
    lambda value: "100%" if isinstance(value, float) and value == 1 else value,
    return_type=int | float | str,
)
StepsOrFraction = Annotated[
    int | float,
    _parsed(parse_steps_or_fraction),
    _whole_as_share,
    _human("steps or fraction", DECIMAL_UNITS | PERCENT),
]
SamplesOrShare = Annotated[
    int | float,
    _parsed(partial(parse_steps_or_fraction, unit="sample", whole="source")),
    _whole_as_share,
    _human("samples or fraction", DECIMAL_UNITS | PERCENT),
]
