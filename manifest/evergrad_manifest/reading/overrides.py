"""Changes a manifest before it is validated: overlay files, merged deeply, and ``--set path=value``."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import find_field, format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.reading.document import Document, YamlLocation, parse_document
from evergrad_manifest.values.numbers import show

_SEGMENT = re.compile(r"""([^.\[\]"'=\s]+)|\[([0-9]{1,6})\]|\[(?:"([^"]*)"|'([^']*)')\]""")
_EXAMPLE: Final = "Write it as spec.training.optimizer.learningRate=3e-4"


@dataclass(frozen=True)
class Override:
    """One ``--set``: a value for a path. None removes the key."""

    path: FieldPath
    value: Any
    places: dict[FieldPath, YamlLocation] = field(default_factory=dict)


def apply_overlay(base: Document, overlay: Document) -> Document:
    """Return ``base`` with ``overlay`` merged over it: mappings are merged, null removes a key, and any other
    value (lists, too) is replaced as a whole."""
    # Replace places together with the values, so that a problem names the file from which the value came.
    merging = _Merging(overlay)
    value = merging.merge(base.value, overlay.value, ())
    new = {
        path: place for path, place in overlay.places.items() if path not in merging.removed
    }
    return Document(
        value,
        _replace_places(base.places, new, merging.replaced | merging.removed),
        [*base.problems, *overlay.problems, *merging.problems],
        base.lost | overlay.lost,
    )


class _Merging:
    """Merges one overlay, and notes the paths that it replaces or removes."""

    def __init__(self, overlay: Document) -> None:
        self._overlay = overlay
        self.replaced: set[FieldPath] = set()
        self.removed: set[FieldPath] = set()
        self.problems: list[Problem] = []

    def merge(
        self, base: Mapping[str, Any], over: Mapping[str, Any], path: FieldPath
    ) -> dict[str, Any]:
        """Return ``base`` with ``over``, the part of the overlay at ``path``, merged over it."""
        # Mappings are merged, null removes, any other value replaces: Kubernetes' merge patch (RFC 7386).
        merged = dict(base)
        for key, value in over.items():
            here = (*path, key)
            if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
                merged[key] = self.merge(merged[key], value, here)
                continue
            if value is not None:
                merged[key] = without_null_keys(value)
                self.replaced.add(here)
            # A null that replaces a value that could not be read removes nothing.
            elif format_path(here) not in self._overlay.lost:
                if key not in merged:
                    self.problems += check_removal(here, self._overlay.places.get(here))
                merged.pop(key, None)
                self.removed.add(here)
        return merged


def check_removal(path: FieldPath, place: YamlLocation | None) -> list[Problem]:
    """Return the problem of removing a key that does not exist. There is no problem if a manifest may have
    the key."""
    # One overlay is used for many manifests, some of which do not set the key that it removes.
    if find_field(TrainingRun, path) is not None:
        return []
    where = f" ({place})" if place is not None else ""
    return [
        Problem(
            format_path(path),
            f"there is no such key to remove{where}",
            "",
            "Correct the key, or take the line out",
        )
    ]


def _replace_places(
    places: Mapping[FieldPath, YamlLocation],
    new: Mapping[FieldPath, YamlLocation],
    replaced: Collection[FieldPath],
) -> dict[FieldPath, YamlLocation]:
    """Return the places after a change: places at and below a ``replaced`` path are taken from ``new``."""

    def is_replaced(path: FieldPath) -> bool:
        return any(path[:length] in replaced for length in range(1, len(path) + 1))

    kept = {path: place for path, place in places.items() if not is_replaced(path)}
    return kept | {path: place for path, place in new.items() if is_replaced(path)}


def without_null_keys(value: Any) -> Any:
    """Return a new mapping without the keys whose value is null, because null would have removed them."""
    if isinstance(value, Mapping):
        return {
            key: without_null_keys(item) for key, item in value.items() if item is not None
        }
    return value


def parse_override(text: str) -> Override | Problem:
    """Parse ``spec.training.data.sources[0].path=x`` to an Override.

    The value is YAML: a scalar, ``[…]`` or ``{…}``. Returns a Problem if the text is not valid.
    """
    label = f"--set {show(text)}"
    name, equals, value_text = text.partition("=")
    # A quoted key may contain an equals sign.
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
        return Problem(
            label,
            "has no value",
            "",
            "Write null to remove the key, or '\"\"' for an empty text",
        )

    # YAML would read `a: b`, or a line with a dash, as a mapping or a list, which is never the intention on
    # one line.
    is_flow = value_text.lstrip()[:1] in ("[", "{")
    if ("\n" in value_text.strip()) or (
        not is_flow and re.match(r"\s*(-\s|[^\"'\s][^\"']*:(\s|$))", value_text)
    ):
        why = "a value is a number, a word, a text in quotes, […] or {…}"
        remedy = "Put a text in quotes of its own"
        return Problem(label, f"{show(value_text)} is not a value", why, remedy)
    document = parse_document(value_text, label=label, source="--set")
    if document.problems:
        problem = document.problems[0]
        # For problems below the value, YAML reports a place in the value, which is always line 1. The place
        # is the argument.
        return Problem(
            label, problem.what.replace(" (--set line 1)", ""), problem.why, problem.remedy
        )
    return Override(
        path,
        document.value,
        {
            (*path, *keys): YamlLocation("--set", written=place.written)
            for keys, place in document.places.items()
        },
    )


def parse_path(text: str) -> FieldPath | None:
    """Parse ``a.b[0]["x.y"]`` or ``a.b.0`` to its parts; None if it is not a valid path. Numbers are list
    indices."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        if position and text[position] == ".":
            position += 1
        elif position and text[position] != "[":
            return None

        # Parse segment by segment, because a quoted key may contain dots and brackets.
        match = _SEGMENT.match(text, position)
        if match is None:
            return None
        word, index, *quoted = match.groups()
        if word is not None:
            parts.append(
                int(word)
                if word.isdecimal() and word.isascii() and len(word) <= 6
                else word
            )
        else:
            parts.append(
                int(index)
                if index is not None
                else next(part for part in quoted if part is not None)
            )
        position = match.end()
    return (
        tuple(parts)
        if parts and isinstance(parts[0], str) and not text.endswith(".")
        else None
    )


def apply_override(base: Document, override: Override) -> Document:
    """Return ``base`` with one value set or removed. Missing mappings on the path are created."""
    path = override.path
    try:
        value = _set(base.value, path, override.value, ())
    except _UnfittingPathError as unfitting:
        return replace(base, problems=[*base.problems, unfitting.problem])

    # Look up in the base whether there is a value to remove: a key whose value is null exists, too.
    problems = list(base.problems)
    if override.value is None:
        node: Any = base.value
        for part in path:
            if isinstance(node, Mapping) and str(part) in node:
                node = node[str(part)]
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                problems += check_removal(path, YamlLocation("--set"))
                break
    places = _replace_places(
        base.places, override.places if override.value is not None else {}, {path}
    )
    return Document(value, places, problems, base.lost - {format_path(path)})


class _UnfittingPathError(Exception):
    def __init__(self, path: FieldPath, what: str, remedy: str) -> None:
        super().__init__(what)
        self.problem = Problem(format_path(path), f"{what} (--set)", "", remedy)


def _set(node: Any, path: FieldPath, value: Any, done: FieldPath) -> Any:
    """Return a copy of ``node`` in which ``path`` has ``value``."""
    if not path:
        return value

    # Copy each mapping and list on the path, so that the base does not change.
    part, here = path[0], (*done, path[0])
    if isinstance(node, list):
        if not isinstance(part, int) or part > len(node):
            length = f"{len(node)} item" + ("" if len(node) == 1 else "s")
            remedy = f"Use a number from 0 to {len(node)}"
            raise _UnfittingPathError(
                here, f"there is no such item; the list has {length}", remedy
            )
        if value is None and len(path) == 1:
            raise _UnfittingPathError(
                here, "an item of a list cannot be removed", "Set the whole list"
            )
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
