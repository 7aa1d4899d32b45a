"""Converts the manifest's models to a structural schema: every field with its description, type, bounds and
default."""

import re
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from evergrad_manifest.envelope import Spec
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.describe import describe_default, describe_type
from evergrad_manifest.model.fields import Field, choices_of, fields_of, shape_of
from evergrad_manifest.structure.nodes import LONGEST_TEXT, PRESERVE, Schema
from evergrad_manifest.structure.pod_template import build_fragments
from evergrad_manifest.training.own_task import MOST_FILE_BYTES
from evergrad_manifest.values.numbers import LARGEST_COUNT, Human

# The limits of parse_quantity and of numbers in a file: longer values are refused before they are parsed.
_LONGEST_NUMBER: Final = 64
_MOST_ENTRIES: Final = 128
_BOUNDS: Final = {
    "ge": ("minimum", False),
    "gt": ("minimum", True),
    "le": ("maximum", False),
    "lt": ("maximum", True),
}
SHOWN_DEFAULTS: Final = (
    "spec.suspend",
    "spec.nodes.min",
    "spec.failurePolicy.maxFailuresWithoutProgress",
)
"""Fields whose default the API server fills in. No field of the recipe is one of them, because the recipe
must stay as it was written."""
LEFT_OUT: Final = ("spec.training.evaluation.sources[].weight",)
"""Fields that the models have only to refuse them with a better message."""
EXACTLY_ONE: Final = {
    "spec.training.horizon": ("steps", "epochs", "tokens"),
    "spec.training.data.heldOut": ("fraction", "count"),
}
"""Sections that must have exactly one of these fields.

A CEL rule cannot read the fields that accept shares, because they have no type in the schema.
"""
_TEXT_LENGTHS: Final = {
    "spec.script.env": 32768,
    "spec.script.command": 32768,
    "spec.training.files": MOST_FILE_BYTES,
}


@cache
def build_spec() -> Schema:
    """Return the structural schema of ``spec``, without its description and rules.

    Do not change the result.
    """
    return section_schema(Spec, "spec.")


def section_schema(section: type[Section], prefix: str = "") -> Schema:
    """Return the structural schema of ``section`` at ``prefix``, which is empty or a path that ends in a
    dot."""
    # Preserve unknown keys, so that the webhook receives a misspelt key and can suggest the right one.
    properties: dict[str, Schema] = {}
    for key, info in fields_of(section).items():
        if f"{prefix}{key}" not in LEFT_OUT:
            properties[key] = field_schema(
                Field(f"{prefix}{key}", key, info, shape_of(info))
            )
    required = [key for key, info in fields_of(section).items() if info.is_required()]
    needed = {"required": required} if required else {}
    return {"type": "object", PRESERVE: True, **needed, "properties": properties}


def field_schema(field: Field) -> Schema:
    """Return the structural schema of one field, its description first."""
    found: Schema = {"description": describe(field)}
    # Structures of Kubernetes, such as volumes, have handwritten schemas.
    fragments = build_fragments()
    if field.path in fragments:
        return {**found, **deepcopy(fragments[field.path])}
    if field.shape.section is None:
        found |= _plain_schema(field)
    elif field.shape.is_list:
        most = _item_bounds(field.info)
        found |= {"type": "array", **most, "x-kubernetes-list-type": "atomic"}
        found["items"] = {
            "description": "An item.",
            **section_schema(field.shape.section, f"{field.path}[]."),
        }
    else:
        found |= section_schema(field.shape.section, f"{field.path}.")

    # These rules need no CEL rule, whose cost the API server would count.
    if field.path in EXACTLY_ONE:
        found["oneOf"] = [{"required": [key]} for key in EXACTLY_ONE[field.path]]
    if field.path in SHOWN_DEFAULTS:
        found["default"] = field.info.default
    return found


def describe(field: Field) -> str:
    """Return the text of ``kubectl explain``: meaning, type with unit and bounds, default."""
    # `kubectl explain` shows texts unchanged, so use no markup and one line.
    meaning = re.sub(r"\s+", " ", (field.info.description or "").replace("``", "`"))
    kind, default = describe_type(field), describe_default(field.info).strip("`")
    notes = [] if kind in ("mapping", "list of mappings", "text") else [kind]
    if default == "required":
        notes.append("required")
    elif default != "-":
        notes.append(f"default {default}")
    elif "efault" not in meaning and field.shape.section is None:
        notes.append("no default")
    return f"{meaning} ({'; '.join(notes)})" if notes else meaning


def _plain_schema(field: Field) -> Schema:
    annotation, metadata = _unwrapped(field.info.annotation, list(field.info.metadata))
    if (choices := choices_of(field.info)) and bool not in get_args(annotation):
        # YAML reads a bare on or off as true or false, and older files have these values for fields that now
        # have words.
        inputs = [
            getattr(one, "json_schema_input_type", None) for one in field.info.metadata
        ]
        if any(bool in get_args(one) for one in inputs):
            return {PRESERVE: True, "enum": [*choices, True, False]}
        return {"type": "string", "enum": list(choices)}

    # A list of values. A tuple type without `...` has a fixed length, for example betas.
    if get_origin(annotation) is tuple:
        arguments = [one for one in get_args(annotation) if one is not Ellipsis]
        item = {
            "description": "An item.",
            **scalar_schema(*_unwrapped(arguments[0], [])),
        }
        if field.path in _TEXT_LENGTHS:
            item["maxLength"] = _TEXT_LENGTHS[field.path]
        bounds: Schema = {"minItems": len(arguments), "maxItems": len(arguments)}
        if Ellipsis in get_args(annotation):
            bounds = _item_bounds(field.info)
        return {
            "type": "array",
            **bounds,
            "x-kubernetes-list-type": "atomic",
            "items": item,
        }
    if get_origin(annotation) is not dict:
        return scalar_schema(annotation, metadata)

    # Mappings with user-defined keys. A mapping of any values is preserved as it is, up to a number of keys.
    values = get_args(annotation)[1]
    if values is Any:
        return {"type": "object", PRESERVE: True, "maxProperties": 256}
    item = {"description": "Value.", **scalar_schema(*_unwrapped(values, []))}
    if item.get("type") == "string":
        item["maxLength"] = _TEXT_LENGTHS.get(field.path, LONGEST_TEXT)
    # Every map needs a bound, because the API server multiplies the cost of rules by it.
    most = 10 if ".resources." in field.path else _MOST_ENTRIES
    most = next(
        (
            found
            for one in field.info.metadata
            if (found := getattr(one, "max_length", None))
        ),
        most,
    )
    return {"type": "object", "maxProperties": most, "additionalProperties": item}


def _item_bounds(info: FieldInfo) -> Schema:
    # The budget counts a list by its largest length: without a bound, every rule on the list would be too
    # expensive.
    found = {}
    for item in info.metadata:
        if (least := getattr(item, "min_length", None)) is not None:
            found["minItems"] = least
        if (most := getattr(item, "max_length", None)) is not None:
            found["maxItems"] = most
    if "maxItems" not in found:
        raise ValueError(
            "a list without a largest length would be refused by the API server's budget"
        )
    return found


def _unwrapped(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Return the annotation without ``| None`` and ``Annotated``, and the metadata of ``Annotated``."""
    # They occur in any order and number: `Annotated[X, …] | None` or `Annotated[X | None, …]`.
    while True:
        if get_origin(annotation) is Annotated:
            metadata = [*metadata, *annotation.__metadata__]
            annotation = annotation.__origin__
        elif type(None) in get_args(annotation):
            annotation = next(
                item for item in get_args(annotation) if item is not type(None)
            )
        else:
            return annotation, metadata


def scalar_schema(annotation: Any, metadata: list[Any]) -> Schema:
    """Return the schema of a text, a boolean, a quantity or a human number."""
    for marker in metadata:
        if isinstance(marker, Human):
            # Either a number, whose bounds apply, or a text, which the whole validation parses. A share has
            # no type, because there is no type for both.
            kind = {"x-kubernetes-int-or-string": True}
            if marker.kind not in ("count", "bytes"):
                kind = {PRESERVE: True}
            return {**kind, "maxLength": _LONGEST_NUMBER, **_number_bounds(metadata)}
        if type(marker).__name__ == "_QuantitySchema":
            return {"x-kubernetes-int-or-string": True, "maxLength": _LONGEST_NUMBER}
    if annotation is bool:
        return {"type": "boolean"}
    if annotation is int:
        return {"type": "integer", "format": "int64", **_number_bounds(metadata)}
    if get_origin(annotation) is Literal:
        return {"type": "string", "enum": list(get_args(annotation))}
    if annotation is not str:
        raise TypeError(f"no structural schema for {annotation}")

    # pydantic stores each length and pattern in its own object, or several in the Field of an Annotated.
    found: Schema = {"type": "string", "maxLength": LONGEST_TEXT}
    for marker in [
        item for entry in metadata for item in (getattr(entry, "metadata", None) or [entry])
    ]:
        for name, word in (
            ("min_length", "minLength"),
            ("max_length", "maxLength"),
            ("pattern", "pattern"),
        ):
            if (value := getattr(marker, name, None)) is not None:
                found[word] = value
    return found


def _number_bounds(metadata: list[Any]) -> Schema:
    found: Schema = {}
    for marker in [
        item for entry in metadata for item in (getattr(entry, "metadata", None) or [entry])
    ]:
        for name, (word, is_exclusive) in _BOUNDS.items():
            bound = getattr(marker, name, None)
            # A bound beyond 64 bits cannot be written, and no number could exceed it.
            if bound is None or abs(bound) > LARGEST_COUNT:
                continue
            found[word] = bound
            if is_exclusive:
                found["exclusiveM" + word[1:]] = True
    return found
