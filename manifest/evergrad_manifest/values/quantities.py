"""Kubernetes' quantities (``4Gi``), names and labels. Pure checks that name the remedy."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from evergrad_manifest.values.numbers import BINARY_UNITS, NumberError, show

_SUFFIXES: Final[dict[str, Fraction]] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    **{unit: Fraction(size) for unit, size in BINARY_UNITS.items()},
    "Ei": Fraction(2**60),
}
_PATTERN = r"(\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i)?)"
_QUANTITY = re.compile(_PATTERN)
_LIKELY = re.compile(r"([0-9.]+)\s*([A-Za-z]{1,3})")
_PROPER_UNITS: Final = {
    unit.lower(): unit for unit in ("k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi")
}
_LONGEST = 64
LARGEST_QUANTITY: Final = 2**63 - 1
SMALLEST_SIZE: Final = 2**20
"""Minimum number of bytes. A smaller memory or volume has a wrong unit, for example 4 for 4Gi or 400m for
400Mi."""
LONGEST_LABEL: Final = 63
LONGEST_RUN_NAME: Final = 45
"""The length of a label minus the longest suffix of an object that is named after a run: ``-coordinator-``
and its attempt."""

DNS_LABEL: Final = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
RUN_NAME: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""A label that is also valid for a Service."""
_LABEL_RULE = (
    "letters, digits, '-', '_' and '.' are allowed, a letter or digit first and last"
)
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DNS_SUBDOMAIN = re.compile(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)


def parse_quantity(value: Any) -> str:
    """Return a Kubernetes quantity as text: ``4Gi``, ``500m``, ``2`` (a plain number is accepted, too).

    Raises NumberError.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise NumberError(
            f"{show(value)} is not a quantity",
            "",
            "Write a number with a unit, such as 4Gi, 500m or 2",
        )
    if isinstance(value, float) and not value.is_integer():
        why = "without quotes a quantity is a whole number, as the API server has it"
        raise NumberError(
            f"{show(value)} is not a Kubernetes quantity",
            why,
            f'Put it in quotes: "{show(value)}"',
        )

    # Keep the text as it was written: the API server compares quantities by value, and users read the text.
    text = value if isinstance(value, str) else show(int(value))
    what = f"{show(value)} is not a Kubernetes quantity"
    if len(text) <= _LONGEST and _QUANTITY.fullmatch(text) is not None:
        if quantity_value(text) > LARGEST_QUANTITY:
            why = "the largest quantity is 2^63 - 1"
            raise NumberError(f"{show(value)} is too large", why, "Lower it")
        return text
    if text.startswith("-"):
        why = "a quantity is zero or more"
        raise NumberError(f"{show(value)} is negative", why, "Write a positive quantity")

    # For 4GB, 4gi and 4 Gi, suggest the right spelling of the unit.
    match = _LIKELY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    guess = (
        match[1] + _PROPER_UNITS.get(match[2].lower().removesuffix("b"), "?")
        if match is not None
        else ""
    )
    remedy = "Write a number with a unit, such as 4Gi, 500m or 2"
    if _QUANTITY.fullmatch(guess):
        units = "Units are k, M, G, T (powers of 1000) and Ki, Mi, Gi, Ti (of 1024)"
        remedy = f"Did you mean {guess}? {units}"
    raise NumberError(what, "", remedy)


def quantity_value(text: str) -> Fraction:
    """Return the exact number of a valid quantity: ``4Ki`` → 4096, ``500m`` → 1/2."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number = Fraction(Decimal(match[1]))
    return (
        number * Fraction(10) ** int(match[2])
        if match[2]
        else number * _SUFFIXES[match[3] or ""]
    )


class _QuantitySchema:
    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": f"^{_PATTERN}$"},
            ]
        }


Quantity = Annotated[str, BeforeValidator(parse_quantity), _QuantitySchema()]


def fault_of_key(key: str) -> tuple[str, str] | None:
    """Return the problem of the key ``[prefix/]name`` of a label or an annotation, and its reason, or
    None."""
    # The API server checks the key only in a pod, so it would accept a run whose pods it then refuses.
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > 253 or not _DNS_SUBDOMAIN.fullmatch(prefix)):
        return f"{show(key)} is not a valid key", "the part before the / is not a DNS name"
    if len(name) > LONGEST_LABEL:
        return f"{show(key)} is too long", f"at most {LONGEST_LABEL} characters are allowed"
    if not _LABEL_NAME.fullmatch(name):
        return f"{show(key)} is not a valid key", _LABEL_RULE
    return None


def fault_of_label_value(value: str) -> tuple[str, str] | None:
    """Return the problem of a label's value, and its reason, or None."""
    if len(value) > LONGEST_LABEL:
        return (
            f"{show(value)} is too long",
            f"at most {LONGEST_LABEL} characters are allowed",
        )
    if value and not _LABEL_NAME.fullmatch(value):
        return f"{show(value)} is not a valid label value", _LABEL_RULE
    return None


def is_dns_label(text: str) -> bool:
    """Return whether ``text`` is a valid name for a volume, a namespace or a run."""
    return len(text) <= LONGEST_LABEL and re.fullmatch(DNS_LABEL[1:-1], text) is not None


def is_dns_subdomain(text: str) -> bool:
    """Return whether ``text`` is a valid name for a PVC, a class or a Secret."""
    return len(text) <= 253 and _DNS_SUBDOMAIN.fullmatch(text) is not None
