"""Values of an object as YAML or the API server has it: dicts, lists and texts. Imports no pydantic."""

from collections.abc import Mapping
from typing import Any

FieldPath = tuple[str | int, ...]
"""Path of a value: keys and list indices from the top, camelCase."""


def value_at(raw: Any, path: FieldPath) -> Any:
    """Return the value at ``path``, or None if it does not exist."""
    for part in path:
        # Nearly all mappings are dicts. An isinstance check with an abstract class takes longer than all
        # other work here.
        is_mapping = type(raw) is dict or isinstance(raw, Mapping)
        if isinstance(part, str) and is_mapping:
            raw = raw.get(part)
        elif isinstance(part, int) and isinstance(raw, list | tuple) and part < len(raw):
            raw = raw[part]
        else:
            return None
    return raw
