"""Values of an object as YAML or the API server has it: dicts, lists and texts. Imports no pydantic."""

from collections.abc import Mapping
from typing import Any

FieldPath = tuple[str | int, ...]
"""The place of a value: keys and list indices from the top, camelCase."""


def value_at(raw: Any, path: FieldPath) -> Any:
    """The value at ``path``, or None where there is none."""
    for part in path:
        # Nearly all mappings are dicts, and asking an abstract class takes longer than all else here.
        is_mapping = type(raw) is dict or isinstance(raw, Mapping)
        if isinstance(part, str) and is_mapping:
            raw = raw.get(part)
        elif isinstance(part, int) and isinstance(raw, list | tuple) and part < len(raw):
            raw = raw[part]
        else:
            return None
    return raw
