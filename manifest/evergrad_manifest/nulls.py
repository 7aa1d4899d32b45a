"""Finds nulls in mappings with user-defined keys, which ``kubectl apply`` does not send."""

from collections.abc import Iterator, Mapping
from typing import Any

from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import FREE_MAPPINGS
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath, value_at


def find_dropped_nulls(raw: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each null that a run has here, but not on a cluster that gets the file by
    ``kubectl apply``.

    ``raw``: the manifest as it was read. kubectl keeps nulls with ``--server-side``, and in lists.
    """
    why = "kubectl apply drops it, so that the default counts on a cluster"
    remedy = "Use kubectl apply --server-side or evergrad submit, or remove the key if the default is meant"
    return [
        Problem(format_path(path), "is null", why, remedy)
        for free in _free_mappings()
        for path in _find_nulls(value_at(raw, free), free)
    ]


def _free_mappings() -> Iterator[FieldPath]:
    """Yield the mappings whose nulls are values. Elsewhere, a null is a missing key."""
    for section, fields in FREE_MAPPINGS.items():
        whole: FieldPath = ("spec", "training", section)
        yield from ((*whole, field) for field in fields) if fields else (whole,)


def _find_nulls(value: Any, path: FieldPath) -> Iterator[FieldPath]:
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if item is None:
            yield (*path, str(key))
        else:
            yield from _find_nulls(item, (*path, str(key)))
