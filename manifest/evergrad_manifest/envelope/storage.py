"""``spec.storage``: the volume with the run directory, which is new or exists already."""

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.values.numbers import show
from evergrad_manifest.values.quantities import (
    SMALLEST_SIZE,
    Quantity,
    is_dns_subdomain,
    quantity_value,
)

_STORAGE = "spec.storage"
OPERATIONAL_STORAGE: Final = ("whenDeleted",)
"""Fields that may change while the run trains, because they do not select where its state is."""
PLACE_OF_STORAGE: Final = ("claimName", "path")
"""Fields that select where the run's state is."""
_MAX_NODES: Final = "spec.nodes.max"
_FOLDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")


AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
FOR_ONE_POD: Final = "ReadWriteOncePod"


class Storage(Section):
    """The volume that holds the run directory.

    Either a new one (``size``) or an existing one (``claimName``).
    """

    size: Quantity | None = None
    """Size of the new volume, a Kubernetes quantity such as ``20Gi``."""
    storage_class_name: str | None = Field(default=None, min_length=1)
    """Storage class of the new volume. Default: the default class of the cluster."""
    access_modes: tuple[AccessMode, ...] | None = Field(
        default=None, min_length=1, max_length=2
    )
    """Access modes of the new volume. Default: ReadWriteOnce for one node, otherwise ReadWriteMany. With
    ReadWriteOnce all pods of the run are placed on one host. ReadWriteOncePod allows only one node."""
    claim_name: str | None = Field(default=None, min_length=1)
    """Name of an existing PersistentVolumeClaim to use instead of a new volume."""
    path: str | None = Field(default=None, min_length=1, max_length=255)
    """Folder in the volume that is the run directory. The path is relative and does not contain ``..``.
    Default: the name of the run."""
    when_deleted: Literal["Retain", "Delete"] | None = None
    """What happens to the new volume when the run is deleted. Default: ``Retain``."""


_WHY_MEANINGLESS: Final[Mapping[str, str]] = {
    "storageClassName": "an existing claim has its class already",
    "accessModes": "an existing claim has its access modes already",
    "whenDeleted": "an existing claim is never deleted with a run",
}
"""Keys that only a new volume can have, with the reason."""


def check_storage(view: View) -> Iterator[Problem]:
    """Check that the run uses either a new volume or an existing one."""
    if view.get(_STORAGE) is UNKNOWN:
        return
    yield from _check_contradictions(view)
    # Check single values even after a contradiction: these mistakes would remain when the user corrects it.
    yield from _check_values(view)


def _check_contradictions(view: View) -> Iterator[Problem]:
    # Fields of a new volume contradict an existing one. Show only the first contradiction, because one
    # mistake can cause several.
    size, claim = view.is_given(f"{_STORAGE}.size"), view.is_given(f"{_STORAGE}.claimName")
    storage_class = view.is_given(f"{_STORAGE}.storageClassName")
    meaningless = next(
        (key for key in _WHY_MEANINGLESS if view.is_given(f"{_STORAGE}.{key}")), None
    )
    if size and claim:
        why = "a run has either a new volume or an existing one"
        yield Problem(
            _STORAGE, "size and claimName are both set", why, "Remove one of them"
        )
    elif meaningless and claim:
        why = _WHY_MEANINGLESS[meaningless]
        where = f"{_STORAGE}.{meaningless}"
        yield Problem(where, "has no meaning with claimName", why, "Remove it")
    elif storage_class and not size:
        why = "storageClassName asks for a new volume"
        yield Problem(
            f"{_STORAGE}.size",
            "missing",
            why,
            "Add `size: 20Gi`, or name an existing claim by claimName",
        )


def _check_values(view: View) -> Iterator[Problem]:
    quantity = view.get(f"{_STORAGE}.size")
    if isinstance(quantity, str) and quantity_value(quantity) < SMALLEST_SIZE:
        why = f"it means {float(quantity_value(quantity)):g} bytes"
        yield Problem(
            f"{_STORAGE}.size",
            f"{show(quantity)} is too small",
            why,
            "Write a unit, such as 20Gi",
        )
    for key, noun in (("storageClassName", "storage class"), ("claimName", "PVC")):
        name = view.get(f"{_STORAGE}.{key}")
        if isinstance(name, str) and not is_dns_subdomain(name):
            why = f"the name of a {noun} has lower-case letters, digits, '-' and '.'"
            yield Problem(
                f"{_STORAGE}.{key}", f"{show(name)} is not a valid name", why, "Correct it"
            )
    # The path is joined to the mount in the pod, so `..` would leave the volume.
    path = view.get(f"{_STORAGE}.path")
    if isinstance(path, str) and _FOLDER.fullmatch(path) is None:
        why = "it is relative to the volume, without . or .., of letters, digits, '-', '_', '.' and '/'"
        yield Problem(
            f"{_STORAGE}.path",
            f"{show(path)} is not a folder in the volume",
            why,
            "Write a path such as runs/first",
        )


def check_access_modes(view: View) -> Iterator[Problem]:
    """Check that ReadWriteOncePod is the only access mode if it is set, and that the run then has one
    node."""
    modes = view.get(f"{_STORAGE}.accessModes")
    if modes in (None, UNKNOWN) or FOR_ONE_POD not in modes:
        return
    if len(modes) > 1:
        why = "Kubernetes accepts it only alone"
        yield Problem(
            f"{_STORAGE}.accessModes",
            f"{FOR_ONE_POD} is combined with other modes",
            why,
            "Remove either it or the others",
        )
    found = view.known("spec.nodes.min", "spec.nodes.max")
    if found is not None:
        smallest, largest = found
        yield from check_shared(
            smallest, largest, f"{_STORAGE}.accessModes has {FOR_ONE_POD}"
        )


def check_shared(smallest: int, largest: int | None, why: str) -> Iterator[Problem]:
    """Yield problems if a run of several nodes uses a volume that only one pod may mount. ``why``: the
    reason."""
    # Blame the bounds of nodes: unlike the volume, they can still be changed after the run has begun.
    nodes, where = (
        (smallest, "spec.nodes.min") if largest is None else (largest, _MAX_NODES)
    )
    if nodes > 1:
        remedy = (
            "Set nodes.max to 1, or accessModes to [ReadWriteMany], or to [ReadWriteOnce], which keeps all "
            "pods on one host"
        )
        yield Problem(
            where, f"{nodes} nodes need a volume that several pods can mount", why, remedy
        )


RULES: Final = (check_storage, check_access_modes)
