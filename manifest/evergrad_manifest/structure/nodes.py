"""Builds the nodes of a structural schema: each has a description, and a bound on whatever can grow."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Schema = dict[str, Any]

# Every text, list and mapping has a bound: the API server estimates the cost of a rule from the largest value
# that a schema allows, and refuses a CRD whose rules could cost too much.
LONGEST_TEXT: Final = 4096
LONGEST_KEY_NAME: Final = 253
LARGEST_INT32: Final = 2**31 - 1
# The pattern of Kubernetes' own OpenAPI document for a quantity.
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
    """A text of at most ``longest`` characters.

    ``more``: further words of the schema, such as ``pattern``.
    """
    # Left out and not written as 0: whatever is in the CRD counts against its size.
    least = {} if shortest is None else {"minLength": shortest}
    return {
        "type": "string",
        "description": description,
        "maxLength": longest,
        **least,
        **more,
    }


def choice(description: str, words: Sequence[str]) -> Schema:
    """One of ``words``."""
    return {"type": "string", "description": description, "enum": list(words)}


def moment(description: str) -> Schema:
    """A point in time, RFC 3339."""
    return {"type": "string", "format": "date-time", "description": description}


def integer(
    description: str,
    *,
    least: int | None = None,
    most: int | None = None,
    large: bool = False,
) -> Schema:
    """A whole number. ``large``: of 64 bits."""
    # The format alone guards nothing: an API server stores 3000000000 in a field of format int32.
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
    """True or false."""
    return {"type": "boolean", "description": description}


def int_or_text(description: str, *, pattern: str, longest: int = 64) -> Schema:
    """A whole number, or a text of this form, as Kubernetes' quantities are."""
    # Without a type: a structural schema has no union of types but for this word, which takes the type's
    # place.
    union = {"x-kubernetes-int-or-string": True, "maxLength": longest, "pattern": pattern}
    return {"description": description, **union}


def mapping(
    description: str,
    properties: Mapping[str, Schema],
    *,
    required: Sequence[str] = (),
    **more: Any,
) -> Schema:
    """An object of known fields."""
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
    """Name → text."""
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
    """A list. With ``keys``, server-side apply merges it item by item; without, it is replaced as a whole."""
    # Only in a list with keys does an item survive that another writer has applied, such as a volume. The API
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
    """A CEL rule. ``reason``: FieldValueInvalid unless another is given.

    ``at``: the path below the rule's own that is blamed.
    """
    # FieldValueInvalid is the API server's own default, and is not written out.
    found = {"rule": expression, "message": message}
    if reason:
        found["reason"] = reason
    if at:
        found["fieldPath"] = at
    return found
