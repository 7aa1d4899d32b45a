"""Checks items of lists with a structure of Kubernetes: their keys, and the kinds of their values.

An API server drops unknown keys of such an item when it stores the object, or refuses a pod long after it has
accepted the run. This module finds both before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.values.numbers import show

Kind = Literal["text", "texts", "switch", "integer", "mapping", "mappings"]
Item = tuple[FieldPath, Mapping[str, Any]]
"""An item and its path."""
_KINDS: Final[Mapping[Kind, str]] = {
    "text": "a text",
    "texts": "a list of texts",
    "switch": "true or false",
    "integer": "a whole number",
    "mapping": "a mapping",
    "mappings": "a list of mappings",
}
_IS_OF_KIND: Final[Mapping[Kind, Callable[[Any], bool]]] = {
    "text": lambda value: isinstance(value, str),
    "texts": lambda value: _is_list_of(str, value),
    "switch": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "mapping": lambda value: isinstance(value, Mapping),
    "mappings": lambda value: _is_list_of(Mapping, value),
}


@dataclass(frozen=True)
class Keys:
    """Keys of an item: known keys, required keys, and the kinds of their values.

    ``words``: the words that some keys may have as values. ``kinds``: the kinds of the values of other keys.
    """

    known: tuple[str, ...]
    required: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] | None = None
    kinds: Mapping[str, Kind] | None = None


def items_at(view: View, *path: str) -> list[Item]:
    """Return the items of the list at ``path``; empty if the list is not valid."""
    found = view.get(".".join(path))
    return (
        [((*path, index), item) for index, item in enumerate(found or ())]
        if found is not UNKNOWN
        else []
    )


def items_of(path: FieldPath, value: Any) -> list[Item]:
    """Return the items of a list of Kubernetes that are mappings."""
    if not isinstance(value, list | tuple):
        return []
    return [
        ((*path, index), item)
        for index, item in enumerate(value)
        if isinstance(item, Mapping)
    ]


def check_keys(items: Sequence[Item], keys: Keys) -> Iterator[Problem]:
    """Find unknown and missing keys, and values of a wrong kind or word."""
    for path, item in items:
        for key in item:
            if key not in keys.known:
                near = nearest(key, keys.known)
                known = f"Known here: {', '.join(keys.known)}"
                why = f"did you mean `{near}`? {known}" if near else ""
                yield Problem(
                    format_path((*path, key)),
                    "unknown key",
                    why,
                    "" if near else f"Remove it. {known}",
                )
        for key in keys.required:
            if item.get(key) in (None, ""):
                yield Problem(
                    format_path((*path, key)),
                    "missing",
                    "it has no default",
                    f"Add `{key}`",
                )
        for key, words in (keys.words or {}).items():
            if key in item and item[key] not in words:
                near = nearest(item[key], words) if isinstance(item[key], str) else None
                remedy = (
                    f"Did you mean {near}? Write one of them"
                    if near
                    else "Write one of them"
                )
                what = f"{show(item[key])} is not one of {', '.join(words)}"
                yield Problem(format_path((*path, key)), what, "", remedy)
        for key, kind in (keys.kinds or {}).items():
            # Name an item of a list of texts by its own path.
            if kind == "texts" and isinstance(item.get(key), list | tuple):
                yield from _check_texts((*path, key), item[key])
                continue
            if item.get(key) is not None and not _IS_OF_KIND[kind](item[key]):
                what = f"{show(item[key])} is not {_KINDS[kind]}"
                remedy = _remedy_of_text(item[key]) if kind == "text" else "Correct it"
                yield Problem(format_path((*path, key)), what, "", remedy)


def _check_texts(path: FieldPath, values: Sequence[Any]) -> Iterator[Problem]:
    for index, value in enumerate(values):
        if not isinstance(value, str):
            what = f"{show(value)} is not a text"
            yield Problem(format_path((*path, index)), what, "", _remedy_of_text(value))


def _remedy_of_text(value: Any) -> str:
    is_scalar = isinstance(value, bool | int | float)
    return f'Put it in quotes: "{show(value)}"' if is_scalar else "Correct it"


def _is_list_of(kind: type[Any], value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def check_unique(items: Sequence[Item], key: str) -> Iterator[Problem]:
    """Find items whose ``key`` has the same value as an earlier item."""
    first: dict[str, str] = {}
    for path, item in items:
        value = item.get(key)
        if isinstance(value, str) and first.setdefault(
            value, format_path(path)
        ) != format_path(path):
            what = f"{show(value)} is in {first[value]} already"
            yield Problem(
                format_path((*path, key)), what, "", "Rename or remove one of them"
            )
