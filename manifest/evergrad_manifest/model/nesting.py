"""Limits the nesting of mappings and lists.

An API server stores objects of up to 10,000 levels. Few programs can walk them, and Python's JSON module
stops at the recursion limit, so one such object would hide all other objects of its list.
"""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath

MAX_DEPTH: Final = 64
"""Most levels of a file. The values in the innermost mapping or list are the last level."""
_CUT: Final = "…"
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))


def find_too_deep(raw: Any) -> FieldPath | None:
    """Return the path of the first mapping or list whose values are below the last level; None if there is
    none."""
    # Do not recurse, because a deep object would exceed the recursion limit.
    pending: list[tuple[Any, FieldPath]] = [(raw, ())]
    while pending:
        value, path = pending.pop()
        if isinstance(value, Mapping):
            inner = [(item, (*path, str(key))) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            inner = [(item, (*path, index)) for index, item in enumerate(value)]
        else:
            continue
        if inner and len(path) + 1 >= MAX_DEPTH:
            return path
        # Nearly all values are scalars. An isinstance check with an abstract class for each value would take
        # longer than all other work here.
        pending += [
            one
            for one in reversed(inner)
            if type(one[0]) not in _SCALARS and isinstance(one[0], Mapping | list | tuple)
        ]
    return None


def check_depth(raw: Any) -> Problem | None:
    """Return the problem of a manifest that is nested too deeply, with the name of its section, or None."""
    if (path := find_too_deep(raw)) is None:
        return None
    what = f"is nested deeper than {MAX_DEPTH} levels"
    return Problem(
        format_path(path[:3]),
        what,
        "mappings or lists are nested in one another",
        "Write it flatter",
    )


def cut_deep(raw: Any) -> Any:
    """Return ``raw``, or, if it is nested too deeply, a copy that every program can walk.

    Deeper values are replaced. The copy keeps one level more than a file may have, so that ``check_depth``
    still refuses it.
    """
    return raw if find_too_deep(raw) is None else _cut(raw, MAX_DEPTH)


def _cut(value: Any, levels: int) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _cut(item, levels - 1) if levels else _CUT for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_cut(item, levels - 1) if levels else _CUT for item in value]
    return value
