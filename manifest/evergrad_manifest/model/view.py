"""The values of a manifest that could be parsed, so that rules about several fields run even if another field
is wrong."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

from pydantic import TypeAdapter, ValidationError

from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import defaults_of, fields_of, shapes_of
from evergrad_manifest.model.raw import FieldPath, value_at


class _Unknown:
    """The value of a field that is missing or wrong."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()


def without_nulls(raw: Any, section: type[Section]) -> Any:
    """Return ``raw`` without keys that are null and optional, as the API server drops them.

    ``section``: the model of ``raw``. Mappings with user-defined keys are not changed.
    """
    if not (type(raw) is dict or isinstance(raw, Mapping)):
        return raw
    result: dict[str, Any] = {}
    fields, shapes = fields_of(section), shapes_of(section)
    for key, value in raw.items():
        info = fields.get(key)
        if info is None or (value is None and info.is_required()):
            result[key] = value
            continue
        if value is None:
            continue
        # Only sections have optional keys: a null in a user's own mapping is a value.
        shape = shapes[key]
        if shape.section is not None and not shape.is_list:
            value = without_nulls(value, shape.section)
        elif shape.section is not None and isinstance(value, list | tuple):
            value = [without_nulls(item, shape.section) for item in value]
        result[key] = value
    return result


class View:
    """The parsed values of a manifest by their dotted path; ``UNKNOWN`` if a value is missing or wrong.

    ``raw`` is the manifest without nulls, ``root`` the model of the whole. Defaults are filled in. Values
    have the form of JSON: sections are dicts with camelCase keys, lists of sections are lists of such dicts.
    """

    def __init__(self, raw: Any, root: type[Section]) -> None:
        self._raw = raw
        self.tree = _parse_section(root, raw)

    def get(self, path: str) -> Any:
        """Return the value at ``path``; UNKNOWN below a section that is wrong, None below a section that is
        left out."""
        value = self.tree
        for part in path.split("."):
            if value is None or value is UNKNOWN:
                return value
            value = value[part]
        return value

    def known(self, *paths: str) -> tuple[Any, ...] | None:
        """Return the values at all ``paths``, or None if one of them is not known."""
        values = tuple(self.get(path) for path in paths)
        return None if UNKNOWN in values else values

    def is_given(self, path: str) -> bool:
        """Return whether the file has a value at ``path``, correct or wrong."""
        return self.raw(*path.split(".")) is not None

    def raw(self, *path: str | int) -> Any:
        """Return the value in the file at ``path``, or None."""
        return value_at(self._raw, path)

    def items(self, path: str) -> list[tuple[FieldPath, dict[str, Any]]]:
        """Return the known sections of the list at ``path``, each with its own path."""
        found = self.get(path)
        base: FieldPath = tuple(path.split("."))
        return (
            [
                ((*base, index), item)
                for index, item in enumerate(found or ())
                if item is not UNKNOWN
            ]
            if found is not UNKNOWN
            else []
        )


def _parse_section(section: type[Section], raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        return UNKNOWN
    # Fill in the defaults, so that a section has one form for the rules, whether the file has it or not.
    values = dict(_defaults(section))
    for key, shape in shapes_of(section).items():
        value = raw.get(key, UNKNOWN)
        if value is UNKNOWN:
            continue
        if shape.section is not None and not shape.is_list:
            values[key] = _parse_section(shape.section, value)
        elif shape.section is not None:
            values[key] = (
                [_parse_section(shape.section, item) for item in value]
                if isinstance(value, list | tuple)
                else UNKNOWN
            )
        else:
            # Parse field by field: if one value of a section is wrong, pydantic returns nothing of the
            # section.
            try:
                values[key] = _adapter(section, key).validate_python(value)
            except ValidationError:
                values[key] = UNKNOWN
    return values


@cache
def _defaults(section: type[Section]) -> Mapping[str, Any]:
    """Return the values of a section that is empty in a file. All views share them, so rules must only read
    them."""
    values: dict[str, Any] = dict.fromkeys(fields_of(section), UNKNOWN)
    for key, value in defaults_of(section).items():
        if isinstance(value, Section):
            set_fields = value.model_dump(by_alias=True, exclude_unset=True)
            value = _parse_section(type(value), set_fields)
        values[key] = value
    return values


@cache
def _adapter(section: type[Section], key: str) -> TypeAdapter[Any]:
    """Return a parser of a single field."""
    # Cached: building a parser takes longer than parsing a whole manifest with it.
    info = fields_of(section)[key]
    annotation: Any = info.annotation
    for metadata in info.metadata:
        annotation = Annotated[annotation, metadata]
    return TypeAdapter(annotation)
