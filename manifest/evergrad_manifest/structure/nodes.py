"""Builds the nodes of a structural schema. Each node has a description, and a bound if its size can grow."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Schema = dict[str, Any]

# Every text, list and mapping has a bound: the API server estimates the cost of a rule from the largest value
# that a schema allows, and refuses a CRD whose rules could cost too much.
LONGEST_TEXT: Final = 4096
LONGEST_KEY_NAME: Final = 253
LARGEST_INT32: Final = 2**31 - 1
# The pattern for a quantity in Kubernetes' own OpenAPI document.
QUANTITY: Final = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
VALIDATIONS: Final = "x-kubernetes-validations"


def text(
    description: str,
    *,
    longest: int = LONGEST_KEY_NAME,
    shortest: int | None = None,
    **more: Any,
) -> Schema:
    """Return the schema of a text of at most ``longest`` characters.

    ``more``: further keywords of the schema, such as ``pattern``.
    """
    # Omit it instead of writing 0, because each byte counts against the size of the CRD.
    least = {} if shortest is None else {"minLength": shortest}
    return {
        "type": "string",
        "description": description,
        "maxLength": longest,
        **least,
        **more,
    }


def choice(description: str, words: Sequence[str]) -> Schema:
    """Return the schema of a choice: one of ``words``."""
    return {"type": "string", "description": description, "enum": list(words)}


def moment(description: str) -> Schema:
    """Return the schema of a point in time, RFC 3339."""
    return {"type": "string", "format": "date-time", "description": description}


def integer(
    description: str,
    *,
    least: int | None = None,
    most: int | None = None,
    large: bool = False,
) -> Schema:
    """Return the schema of a whole number. ``large``: 64 bits."""
    # The format alone does not limit the value: an API server stores 3000000000 in a field of format int32.
    if most is None and not large:
        most = LARGEST_INT32
    bounds = {
        key: bound
        for key, bound in (("minimum", least), ("maximum", most))
        if bound is not None
    }
    return {
        "type": "integer",
        "format": "int64" if large else "int32",
        "description": description,
        **bounds,
    }


def switch(description: str) -> Schema:
    """Return the schema of a boolean."""
    return {"type": "boolean", "description": description}


def int_or_text(description: str, *, pattern: str, longest: int = 64) -> Schema:
    """Return the schema of a whole number or a text with this pattern, as for Kubernetes' quantities."""
    # A structural schema has no union of types except this keyword, which replaces the type.
    union = {"x-kubernetes-int-or-string": True, "maxLength": longest, "pattern": pattern}
    return {"description": description, **union}


def mapping(
    description: str,
    properties: Mapping[str, Schema],
    *,
    required: Sequence[str] = (),
    **more: Any,
) -> Schema:
    """Return the schema of an object with these fields."""
    needed = {"required": list(required)} if required else {}
    return {
        "type": "object",
        "description": description,
        "properties": dict(properties),
        **needed,
        **more,
    }


def texts_by_name(
    description: str, *, most: int = 128, longest: int = LONGEST_TEXT
) -> Schema:
    """Return the schema of a mapping of names to texts."""
    return {
        "type": "object",
        "description": description,
        "maxProperties": most,
        "additionalProperties": {
            "type": "string",
            "description": "Value.",
            "maxLength": longest,
        },
    }


def items(
    description: str, item: Schema, *, most: int, keys: Sequence[str] = (), **more: Any
) -> Schema:
    """Return the schema of a list. With ``keys``, server-side apply merges it item by item; without, it is
    replaced as a whole."""
    # Only in a list with keys does an item of another writer survive an apply, for example a volume. The API
    # server then refuses two items with equal keys.
    kind: Schema = {"x-kubernetes-list-type": "atomic"}
    if keys:
        kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
    return {
        "type": "array",
        "description": description,
        "maxItems": most,
        **kind,
        "items": item,
        **more,
    }


def rule(expression: str, message: str, *, at: str = "", reason: str = "") -> Schema:
    """Return a CEL rule. ``reason``: FieldValueInvalid unless another is given.

    ``at``: path of the reported field, relative to the node of the rule.
    """
    # FieldValueInvalid is the API server's own default, so omit it.
    found = {"rule": expression, "message": message}
    if reason:
        found["reason"] = reason
    if at:
        found["fieldPath"] = at
    return found
