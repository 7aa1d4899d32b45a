"""Turns the manifest's models into a structural schema: every field described, with its type, bounds and
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

# As parse_quantity and the numbers of a file: what is longer is refused before it is parsed.
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
"""Fields whose default the API server fills in. None of the recipe: it must read as it was written."""
LEFT_OUT: Final = ("spec.training.evaluation.sources[].weight",)
"""Fields that the models have only so that their refusal is worded better."""
EXACTLY_ONE: Final = {
    "spec.training.horizon": ("steps", "epochs", "tokens"),
    "spec.training.data.heldOut": ("fraction", "count"),
}
"""Sections that have exactly one of these fields.

A rule could not see those of their fields that take shares, which have no type.
"""
_TEXT_LENGTHS: Final = {
    "spec.script.env": 32768,
    "spec.script.command": 32768,
    "spec.training.files": MOST_FILE_BYTES,
}


@cache
def build_spec() -> Schema:
    """The structural schema of ``spec``, without its description and rules.

    Not to be changed.
    """
    return section_schema(Spec, "spec.")


def section_schema(section: type[Section], prefix: str = "") -> Schema:
    """The structural schema of ``section``, which is at ``prefix`` (empty, or a path that
    ends in a dot)."""
    # Unknown keys are preserved, so that the webhook still sees a slip and can name the key that was meant.
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
    """The structural schema of one field, its description first."""
    found: Schema = {"description": describe(field)}
    # Kubernetes' own structures, such as volumes, are written out by hand.
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

    # Rules that a schema can express without a CEL rule, whose cost the API server would count.
    if field.path in EXACTLY_ONE:
        found["oneOf"] = [{"required": [key]} for key in EXACTLY_ONE[field.path]]
    if field.path in SHOWN_DEFAULTS:
        found["default"] = field.info.default
    return found


def describe(field: Field) -> str:
    """Text of ``kubectl explain``: meaning, type with unit and bounds, default."""
    # `kubectl explain` shows texts as they are: no markup, one line.
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
        # YAML reads a bare on or off as true or false, and older files have them where there are words now.
        inputs = [
            getattr(one, "json_schema_input_type", None) for one in field.info.metadata
        ]
        if any(bool in get_args(one) for one in inputs):
            return {PRESERVE: True, "enum": [*choices, True, False]}
        return {"type": "string", "enum": list(choices)}

    # A list of values. One without `...` in its type is a tuple of fixed length, such as betas.
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

    # Mappings whose keys are the user's. A mapping of any values is kept as it is, up to a number of keys.
    values = get_args(annotation)[1]
    if values is Any:
        return {"type": "object", PRESERVE: True, "maxProperties": 256}
    item = {"description": "Value.", **scalar_schema(*_unwrapped(values, []))}
    if item.get("type") == "string":
        item["maxLength"] = _TEXT_LENGTHS.get(field.path, LONGEST_TEXT)
    # Every map needs a bound: the API server multiplies the cost of rules by it.
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
    # The budget counts a list by its largest length: one without would make every rule on it too expensive.
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
    """The annotation without ``| None`` and ``Annotated``, and the metadata of the latter."""
    # In any order and number: `Annotated[X, …] | None` as well as `Annotated[X | None, …]`.
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
    """A text, a switch, a quantity or a human number."""
    for marker in metadata:
        if isinstance(marker, Human):
            # A number, whose bounds hold, or a text, which the whole validation reads. A share has no type:
            # there is none for both.
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

    # pydantic keeps each length and pattern in an object of its own, or several in the Field of an Annotated.
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
            # A bound beyond 64 bits cannot be written, and no number could break it.
            if bound is None or abs(bound) > LARGEST_COUNT:
                continue
            found[word] = bound
            if is_exclusive:
                found["exclusiveM" + word[1:]] = True
    return found
