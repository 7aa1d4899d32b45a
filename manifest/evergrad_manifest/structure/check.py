"""Checks a value against a structural schema, as an API server does.

The schemas are the schemas of the CustomResourceDefinition, so a file is refused here for the same reasons,
and with a remedy.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.structure.nodes import PRESERVE, QUANTITY, Schema
from evergrad_manifest.values.numbers import LARGEST_COUNT, show

_OCTAL: Final = re.compile("0?[0-7]{3,4}")


def check_structure(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    """Find each part of ``value`` that an API server refuses by ``schema``.

    ``value``: with its numbers in the form that the server stores. ``path``: its path in the file.
    """
    if schema.get("x-kubernetes-int-or-string"):
        yield from _check_int_or_text(schema, value, path)
        return
    yield from _CHECKS[schema.get("type", "")](schema, value, path)


def _check_mapping(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        known = list(schema.get("properties", ()))
        why = f"it has keys such as {', '.join(known[:3])}" if known else ""
        yield Problem(
            format_path(path),
            f"{show(value)} is not a mapping",
            why,
            "Write `key: value` lines",
        )
        return

    # A null counts as a missing key, which an API server drops.
    given = {key: item for key, item in value.items() if item is not None}
    for key in schema.get("required", ()):
        if key not in given:
            yield Problem(
                format_path((*path, key)), "missing", "it has no default", f"Add `{key}`"
            )
    most = schema.get("maxProperties")
    if most is not None and len(given) > most:
        yield Problem(
            format_path(path),
            f"has {len(given)} keys",
            f"at most {most} are allowed",
            "Remove some",
        )
        return

    # The server drops keys that the schema does not name, and kubectl refuses them.
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in given.items():
        part = properties.get(key, others)
        if part is not None:
            yield from check_structure(part, item, (*path, key))
        elif not schema.get(PRESERVE):
            near = nearest(key, properties)
            known_here = f"Known here: {', '.join(properties)}"
            yield Problem(
                format_path((*path, key)),
                "unknown key",
                f"did you mean `{near}`? {known_here}" if near else "",
                "" if near else f"Remove it. {known_here}",
            )


def _check_list(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, list | tuple):
        remedy = "Write its items as lines that begin with `- `, even if there is only one"
        yield Problem(format_path(path), f"{show(value)} is not a list", "", remedy)
        return
    most = schema.get("maxItems")
    if most is not None and len(value) > most:
        what, why = f"the list has {len(value)} items", f"at most {most} are allowed"
        yield Problem(format_path(path), what, why, "Remove some")
        return
    for index, item in enumerate(value):
        yield from check_structure(schema["items"], item, (*path, index))

    # Server-side apply merges a list with keys item by item, so no two items may have equal keys.
    keys = schema.get("x-kubernetes-list-map-keys", ())
    first: dict[tuple[str, ...], int] = {}
    for index, item in enumerate(value if keys else ()):
        if not isinstance(item, Mapping) or any(
            not isinstance(item.get(key), str) for key in keys
        ):
            continue
        identity = tuple(item[key] for key in keys)
        if first.setdefault(identity, index) != index:
            where = format_path((*path, index, *(keys if len(keys) == 1 else ())))
            what = (
                f"{' and '.join(keys)} are those of {format_path((*path, first[identity]))}"
            )
            if len(keys) == 1:
                what = f"{show(item[keys[0]])} is in {format_path((*path, first[identity]))} already"
            yield Problem(where, what, "", "Change or remove one of them")


def _check_text(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, str):
        is_scalar = isinstance(value, bool | int | float)
        why = ""
        if is_scalar:
            kind = "true or false" if isinstance(value, bool) else "a number"
            why = f"without quotes YAML reads it as {kind}"
        remedy = f'Put it in quotes: "{show(value)}"' if is_scalar else "Write a text"
        yield Problem(format_path(path), f"{show(value)} is not a text", why, remedy)
        return
    words = schema.get("enum")
    if words is not None and value not in words:
        near = nearest(value, words)
        remedy = f"Did you mean {near}? Write one of them" if near else "Write one of them"
        yield Problem(
            format_path(path), f"{show(value)} is not one of {', '.join(words)}", "", remedy
        )
    yield from _check_length(schema, value, path)


def _check_length(schema: Schema, value: str, path: FieldPath) -> Iterator[Problem]:
    longest, shortest = schema.get("maxLength"), schema.get("minLength", 0)
    if longest is not None and len(value) > longest:
        why = f"at most {longest} characters are allowed"
        yield Problem(format_path(path), f"{show(value)} is too long", why, "Shorten it")
    elif len(value) < shortest:
        yield Problem(
            format_path(path),
            "the text is empty",
            "",
            "Write a text of at least one character",
        )
    pattern = schema.get("pattern")
    if pattern is not None and not _compile(pattern).search(value):
        is_quantity = pattern == QUANTITY
        what = (
            f"{show(value)} is not a quantity"
            if is_quantity
            else f"{show(value)} is not valid"
        )
        remedy = (
            "Write a quantity, such as 10Gi" if is_quantity else f"It must match {pattern}"
        )
        yield Problem(format_path(path), what, "", remedy)


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of a schema. There are a few dozen patterns."""
    # In Python, `$` also matches before a final line break. In Go, it matches only at the end.
    return re.compile(re.sub(r"\$$", r"\\Z", pattern))


def _check_int_or_text(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    if isinstance(value, str):
        yield from _check_length(schema, value, path)
    elif isinstance(value, bool) or not isinstance(value, int):
        what = f"{show(value)} is neither a whole number nor a text"
        remedy = "Write a whole number, or a quantity such as 10Gi"
        if isinstance(value, float):
            remedy = f'Put it in quotes: "{show(value)}"'
        yield Problem(format_path(path), what, "", remedy)
    else:
        yield from _check_bounds(schema, value, path)


def _check_untyped(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    # A share is a number or a text, for which a schema has no type. Each bound applies to values of its kind.
    if isinstance(value, str):
        yield from _check_length(schema, value, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _check_bounds(schema, value, path)


def _check_integer(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, int):
        why, remedy = "", "Write a whole number"
        if isinstance(value, str):
            why = "in quotes it is a text"
            if re.fullmatch("-?[0-9]+", value):
                remedy = "Remove the quotes"
                if schema.get("maximum") == 0o777 and _OCTAL.fullmatch(value):
                    remedy = f"Remove the quotes, or write {int(value, 8)}, which is {value} in decimal"
        yield Problem(
            format_path(path), f"{show(value)} is not a whole number", why, remedy
        )
        return
    yield from _check_bounds(schema, value, path)


def _check_bounds(schema: Schema, value: float, path: FieldPath) -> Iterator[Problem]:
    least, most = schema.get("minimum"), schema.get("maximum")
    # An integer without explicit bounds has the bounds of 64 bits.
    if schema.get("type") == "integer":
        least = -LARGEST_COUNT - 1 if least is None else least
        most = LARGEST_COUNT if most is None else most
    if least is not None and schema.get("exclusiveMinimum") and value <= least:
        why = f"it must be above {show(least)}"
        yield Problem(format_path(path), f"{show(value)} is too small", why, "Raise it")
    elif least is not None and value < least:
        why, remedy = (
            f"the smallest value allowed is {show(least)}",
            f"Use {show(least)} or more",
        )
        yield Problem(format_path(path), f"{show(value)} is too small", why, remedy)
    elif most is not None and schema.get("exclusiveMaximum") and value >= most:
        why = f"it must be below {show(most)}"
        yield Problem(format_path(path), f"{show(value)} is too large", why, "Lower it")
    elif most is not None and value > most:
        why, remedy = (
            f"the largest value allowed is {show(most)}",
            f"Use {show(most)} or less",
        )
        yield Problem(format_path(path), f"{show(value)} is too large", why, remedy)


def _check_switch(schema: Schema, value: Any, path: FieldPath) -> Iterator[Problem]:
    del schema
    if not isinstance(value, bool):
        what = f"{show(value)} is neither true nor false"
        yield Problem(format_path(path), what, "", "Write true or false, without quotes")


_CHECKS: Final[Mapping[str, Callable[[Schema, Any, FieldPath], Iterator[Problem]]]] = {
    "object": _check_mapping,
    "array": _check_list,
    "string": _check_text,
    "integer": _check_integer,
    "boolean": _check_switch,
    "": _check_untyped,
}


def without_stored_nulls(schema: Schema, value: Any) -> Any:
    """Return ``value`` without nulls that an API server drops by ``schema``: nulls of keys that the schema
    names."""
    if isinstance(value, list | tuple):
        item = schema.get("items", {})
        return [without_stored_nulls(item, one) for one in value]
    if not isinstance(value, Mapping):
        return value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    kept: dict[str, Any] = {}
    for key, item in value.items():
        part = properties.get(key, others)
        if part is None:
            kept[key] = item
        elif item is not None:
            kept[key] = without_stored_nulls(part, item)
    return kept


def less_known(found: Sequence[Problem], told: Sequence[Problem]) -> list[Problem]:
    """Return the problems in ``found`` whose path has no problem in ``told``."""
    places = {one.path for one in told}
    return [one for one in found if one.path not in places]
