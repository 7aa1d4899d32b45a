"""Stores objects as an API server does. ``writes`` and ``changes`` record all activity."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Raw = dict[str, Any]
Place = tuple[str, str, str]
KINDS = {
    "trainingruns": ("TrainingRun", "evergrad.dev/v1alpha1"),
    "pods": ("Pod", "v1"),
    "services": ("Service", "v1"),
    "configmaps": ("ConfigMap", "v1"),
    "persistentvolumeclaims": ("PersistentVolumeClaim", "v1"),
    "secrets": ("Secret", "v1"),
    "events": ("Event", "v1"),
    "poddisruptionbudgets": ("PodDisruptionBudget", "policy/v1"),
    "networkpolicies": ("NetworkPolicy", "networking.k8s.io/v1"),
    "podgroups": ("PodGroup", "scheduling.x-k8s.io/v1alpha1"),
    "leases": ("Lease", "coordination.k8s.io/v1"),
}


class RefusedError(Exception):
    """Raised for a refused request: HTTP status, reason and message."""

    def __init__(
        self, status: int, reason: str, message: str = "", *, retry_after: int | None = None
    ) -> None:
        self.status, self.reason, self.message, self.retry_after = (
            status,
            reason,
            message or reason,
            retry_after,
        )
        super().__init__(f"{status} {reason}: {message}")


@dataclass
class Write:
    """One write request. ``has_changed``: whether it changed the object."""

    verb: str
    plural: str
    name: str
    has_changed: bool = True


@dataclass
class Store:
    """The stored objects.

    ``before`` is called before each write and may raise RefusedError. ``after`` is called after each write.
    """

    objects: dict[Place, Raw] = field(default_factory=dict)
    changes: list[tuple[int, str, str, Raw]] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    before: Callable[[Write], None] = lambda write: None
    after: Callable[[Write], None] = lambda write: None
    on_change: Callable[[str, str, Raw], None] = lambda kind, plural, raw: None
    mutate: Callable[[str, Raw], None] = lambda plural, raw: None
    """A mutating webhook, called for each created object."""
    clock: Callable[[], float] = lambda: datetime.now(UTC).timestamp()
    _versions: Any = field(default_factory=lambda: itertools.count(1000))
    _uids: Any = field(default_factory=lambda: itertools.count(1))
    version: int = 999

    def get(self, plural: str, namespace: str, name: str) -> Raw:
        """Return a copy of the object. Raises RefusedError (404) if it does not exist."""
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise RefusedError(404, "NotFound", f"{plural} {name!r} not found")
        return copy.deepcopy(found)

    def list(
        self, plural: str, namespace: str | None = None, selector: str = ""
    ) -> list[Raw]:
        """Return copies of the objects, sorted by name."""
        return [
            copy.deepcopy(raw)
            for (kind, where, _), raw in sorted(self.objects.items())
            if kind == plural and namespace in (None, "", where) and matches(raw, selector)
        ]

    def create(self, plural: str, raw: Mapping[str, Any]) -> Raw:
        """Create an object. Raises RefusedError (409) if the name is in use."""
        body = copy.deepcopy(dict(raw))
        metadata = body["metadata"]
        place = plural, metadata.get("namespace", ""), metadata["name"]
        write = self._begin("create", place)
        if place in self.objects:
            raise RefusedError(
                409, "AlreadyExists", f"{plural} {place[2]!r} already exists"
            )
        kind, version = KINDS[plural]
        metadata |= {
            "uid": f"uid-{next(self._uids)}",
            "creationTimestamp": self._now(),
            "generation": 1,
        }
        body = {"apiVersion": version, "kind": kind, **body}
        if plural == "trainingruns":
            body["status"] = {"observedGeneration": -1}  # the CRD's default
        if plural == "pods":
            body.setdefault("status", {"phase": "Pending"})
        self.mutate(plural, body)
        return self._store("ADDED", place, body, write)

    def apply(
        self,
        plural: str,
        raw: Mapping[str, Any],
        subresource: str = "",
        verb: str = "patch",
    ) -> Raw:
        """Apply an object server-side, with one field manager.

        Fields that the previous intent set and the new intent omits are removed.
        """
        body = copy.deepcopy(dict(raw))
        metadata = body["metadata"]
        place = plural, metadata.get("namespace", ""), metadata["name"]
        known = self.objects.get(place)
        if known is None and subresource:
            raise RefusedError(404, "NotFound")
        if known is None:
            return self.create(plural, raw)
        write = self._begin(verb, place)
        if metadata.get("uid", known["metadata"]["uid"]) != known["metadata"]["uid"]:
            raise RefusedError(409, "Conflict", "uid mismatch")
        new = copy.deepcopy(known)
        if subresource == "status":
            new["status"] = body["status"]
        else:
            for key in ("labels", "annotations"):
                new["metadata"][key] = {
                    **(new["metadata"].get(key) or {}),
                    **(metadata.get(key) or {}),
                }
            for key in body:
                if key not in ("metadata", "apiVersion", "kind", "status"):
                    new[key] = body[key]
            if new.get("spec") != known.get("spec"):
                new["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
        if new == known:
            write.has_changed = False
            self._end(write)
            return copy.deepcopy(known)
        return self._store("MODIFIED", place, new, write)

    def merge(
        self, plural: str, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Raw:
        """Apply a JSON merge patch."""
        known = self.get(plural, namespace, name)
        write = self._begin("patch", (plural, namespace, name))
        wanted = (patch.get("metadata") or {}).get("resourceVersion")
        if wanted not in (None, known["metadata"]["resourceVersion"]):
            raise RefusedError(409, "Conflict")
        new = merged(known, patch)
        if new.get("spec") != known.get("spec"):
            new["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
        return self._store("MODIFIED", (plural, namespace, name), new, write)

    def replace(self, plural: str, raw: Mapping[str, Any]) -> Raw:
        """Replace an object. Raises RefusedError (409) if its resource version is not the newest."""
        body = copy.deepcopy(dict(raw))
        place = plural, body["metadata"].get("namespace", ""), body["metadata"]["name"]
        known = self.get(*place)
        write = self._begin("update", place)
        if body["metadata"].get("resourceVersion") not in (
            None,
            known["metadata"]["resourceVersion"],
        ):
            raise RefusedError(409, "Conflict")
        return self._store("MODIFIED", place, {**known, **body}, write)

    def delete(
        self,
        plural: str,
        namespace: str,
        name: str,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> Raw:
        """Delete an object. A running pod only gets a deletion timestamp, as with a grace period."""
        self.get(plural, namespace, name)
        write = self._begin("delete", (plural, namespace, name))
        known = self.get(plural, namespace, name)
        if uid is not None and known["metadata"]["uid"] != uid:
            raise RefusedError(409, "Conflict", "uid precondition")
        if resource_version not in (None, known["metadata"]["resourceVersion"]):
            raise RefusedError(409, "Conflict", "resourceVersion precondition")
        is_running = (
            plural == "pods" and (known.get("status") or {}).get("phase") == "Running"
        )
        is_held = is_running or bool(known["metadata"].get("finalizers"))
        if is_held and "deletionTimestamp" not in known["metadata"]:
            known["metadata"]["deletionTimestamp"] = self._now()
            return self._store("MODIFIED", (plural, namespace, name), known, write)
        self.remove(plural, namespace, name)
        self._end(write)
        return known

    # ---- actions of other clients, which are not counted as writes
    # ------------------------------------------

    def remove(
        self, plural: str, namespace: str, name: str, *, is_silent: bool = False
    ) -> None:
        """Remove an object and the objects that it owns. ``is_silent``: send no watch event.

        An object with a finalizer stays and gets a deletion timestamp.
        """
        known = self.objects[plural, namespace, name]
        if known["metadata"].get("finalizers"):
            if "deletionTimestamp" not in known["metadata"]:
                self.change(
                    plural,
                    namespace,
                    name,
                    {"metadata": {"deletionTimestamp": self._now()}},
                )
            return
        del self.objects[plural, namespace, name]
        self.version = next(self._versions)
        known["metadata"]["resourceVersion"] = str(self.version)
        if not is_silent:
            self._notify("DELETED", plural, known)
        for kind, where, child in list(self.objects):
            owners = (
                self.objects[kind, where, child]["metadata"].get("ownerReferences") or ()
            )
            if any(owner.get("uid") == known["metadata"]["uid"] for owner in owners):
                self.remove(kind, where, child, is_silent=is_silent)

    def change(
        self, plural: str, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Raw:
        """Apply a merge patch of another client."""
        known = self.objects[plural, namespace, name]
        new = merged(known, patch)
        if new.get("spec") != known.get("spec"):
            new["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
        return self._store("MODIFIED", (plural, namespace, name), new, None)

    # ---- helpers -------------------------------------------------------------------------------------------

    def _begin(self, verb: str, place: Place) -> Write:
        write = Write(verb, place[0], place[2])
        self.before(write)
        return write

    def _end(self, write: Write) -> None:
        self.writes.append(write)
        self.after(write)

    def _store(self, kind: str, place: Place, raw: Raw, write: Write | None) -> Raw:
        self.version = next(self._versions)
        raw["metadata"]["resourceVersion"] = str(self.version)
        self.objects[place] = raw
        self._notify(kind, place[0], raw)
        if write is not None:
            self._end(write)
        return copy.deepcopy(raw)

    def _notify(self, kind: str, plural: str, raw: Raw) -> None:
        self.changes.append((self.version, kind, plural, copy.deepcopy(raw)))
        self.on_change(kind, plural, raw)

    def _now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def matches(raw: Mapping[str, Any], selector: str) -> bool:
    """Return whether the labels match a comma-separated selector of ``key`` and ``key=value``."""
    labels = raw["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        key, is_equal, value = part.partition("=")
        if key not in labels or (is_equal and labels[key] != value):
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """Return ``old`` with a JSON merge patch applied (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    new = dict(copy.deepcopy(old)) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new
