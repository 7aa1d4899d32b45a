"""Walks the fields of the manifest's model, with their paths, and finds the fields that contain sections."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from evergrad_manifest.model.base import Section
from evergrad_manifest.model.raw import FieldPath


@dataclass(frozen=True)
class Shape:
    """Shape of a field's value. ``section``: set if the value is a section, or (``is_list``) a list of
    sections."""

    section: type[Section] | None
    is_list: bool
    is_optional: bool


@dataclass(frozen=True)
class Field:
    """One field of the model with its path. ``path`` has ``[]`` for the items of a list."""

    path: str
    key: str
    info: FieldInfo
    shape: Shape


def shape_of(info: FieldInfo) -> Shape:
    """Return the shape of a field, without looking into mappings with user-defined keys."""
    members: tuple[Any, ...] = (info.annotation,)
    if get_origin(info.annotation) in (Union, UnionType):
        members = get_args(info.annotation)
    is_optional = type(None) in members
    for member in members:
        if get_origin(member) is tuple:
            first = get_args(member)[0]
            if inspect.isclass(first) and issubclass(first, Section):
                return Shape(first, True, is_optional)
        elif inspect.isclass(member) and issubclass(member, Section):
            return Shape(member, False, is_optional)
    return Shape(None, False, is_optional)


@cache
def fields_of(section: type[Section]) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by their camelCase keys."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


@cache
def shapes_of(section: type[Section]) -> Mapping[str, Shape]:
    """Return the shapes of a section's fields by their camelCase keys."""
    # Cached: finding a shape takes longer than reading the value, and a manifest has hundreds of fields.
    return {key: shape_of(info) for key, info in fields_of(section).items()}


@cache
def defaults_of(section: type[Section]) -> Mapping[str, Any]:
    """Return the defaults of a section's optional fields by their camelCase keys. Do not change a default."""
    return {
        key: info.get_default(call_default_factory=True, validated_data={})
        for key, info in fields_of(section).items()
        if not info.is_required()
    }


def walk_fields(section: type[Section], prefix: str = "") -> Iterator[Field]:
    """Yield every field below ``section``, depth first, in the order of definition."""
    for key, info in fields_of(section).items():
        path, shape = f"{prefix}{key}", shape_of(info)
        yield Field(path, key, info, shape)
        if shape.section is not None:
            yield from walk_fields(
                shape.section, f"{path}[]." if shape.is_list else f"{path}."
            )


def find_section(root: type[Section], path: FieldPath) -> type[Section] | None:
    """Return the section at ``path``, or None if the model has no such section."""
    section: type[Section] | None = root
    for part in path:
        if section is None or isinstance(part, int):
            continue
        info = fields_of(section).get(part)
        section = shape_of(info).section if info is not None else None
    return section


def find_field(root: type[Section], path: FieldPath) -> FieldInfo | None:
    """Return the field at ``path``, or None. An item of a list belongs to the field of the list."""
    # Use the last name: numbers after it are items of that list.
    names = [index for index, part in enumerate(path) if isinstance(part, str)]
    if not names:
        return None
    section = find_section(root, path[: names[-1]])
    return fields_of(section).get(str(path[names[-1]])) if section is not None else None


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field may have as its value; empty if the field is not a choice."""
    found: list[str] = []
    pending = [info.annotation]
    while pending:
        annotation = pending.pop(0)
        if get_origin(annotation) is Literal:
            found += [str(choice) for choice in get_args(annotation)]
        elif get_origin(annotation) in (Union, UnionType, Annotated):
            pending += [
                argument
                for argument in get_args(annotation)
                if not isinstance(argument, FieldInfo)
            ]
    return tuple(found)


def format_path(path: FieldPath) -> str:
    """Return a path as text: ``("spec", "sources", 0, "path")`` → ``spec.sources[0].path``. Keys that are not
    plain words are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isascii() and part.replace("-", "_").isidentifier():
            text += f".{part}" if text else part
        else:
            shown = part if len(part) <= 60 else f"{part[:50]}…"
            text += f"[{shown!a}]"
    return text
