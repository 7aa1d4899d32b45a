"""Reads parts of the API server's objects, any of which may be missing."""

from collections.abc import Mapping
from typing import Any


def part(raw: Mapping[str, Any] | None, *path: str) -> Mapping[str, Any]:
    """Return the mapping at ``path``. Empty if the mapping, or a mapping above it, is missing or null."""
    found: Mapping[str, Any] = raw or {}
    for key in path:
        found = found.get(key) or {}
    return found
