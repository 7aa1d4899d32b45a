"""Changes to a manifest before it is validated: overlay files, merged deeply, and ``--set path=value``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from evergrad_trainer.config.document import Document, Place, parse_document
from evergrad_trainer.config.fields import FieldPath, find_field, format_path
from evergrad_trainer.config.manifest import TrainingRun
from evergrad_trainer.config.numbers import show
from evergrad_trainer.errors import Problem

_SEGMENT = re.compile(r"""([^.\[\]"'=\s]+)|\[([0-9]{1,6})\]|\[(?:"([^"]*)"|'([^']*)')\]""")
_EXAMPLE: Final = "Write it as spec.training.optimizer.learningRate=3e-4"


@dataclass
class Layered:
    """A manifest under construction: its value, where each part of it was written, and what was wrong on the way."""

    value: dict[str, Any]
    places: dict[FieldPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Paths (as written in problems) of values that could not be read."""


@dataclass(frozen=True)
class Override:
    """One ``--set``: a value for a path. None removes the key."""

    path: FieldPath
    value: Any
    places: dict[FieldPath, Place] = field(default_factory=dict)


def apply_overlay(base: Layered, overlay: Document) -> Layered:
    """``overlay`` laid over ``base``: mappings are merged, anything else (lists too) is replaced whole, null removes a key."""
    merged = _copy(base)
    merged.problems += overlay.problems
    merged.lost |= overlay.lost
    merged.value = _merge(base.value, (overlay.value, overlay), (), merged)
    return merged


def _copy(base: Layered) -> Layered:
    return Layered(dict(base.value), dict(base.places), list(base.problems), set(base.lost))


def _merge(base: Mapping[str, Any], over: tuple[Any, Document], path: FieldPath, result: Layered) -> dict[str, Any]:
    """``base`` with the part ``over[0]`` of the overlay ``over[1]`` laid over it."""
    part, overlay = over
    merged = dict(base)
    for key, value in part.items():
        here = (*path, key)
        if value is None:
            if format_path(here) not in overlay.lost:
                _remove(merged, here, result, overlay.places.get(here))
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], (value, overlay), here, result)
        else:
            merged[key] = without_null_keys(value)
            _move_places(result.places, here, overlay.places)
    return merged


def _remove(merged: dict[str, Any], path: FieldPath, result: Layered, place: Place | None) -> None:
    """Remove the key ``path`` ends with. One that is not there is fine if the manifest knows it, else a slip of the pen."""
    key = str(path[-1])
    if key not in merged and find_field(TrainingRun, path) is None:
        where = f" ({place})" if place is not None else ""
        remedy = "Correct the key, or take the line out"
        result.problems.append(Problem(format_path(path), f"there is no such key to remove{where}", "", remedy))
    merged.pop(key, None)
    _move_places(result.places, path, {})


def without_null_keys(value: Any) -> Any:
    """A mapping that is new, without the keys its nulls would have removed."""
    if isinstance(value, Mapping):
        return {key: without_null_keys(item) for key, item in value.items() if item is not None}
    return value


def _move_places(places: dict[FieldPath, Place], path: FieldPath, new: Mapping[FieldPath, Place]) -> None:
    """Everything at and below ``path`` is now written where ``new`` says."""
    depth = len(path)
    for old in [known for known in places if known[:depth] == path]:
        del places[old]
    places.update({known: place for known, place in new.items() if known[:depth] == path})


def parse_override(text: str) -> Override | Problem:
    """``spec.training.data.sources[0].path=x`` → an Override. The value is YAML: a scalar, ``[…]`` or ``{…}``."""
    label = f"--set {show(text)}"
    name, equals, value_text = text.partition("=")
    # A quoted key may itself hold an equals sign.
    while equals and name.count('"') % 2 + name.count("'") % 2:
        more, equals, value_text = value_text.partition("=")
        name = f"{name}={more}"
    if not equals:
        return Problem(label, "has no value", "", _EXAMPLE)
    path = parse_path(name)
    if path is None:
        why = "a path is keys with dots between them, list items by their number"
        return Problem(label, f"{show(name)} is not a path", why, _EXAMPLE)
    if not value_text.strip():
        return Problem(label, "has no value", "", "Write null to remove the key, or '\"\"' for an empty text")
    return _parse_value(path, value_text, label)


def _parse_value(path: FieldPath, text: str, label: str) -> Override | Problem:
    is_flow = text.lstrip()[:1] in ("[", "{")
    if ("\n" in text.strip()) or (not is_flow and re.match(r"\s*(-\s|[^\"'\s][^\"']*:(\s|$))", text)):
        why = "a value is a number, a word, a text in quotes, […] or {…}"
        return Problem(label, f"{show(text)} is not a value", why, "Put a text in quotes of its own")
    document = parse_document(text, label=label, source="--set")
    if document.problems:
        problem = document.problems[0]
        # Problems below the value name the place inside it; the argument itself says more.
        return Problem(label, problem.what.replace(" (--set line 1)", ""), problem.why, problem.remedy)
    return Override(path, document.value, {(*path, *place): Place("--set") for place in document.places})


def parse_path(text: str) -> FieldPath | None:
    """``a.b[0]["x.y"]`` or ``a.b.0`` → its parts, or None if it is no path. Numbers are list indices."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        if position and text[position] == ".":
            position += 1
        elif position and text[position] != "[":
            return None
        match = _SEGMENT.match(text, position)
        if match is None:
            return None
        word, index, *quoted = match.groups()
        if word is not None:
            parts.append(int(word) if word.isdecimal() and word.isascii() and len(word) <= 6 else word)
        else:
            parts.append(int(index) if index is not None else next(part for part in quoted if part is not None))
        position = match.end()
    return tuple(parts) if parts and isinstance(parts[0], str) and not text.endswith(".") else None


def apply_override(base: Layered, override: Override) -> Layered:
    """``base`` with one value set or removed; missing mappings on the way are made."""
    result, path = _copy(base), override.path
    try:
        result.value = _set(base.value, path, override.value, ())
    except _UnfittingPathError as unfitting:
        result.problems.append(unfitting.problem)
        return result
    if override.value is None:
        if not _exists(base.value, path):
            _remove({}, path, result, Place("--set"))
        _move_places(result.places, path, {})
    else:
        _move_places(result.places, path, override.places)
        result.lost = {lost for lost in result.lost if lost != format_path(path)}
    return result


class _UnfittingPathError(Exception):
    def __init__(self, path: FieldPath, what: str, remedy: str) -> None:
        super().__init__(what)
        self.problem = Problem(format_path(path), f"{what} (--set)", "", remedy)


def _set(node: Any, path: FieldPath, value: Any, done: FieldPath) -> Any:
    """A copy of ``node`` in which ``path`` holds ``value``."""
    if not path:
        return value
    part, here = path[0], (*done, path[0])
    if isinstance(node, list):
        if not isinstance(part, int) or part > len(node):
            length = f"{len(node)} item" + ("" if len(node) == 1 else "s")
            remedy = f"Use a number from 0 to {len(node)}"
            raise _UnfittingPathError(here, f"there is no such item; the list has {length}", remedy)
        if value is None and len(path) == 1:
            raise _UnfittingPathError(here, "an item of a list cannot be removed", "Set the whole list")
        old = node[part] if part < len(node) else {}
        return [*node[:part], _set(old, path[1:], value, here), *node[part + 1 :]]
    if node is not None and not isinstance(node, Mapping):
        what = f"{show(node)} has no keys, so {format_path(here)} cannot be set"
        raise _UnfittingPathError(done, what, "Set the whole value instead")
    key = str(part)
    result = dict(node or {})
    if len(path) == 1 and value is None:
        result.pop(key, None)
    else:
        result[key] = _set(result.get(key), path[1:], value, here)
    return result


def _exists(node: Any, path: FieldPath) -> bool:
    for part in path:
        if isinstance(node, Mapping) and str(part) in node:
            node = node[str(part)]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            return False
    return True
