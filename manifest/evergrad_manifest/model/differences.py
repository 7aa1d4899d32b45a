"""Finds the fields in which two recipes differ, and describes them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.values.numbers import show, with_whole_numbers

ABSENT: Final = "(absent)"
"""Value of a field on the side that does not have the field."""

Change = tuple[str, Any, Any]
"""Path of a field, its old value and its new value."""


def changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], *, where: str = "spec.training"
) -> list[Change]:
    """Return every field of two recipes that differs, with both values. Lists of different lengths differ as
    a whole.

    ``where``: the section from which both were taken. The result is empty only if the recipes are equal, so
    that a refused resume always names a field.
    """
    return _changes(old, new, where)


def _changes(old: Any, new: Any, path: str) -> list[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        # Use the order of the file, old fields first, which is the order of the message.
        keys = [*old, *(key for key in new if key not in old)]
        return [
            change
            for key in keys
            for change in _changes(
                old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}"
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [
            change
            for index, (before, after) in pairs
            for change in _changes(before, after, f"{path}[{index}]")
        ]

    # Compare as JSON and not by ==, for which 1 and true are equal.
    if _canonical(old) == _canonical(new):
        return []
    return [(path, old, new)]


def _canonical(value: Any) -> str:
    # Use one form for each number, because records of older versions have the numbers as the file had them.
    return json.dumps(with_whole_numbers(value), sort_keys=True)


def problems_of_changes(changes: list[Change], *, directory: str) -> list[Problem]:
    """Return one Problem for each field of the recipe that differs from the recipe with which the run in
    ``directory`` began."""
    return [
        Problem(
            path,
            f"{show_value(new)} here, but the run in {directory} began with {show_value(old)}",
            "the recipe of a run does not change",
            f"Set it back to {show_value(old)}, or give the changed run a name of its own",
        )
        for path, old, new in changes
    ]


def show_value(value: Any) -> str:
    """Return a value of a recipe as a message quotes it: short, with mappings and lists as JSON."""
    if value == ABSENT:
        return "nothing"
    if not isinstance(value, Mapping | list):
        return show(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:110]}… ({len(text)} characters)"
