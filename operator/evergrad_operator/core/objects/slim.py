"""Reduces raw objects to the parts that the operator reads: for 1,000 runs, whole objects need five times the
memory. Pure."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from evergrad_manifest.model.nesting import cut_deep
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.raw import get_map, get_maps

Raw = Mapping[str, Any]

_POD_SPEC: Final = (
    "nodeName",
    "terminationGracePeriodSeconds",
    "priority",
    "schedulingGates",
    "schedulingGroup",
)
_POD_STATUS_LEFT_OUT: Final = (
    "hostIP",
    "hostIPs",
    "podIPs",
    "qosClass",
    "resize",
    "observedGeneration",
)
_CONTAINER_STATUS: Final = ("name", "state", "imageID")
_CONDITION: Final = ("type", "status", "reason", "message", "lastTransitionTime")
_CONDITIONS_LEFT_OUT: Final = (
    "Initialized",
    "ContainersReady",
    "PodReadyToStartContainers",
)
_METADATA_LEFT_OUT: Final = ("managedFields", "ownerReferences", "selfLink")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_LONGEST_SHARED: Final = 40
"""Texts shorter than this are interned: names, phases and reasons repeat, but messages do not."""


def slim_run(raw: Raw) -> Raw:
    """Return a run without the parts that only the API server and kubectl need, and without values that are
    nested too deeply."""
    # Cut first, before other code recurses into the object: a recursion error would end the passes of all
    # runs.
    rest = {key: value for key, value in raw.items() if key != "metadata"}
    kept = cut_deep(rest)
    if "status" in kept:
        kept["status"] = share(kept["status"])
    return {**kept, "metadata": slim_metadata(raw)}


def slim_pod(raw: Raw) -> Raw:
    """Return the parts of a pod that the operator reads."""
    spec, status = get_map(raw, "spec"), get_map(raw, "status")
    kept = _pick(spec, _POD_SPEC)
    for kind in ("containers", "initContainers"):
        if kind == "containers" or spec.get(kind):
            kept[kind] = [_pick(item, ("name", "image")) for item in get_maps(spec, kind)]
    # Keep the memory limit only for a pod that was killed at its limit, because only its message needs it.
    if any(map(_is_out_of_memory, get_maps(status, "containerStatuses"))):
        for item, whole in zip(
            kept["containers"], get_maps(spec, "containers"), strict=True
        ):
            if limit := get_map(whole, "resources", "limits").get("memory"):
                item["resources"] = {"limits": {"memory": limit}}
    # Record whether the pod was given the run's token.
    if any(one.get("name") == names.TOKEN_VOLUME for one in get_maps(spec, "volumes")):
        kept["volumes"] = [{"name": names.TOKEN_VOLUME}]
    seen = {key: value for key, value in status.items() if key not in _POD_STATUS_LEFT_OUT}
    for kind in ("containerStatuses", "initContainerStatuses"):
        if kind in seen:
            seen[kind] = [_pick(one, _CONTAINER_STATUS) for one in get_maps(seen, kind)]
    if "conditions" in seen:
        seen["conditions"] = [
            _pick(one, _CONDITION)
            for one in get_maps(seen, "conditions")
            if one.get("type") not in _CONDITIONS_LEFT_OUT
        ]
    # Most values are the same in all pods, so keep one copy of each.
    return {
        "metadata": slim_metadata(raw),
        "spec": {key: _ALIKE.find(value) for key, value in share(kept).items()},
        "status": {key: _ALIKE.find(value) for key, value in share(seen).items()},
    }


def _is_out_of_memory(container: Raw) -> bool:
    return get_map(container, "state", "terminated").get("reason") == "OOMKilled"


def slim(raw: Raw, keys: Sequence[str]) -> Raw:
    """Return an object's metadata and the parts in ``keys``."""
    return {**share(_pick(raw, keys)), "metadata": slim_metadata(raw)}


def _pick(raw: Raw, keys: Sequence[str]) -> dict[str, Any]:
    return {key: raw[key] for key in keys if key in raw}


def slim_metadata(raw: Raw) -> Raw:
    """Return the metadata without managed fields and without kubectl's copy of the object."""
    metadata = {
        key: value
        for key, value in raw["metadata"].items()
        if key not in _METADATA_LEFT_OUT
    }
    # kubectl's copy is as large as the object itself.
    annotations = get_map(metadata, "annotations")
    if _LAST_APPLIED in annotations:
        metadata["annotations"] = {
            key: value for key, value in annotations.items() if key != _LAST_APPLIED
        }
    slimmed = dict(share(metadata))
    if owners := raw["metadata"].get("ownerReferences"):
        # All children of a run have the same owner.
        slimmed["ownerReferences"] = _ALIKE.find(share(owners))
    return slimmed


class _Alike:
    """Keeps one copy of each value that many objects share. Readers must not change the values."""

    _MOST: Final = 20_000

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def find(self, value: Any) -> Any:
        """Return the first copy of ``value``, or ``value`` itself if it is new."""
        if not isinstance(value, (dict, list)):
            return value
        if len(self._found) >= self._MOST:
            # Start again with no copies; objects keep the copies that they have.
            self._found.clear()
        return self._found.setdefault(repr(value), value)


_ALIKE: Final = _Alike()


def share(value: Any) -> Any:
    """Return an equal value whose keys and short texts exist only once in this process."""
    if type(value) is str:
        return sys.intern(value) if len(value) < _LONGEST_SHARED else value
    # Check for dict first: nearly all mappings are dicts, and a check against an abstract class is slow.
    if type(value) is dict or isinstance(value, Mapping):
        return {
            sys.intern(key) if type(key) is str else key: share(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [share(item) for item in value]
    return value
