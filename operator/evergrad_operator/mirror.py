"""The operator's informer cache: runs, their pods, claims and other children as last seen. A hint, never
proof.

Fed by watch events, by what the API server answered to our own writes, and by resync lists, which also prune
it: a watch that was restarted after 410 never tells what vanished meanwhile.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from evergrad_operator import names
from evergrad_operator.claim_index import ClaimIndex
from evergrad_operator.expectations import Expectations
from evergrad_operator.names import Key

Raw = Mapping[str, Any]

RUNS, PODS, CLAIMS, CHILDREN = "trainingruns", "pods", "persistentvolumeclaims", "children"
_TOMBSTONE_SECONDS = 600.0
_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds", "priority", "schedulingGates")
_POD_STATUS_LEFT_OUT = (
    "hostIP",
    "hostIPs",
    "podIPs",
    "qosClass",
    "resize",
    "observedGeneration",
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class Mirror:
    """What the cluster looked like when last heard of. Everything is kept by the run it belongs to."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: dict[Key, Raw] = {}
        self._pods: dict[Key, dict[str, Raw]] = {}
        self._claims: dict[Key, Raw] = {}
        self._children: dict[Key, dict[tuple[str, str], Raw]] = {}
        self._index = ClaimIndex()
        self._tombstones: dict[str, float] = {}
        self.expectations = Expectations((RUNS, PODS), clock=clock)

    # ---- what is asked of it -------------------------------------------------------------------------------

    def run(self, key: Key) -> Raw | None:
        """The run, or None."""
        return self._runs.get(key)

    def runs(self) -> Mapping[Key, Raw]:
        """All runs."""
        return self._runs

    def pods(self, key: Key) -> Sequence[Raw]:
        """The run's pods, slimmed."""
        return tuple(self._pods.get(key, {}).values())

    def claim(self, namespace: str, name: str) -> Raw | None:
        """The claim, or None if it does not exist or was never looked at."""
        return self._claims.get((namespace, name))

    def children(self, key: Key) -> Mapping[tuple[str, str], Raw]:
        """The run's other children by kind and name: metadata is all that is kept of them."""
        return self._children.get(key, {})

    def users_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """The runs that keep their files on this claim."""
        return self._index.users_of(namespace, claim)

    def others(self, key: Key) -> Sequence[Raw]:
        """Other runs whose folders on the same claim overlap with the run's."""
        raw = self._runs.get(key)
        return tuple(self._runs[user] for user in self._index.neighbours_of(raw)) if raw else ()

    def claim_users(self, namespace: str, claim: str) -> frozenset[str]:
        """Names of the runs that keep their files on this claim."""
        return frozenset(name for _, name in self._index.users_of(namespace, claim))

    def known(self) -> set[Key]:
        """Every run that exists, and every one that still has pods or children."""
        return {*self._runs, *self._pods, *self._children}

    def count(self) -> Mapping[str, int]:
        """Objects by resource."""
        return {
            RUNS: len(self._runs),
            PODS: sum(map(len, self._pods.values())),
            CLAIMS: len(self._claims),
            CHILDREN: sum(map(len, self._children.values())),
        }

    # ---- what it is told -----------------------------------------------------------------------------------

    def see(
        self, resource: str, raw: Raw, *, is_deleted: bool = False, is_watched: bool = False
    ) -> tuple[Key, ...]:
        """Take in one object, unless something newer is known; the runs it concerns.

        ``is_watched``: a watch has shown it; else it is an answer that the watch has yet to show.
        """
        metadata = raw.get("metadata") or {}
        identity, version = str(metadata.get("uid", "")), _version(metadata)
        if identity in self._tombstones and not is_deleted:
            return ()
        self._note(resource, identity, version, is_deleted=is_deleted, is_watched=is_watched)
        keys = self._concerned(resource, raw)
        known = self._find(resource, raw)
        if known is not None and known["metadata"].get("uid") != identity and is_deleted:
            return ()  # the end of an object whose name a newer one has
        is_same = known is not None and known["metadata"].get("uid") == identity
        # The watch's echo of an answer that was taken in before is no news.
        if (
            known is not None
            and is_same
            and not is_deleted
            and _version(known["metadata"]) >= version > 0
        ):
            return ()
        if known is not None and not is_same:
            self.expectations.forget(resource, str(known["metadata"].get("uid", "")))
        if is_deleted:
            self._remove(resource, raw)
        else:
            self._store(resource, raw)
        if resource == RUNS and (
            known is None or not is_same or is_deleted or _stand(known) != _stand(raw)
        ):
            keys = (*keys, *self._index.neighbours_of(raw))
        return keys

    def replace(
        self, resource: str, raws: Iterable[Raw], *, version: int, covers: Callable[[str], bool]
    ) -> set[Key]:
        """Take in a whole list that is as of ``version``; what it lacks goes. ``covers``: whether it spans a
        namespace.

        The runs that something has changed for. Objects that are newer than the list stay.
        """
        raws = list(raws)
        changed: set[Key] = set()
        for raw in raws:
            identity = str(raw["metadata"].get("uid", ""))
            known = self._find(resource, raw)
            if (
                known is None
                or known["metadata"].get("uid") != identity
                or _version(known["metadata"]) < _version(raw["metadata"])
            ):
                changed.update(self.see(resource, raw))
        return changed | self.prune(resource, raws, version=version, covers=covers)

    def prune(
        self, resource: str, raws: Iterable[Raw], *, version: int, covers: Callable[[str], bool]
    ) -> set[Key]:
        """Drop what a list as of ``version`` lacks; of what it has, only metadata are needed.

        The runs that this concerns.
        """
        changed: set[Key] = set()
        for known in find_vanished(self._all(resource), raws, version=version):
            metadata = known["metadata"]
            if covers(str(metadata.get("namespace", ""))):
                changed.update(self._concerned(resource, known))
                changed.update(self._index.neighbours_of(known) if resource == RUNS else ())
                self._remove(resource, known)
        self._forget_tombstones()
        return changed

    def forget_pod(self, key: Key, name: str, uid: str) -> None:
        """A pod that the API server does not know any more."""
        self._forget(PODS, self._pods.get(key, {}).get(name), uid)

    def forget_child(self, key: Key, kind: str, name: str, uid: str) -> None:
        """A child, neither pod nor claim, that the API server does not know any more."""
        self._forget(CHILDREN, self._children.get(key, {}).get((kind, name)), uid)

    def forget_claim(self, namespace: str, name: str) -> None:
        """A claim that the API server does not know any more."""
        self._claims.pop((namespace, name), None)

    def _forget(self, resource: str, known: Raw | None, uid: str) -> None:
        if known is not None and known["metadata"].get("uid") == uid:
            self._remove(resource, known)

    # ---- how it is kept ------------------------------------------------------------------------------------

    def _note(
        self, resource: str, identity: str, version: int, *, is_deleted: bool, is_watched: bool
    ) -> None:
        """Keep in mind what was deleted, and what the watch still owes."""
        if is_deleted:
            self._tombstones[identity] = self._clock()
            self.expectations.forget(resource, identity)
        elif is_watched:
            self.expectations.observe(resource, identity, version)
        else:
            self.expectations.expect(resource, identity, version)

    def _concerned(self, resource: str, raw: Raw) -> tuple[Key, ...]:
        metadata = raw["metadata"]
        namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        if resource == RUNS:
            return ((namespace, name),)
        owner = (metadata.get("labels") or {}).get(names.LABEL_RUN)
        keys = {(namespace, str(owner))} if owner else set()
        return (
            tuple(sorted(keys | self._index.users_of(namespace, name)))
            if resource == CLAIMS
            else tuple(keys)
        )

    def _find(self, resource: str, raw: Raw) -> Raw | None:
        metadata = raw["metadata"]
        key = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        if resource == RUNS:
            return self._runs.get(key)
        if resource == CLAIMS:
            return self._claims.get(key)
        owner = self._owner(raw)
        if resource == PODS:
            return self._pods.get(owner, {}).get(key[1])
        return self._children.get(owner, {}).get((str(raw.get("kind", "")), key[1]))

    def _store(self, resource: str, raw: Raw) -> None:
        metadata = raw["metadata"]
        key = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        if resource == RUNS:
            self._index.update(key, self._runs.get(key), raw)
            self._runs[key] = slim_run(raw)
        elif resource == CLAIMS:
            self._claims[key] = _slim(raw, ("spec", "status"))
        elif resource == PODS:
            self._pods.setdefault(self._owner(raw), {})[key[1]] = slim_pod(raw)
        else:
            self._children.setdefault(self._owner(raw), {})[
                str(raw.get("kind", "")), key[1]
            ] = _slim(raw, ("kind",))

    def _remove(self, resource: str, raw: Raw) -> None:
        metadata = raw["metadata"]
        self.expectations.forget(resource, str(metadata.get("uid", "")))
        key = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        if resource == RUNS:
            self._index.update(key, self._runs.pop(key, None), None)
        elif resource == CLAIMS:
            self._claims.pop(key, None)
        else:
            owner = self._owner(raw)
            groups: dict[Key, dict[Any, Raw]] = (
                self._pods if resource == PODS else self._children
            )
            group = groups.get(owner, {})
            group.pop(key[1] if resource == PODS else (str(raw.get("kind", "")), key[1]), None)
            if not group:
                groups.pop(owner, None)

    def _owner(self, raw: Raw) -> Key:
        metadata = raw["metadata"]
        return str(metadata.get("namespace", "")), str(
            (metadata.get("labels") or {}).get(names.LABEL_RUN, "")
        )

    def _all(self, resource: str) -> Iterator[Raw]:
        if resource == RUNS:
            yield from self._runs.values()
        elif resource == CLAIMS:
            yield from (
                raw
                for raw in self._claims.values()
                if names.LABEL_RUN in (raw["metadata"].get("labels") or {})
            )
        else:
            groups: Mapping[Key, Mapping[Any, Raw]] = (
                self._pods if resource == PODS else self._children
            )
            for group in groups.values():
                yield from group.values()

    def _forget_tombstones(self) -> None:
        oldest = self._clock() - _TOMBSTONE_SECONDS
        self._tombstones = {
            identity: since for identity, since in self._tombstones.items() if since >= oldest
        }


def _stand(raw: Raw) -> Any:
    """What runs whose folders overlap with a run's want to know of it."""
    status = raw.get("status") or {}
    return (
        (raw.get("spec") or {}).get("storage"),
        status.get("phase") == names.Phase.FAILED,
        "deletionTimestamp" in raw["metadata"],
    )


def slim_pod(raw: Raw) -> Raw:
    """What is ever read of a pod; the whole takes five times the memory."""
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    kept = {key: spec[key] for key in _POD_SPEC if key in spec}
    kept["containers"] = [
        {key: item[key] for key in ("name", "image") if key in item}
        for item in spec.get("containers") or ()
    ]
    seen = {key: value for key, value in status.items() if key not in _POD_STATUS_LEFT_OUT}
    return {"metadata": slim_metadata(raw), "spec": _share(kept), "status": _share(seen)}


def slim_run(raw: Raw) -> Raw:
    """A run without what only the API server and kubectl need."""
    return {
        **{key: raw[key] for key in raw if key != "metadata"},
        "metadata": slim_metadata(raw),
    }


def find_vanished(known: Iterable[Raw], listed: Iterable[Raw], *, version: int) -> list[Raw]:
    """Those of ``known`` that a list as of ``version`` lacks.

    What is newer than the list may have come since.
    """
    uids = {raw["metadata"].get("uid") for raw in listed}
    return [
        raw
        for raw in known
        if raw["metadata"].get("uid") not in uids and _version(raw["metadata"]) <= version
    ]


def slim_metadata(raw: Raw) -> Raw:
    """Metadata without managed fields and kubectl's copy of the object."""
    metadata = {
        key: value
        for key, value in raw["metadata"].items()
        if key not in ("managedFields", "ownerReferences", "selfLink")
    }
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {
            key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED
        }
    owners = raw["metadata"].get("ownerReferences")
    if owners:
        metadata["ownerReferences"] = owners
    return dict(_share(metadata))


def _slim(raw: Raw, keys: Sequence[str]) -> Raw:
    return {**{key: raw[key] for key in keys if key in raw}, "metadata": slim_metadata(raw)}


def _share(value: Any) -> Any:
    """The same value with one copy of every key and short text in the whole process."""
    if type(value) is str:
        return sys.intern(value) if len(value) < 40 else value
    if type(value) is dict or isinstance(value, Mapping):
        return {
            sys.intern(key) if type(key) is str else key: _share(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_share(item) for item in value]
    return value


def _version(metadata: Raw) -> int:
    """The resource version as a number; 0 where it is none, so that whatever comes later wins."""
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
