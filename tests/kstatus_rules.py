"""The rules of kstatus for unknown kinds in Python, so that every test can use them, and kstatus itself.

Source: pkg/kstatus/status of sigs.k8s.io/cli-utils v0.37.2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bed import toolbox


def judge(raw: Mapping[str, Any]) -> str:
    """Return Terminating, InProgress, Failed or Current."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    seen = status.get("observedGeneration")
    if seen is not None and "generation" in metadata and seen != metadata["generation"]:
        return "InProgress"

    # The first true condition of the two decides.
    conditions = status.get("conditions", ())
    for one in conditions:
        if one["status"] == "True" and one["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if one["type"] == "Reconciling" else "Failed"
    for one in conditions:
        if one["type"] == "Ready":
            return "Current" if one["status"] == "True" else "InProgress"
    return "Current"


def ask_kstatus(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the results of kstatus itself."""
    return [one["status"] for one in toolbox.ask("kstatus", list(objects))]
