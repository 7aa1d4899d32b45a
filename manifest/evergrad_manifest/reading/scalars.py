"""Reads plain scalars of YAML as Kubernetes' tools do.

kubectl and controllers use sigs.k8s.io/yaml, whose reader accepts more spellings than YAML 1.1 and fewer than
PyYAML: ``y`` is true, ``0o17`` is 15, ``12:30`` and a date are texts. A test compares this module with that
reader (tests/unit/manifest/kubernetes_scalars.json).
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

Kind = Literal["bool", "float", "int", "merge", "null", "str"]
Scalar = bool | int | float | str | None

LONGEST_NUMBER: Final = 100
"""Most characters of a number. The time of Python's int() grows with the square of the number of digits."""
_LARGEST_UNSIGNED: Final = 2**64 - 1
_LARGEST_SIGNED: Final = 2**63 - 1

_WORDS: Final[Mapping[str, tuple[Kind, Scalar]]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES"), ("bool", True)),
    **dict.fromkeys(("true", "True", "TRUE", "on", "On", "ON"), ("bool", True)),
    **dict.fromkeys(("n", "N", "no", "No", "NO"), ("bool", False)),
    **dict.fromkeys(("false", "False", "FALSE", "off", "Off", "OFF"), ("bool", False)),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), ("null", None)),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), ("float", float("nan"))),
    **dict.fromkeys((".inf", ".Inf", ".INF"), ("float", float("inf"))),
    **dict.fromkeys(("+.inf", "+.Inf", "+.INF"), ("float", float("inf"))),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), ("float", float("-inf"))),
    "<<": ("merge", "<<"),
}
# The spellings of Go's strconv.ParseInt with base 0, without underscores.
_INTEGER: Final = re.compile(
    r"([-+]?)(?:0[bB]([01]+)|0[oO]([0-7]+)|0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))"
)
_BASES: Final = (2, 8, 16, 8, 10)
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
# Go's strconv.ParseFloat reads text that begins with a point. There, an underscore is between digits.
_DIGITS: Final = "[0-9](?:_?[0-9])*"
_BEGINS_WITH_POINT: Final = re.compile(rf"\.{_DIGITS}(?:[eE][-+]?{_DIGITS})?")


def read_plain(text: str) -> tuple[Kind, Scalar]:
    """Return the kind and the value of ``text``, a scalar without quotes.

    A number beyond 64 bits is a float. A number that a float cannot represent is infinite or zero. A number
    of more than ``LONGEST_NUMBER`` characters has the value None.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] == ".":
        return _read_float(text, _BEGINS_WITH_POINT)
    if not text[:1] or text[0] not in "+-0123456789":
        return "str", text

    # Underscores are ignored at every position.
    plain = text.replace("_", "")
    if (match := _INTEGER.fullmatch(plain)) is None:
        return _read_float(text, _FLOAT)
    if len(plain) > LONGEST_NUMBER:
        return "int", None
    sign, *parts = match.groups()
    digits, base = next(
        (part, base) for part, base in zip(parts, _BASES, strict=True) if part
    )
    size = int(digits, base)
    value = -size if sign == "-" else size
    if -_LARGEST_SIGNED - 1 <= value <= (_LARGEST_SIGNED if sign else _LARGEST_UNSIGNED):
        return "int", value
    # Only a decimal number can also be read as a float.
    return _read_float(text, _FLOAT)


def _read_float(text: str, pattern: re.Pattern[str]) -> tuple[Kind, Scalar]:
    plain = text if pattern is _BEGINS_WITH_POINT else text.replace("_", "")
    if not pattern.fullmatch(plain):
        return "str", text
    if len(plain) > LONGEST_NUMBER:
        return "float", None
    return "float", float(plain.replace("_", ""))


def is_zero(text: str) -> bool:
    """Return whether the text of a float is written as zero, and is not only rounded to zero."""
    return re.fullmatch(r"[-+0._]*(?:[eE].*)?", text) is not None
