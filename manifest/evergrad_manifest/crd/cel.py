"""Expressions in CEL, the language of the API server's rules, that several rules need."""

from collections.abc import Iterable
from typing import Final

_UNITS: Final = (("k", "1e3"), ("K", "1e3"), ("M", "1e6"), ("G", "1e9"), ("B", "1e9"), ("T", "1e12"))
_BYTES: Final = (
    *(unit for unit in _UNITS if unit[0] not in "KB"),
    *((f"{unit}i", f"{1024.0**power!r}") for power, unit in enumerate("KMGTP", start=1)),
)
DNS_SUBDOMAIN: Final = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"


def text_as_number(value: str, *, is_bytes: bool = False) -> str:
    """The double that the text ``value`` writes as a person does (``20M``); 0 for most of what a pattern refuses already.

    Servers before 1.34 reckon with texts of three megabytes here, so each operation counts: none but these two reads the text.
    """
    units = "".join(
        f"{value}.endsWith('{unit}') ? {factor} : " for unit, factor in (_BYTES if is_bytes else _UNITS)
    )
    return f"double('0' + {value}.replace('_', '').find('[+-9eE]+')) * ({units}1.0)"


def number(value: str) -> str:
    """The double in a field that takes whole numbers and texts."""
    return f"(type({value}) == int ? double({value}) : {text_as_number(value)})"


def bounds_of_text(least: float, most: float, *, is_bytes: bool) -> str:
    """Whether ``self``, unless it is an int, is whole and within the bounds. Doubles err by less than the slack."""
    whole = "n - double(int(n + 0.5)) < 1e-6 + n * 1e-12 && double(int(n + 0.5)) - n < 1e-6 + n * 1e-12"
    within = f"n >= {float(least)!r} && n <= {float(most)!r}"
    return f"type(self) == int || [{text_as_number('self', is_bytes=is_bytes)}].all(n, {within} && {whole})"


def unchanged(key: str) -> str:
    """Whether ``self.key`` is as it was, also when it was left out before or is now."""
    return f"has(self.{key}) == has(oldSelf.{key}) && (!has(self.{key}) || self.{key} == oldSelf.{key})"


def unchanged_but_for(section: str, fields: Iterable[str]) -> str:
    """Whether each of the ``fields`` of ``self.section`` is as it was; its other fields may change.

    Spelled field by field, since this language has no object without a field.
    """
    same = " && ".join(unchanged(f"{section}.{key}") for key in fields)
    return f"has(self.{section}) == has(oldSelf.{section}) && (!has(self.{section}) || ({same}))"


def exactly_one(keys: tuple[str, ...]) -> str:
    """Whether exactly one of the fields of ``self`` is set."""
    return f"[{', '.join(f'has(self.{key})' for key in keys)}].exists_one(given, given)"


def quoted(words: tuple[str, ...]) -> str:
    """A list of texts."""
    return f"[{', '.join(repr(word) for word in words)}]"
