"""Describes the values of a field of the manifest for users: type, bounds and default."""

import json
import math
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import Field, choices_of
from evergrad_manifest.values.numbers import Human

_WORDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def describe_type(field: Field) -> str:
    """Return the type of a field as a text for users."""
    if field.shape.section is not None:
        return "list of mappings" if field.shape.is_list else "mapping"
    if choices := choices_of(field.info):
        return (
            "one of " + ", ".join(f"`{choice}`" for choice in choices)
            if len(choices) > 1
            else f"`{choices[0]}`"
        )
    words = _describe_annotation(field.info.annotation, tuple(field.info.metadata))
    bounds = {
        key: getattr(item, key)
        for item in field.info.metadata
        for key in _WORDS
        if getattr(item, key, None) is not None
    }
    for key in (key for key in _WORDS if key in bounds):
        bound = bounds[key]
        shown = _plain(bound)
        # Write it as a person would: 2^20, 10^12, 1024.
        for base in (2, 10):
            exponent = round(math.log(bound, base)) if bound > 10**4 else 0
            if exponent and base**exponent == bound:
                shown = f"{base}^{exponent}"
        words += f", {_WORDS[key]} {shown}"
    return words


def _describe_annotation(annotation: Any, metadata: tuple[Any, ...]) -> str:
    # A human number has its own name, independent of the type to which it is converted.
    for marker in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(marker, Human):
            return marker.kind
    if hasattr(annotation, "__metadata__"):
        return _describe_annotation(annotation.__origin__, ())
    origin, arguments = (
        get_origin(annotation),
        [item for item in get_args(annotation) if item is not NoneType],
    )
    if origin is tuple:
        items = [item for item in arguments if item is not Ellipsis]
        inner = _describe_annotation(items[0], ())
        if inner.startswith("choice of "):
            return f"list; items: {inner.removeprefix('choice of ')}"
        return f"list of {inner}s" if Ellipsis in arguments else f"{len(items)} {inner}s"
    if origin is Literal:
        return "choice of " + ", ".join(f"`{choice}`" for choice in arguments)
    if origin is dict or annotation is dict:
        return "mapping"
    if origin is not None and arguments:
        return _describe_annotation(arguments[0], ())
    return {str: "text", bool: "true or false", int: "integer", float: "number"}.get(
        annotation, "any"
    )


def describe_default(info: FieldInfo) -> str:
    """Return the default of a field as a user would write it."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section):
        set_fields = default.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return f"`{json.dumps(set_fields)}`" if set_fields else "-"
    if default is None or default in ({}, ()):
        return "-"
    return f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
