"""The values of a manifest that could be parsed, so that rules about several fields run although another
field is wrong."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from evergrad_manifest.base import Section
from evergrad_manifest.fields import FieldPath, fields_of, shape_of, value_at


class _Unknown:
    """The value of a field that is missing or wrong."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()


def without_nulls(raw: Any, section: type[Section]) -> Any:
    """``raw`` without the keys that are null and may be left out, as the API server does it.

    ``section``: the model of ``raw``. Mappings that are not ours stay.
    """
    if not isinstance(raw, Mapping):
        return raw
    result: dict[str, Any] = {}
    for key, value in raw.items():
        info = fields_of(section).get(key)
        if info is None or (value is None and info.is_required()):
            result[key] = value
            continue
        if value is None:
            continue
        # Only sections are ours: a null in a map of the user's own is a value.
        shape = shape_of(info)
        if shape.section is not None and not shape.is_list:
            value = without_nulls(value, shape.section)
        elif shape.section is not None and isinstance(value, list | tuple):
            value = [without_nulls(item, shape.section) for item in value]
        result[key] = value
    return result


class View:
    """The parsed values of a manifest by their dotted path; ``UNKNOWN`` where one is missing or wrong.

    ``raw`` is the manifest without nulls, ``root`` the model of the whole. Defaults are filled in. Values are
    those of the wire: sections are dicts with camelCase keys, lists of sections are lists of such dicts.
    """

    def __init__(self, raw: Any, root: type[Section]) -> None:
        self._raw = raw
        self.tree = _parse_section(root, raw)

    def get(self, path: str) -> Any:
        """The value at ``path``; UNKNOWN below a section that is wrong, None below one that is left out."""
        value = self.tree
        for part in path.split("."):
            if value is None or value is UNKNOWN:
                return value
            value = value[part]
        return value

    def known(self, *paths: str) -> tuple[Any, ...] | None:
        """The values at all ``paths``, or None if one of them is not known."""
        values = tuple(self.get(path) for path in paths)
        return None if UNKNOWN in values else values

    def is_given(self, path: str) -> bool:
        """Whether the file says anything at ``path``, be it right or wrong."""
        return self.raw(*path.split(".")) is not None

    def raw(self, *path: str | int) -> Any:
        """The value in the file at ``path``, or None."""
        return value_at(self._raw, path)

    def items(self, path: str) -> list[tuple[FieldPath, dict[str, Any]]]:
        """The known sections of the list at ``path``, each with its own path."""
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
    return {
        key: _parse_field(section, key, info, raw[key]) if key in raw else _default(info)
        for key, info in fields_of(section).items()
    }


def _parse_field(section: type[Section], key: str, info: FieldInfo, raw: Any) -> Any:
    shape = shape_of(info)
    if shape.section is not None and shape.is_list:
        return (
            [_parse_section(shape.section, item) for item in raw]
            if isinstance(raw, list | tuple)
            else UNKNOWN
        )
    if shape.section is not None:
        return _parse_section(shape.section, raw)
    try:
        return _adapter(section, key).validate_python(raw)
    except ValidationError:
        return UNKNOWN


def _default(info: FieldInfo) -> Any:
    if info.is_required():
        return UNKNOWN
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section):
        return _parse_section(
            type(default), default.model_dump(by_alias=True, exclude_unset=True)
        )
    return default


@cache
def _adapter(section: type[Section], key: str) -> TypeAdapter[Any]:
    """Parses one field alone."""
    info = fields_of(section)[key]
    annotation: Any = info.annotation
    for metadata in info.metadata:
        annotation = Annotated[annotation, metadata]
    return TypeAdapter(annotation)
