"""The operator's informer cache: runs, their pods, claims and other children, as last seen.

The cache may be out of date. It takes in watch events, answers of the API server to our own writes, and
resync lists. Lists also remove objects: a watch that is restarted after 410 never reports the objects that
were deleted in between.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from evergrad_manifest.model.claims import claims_of
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.objects.slim import Raw, slim_pod
from evergrad_operator.edge.cache.claim_index import ClaimIndex
from evergrad_operator.edge.cache.expectations import Expectations
from evergrad_operator.edge.cache.host_index import HostIndex
from evergrad_operator.edge.cache.store import (
    CLAIMS,
    PODS,
    RUNS,
    GonePods,
    ObjectStore,
    place_of,
    uid_of,
)

log = logging.getLogger(__name__)
NEW_POD_STATUS: Final = {"phase": "Pending"}
"""Status of a pod of which only the answer to its creation is known."""
_NOT_TAKEN: Final = (
    "%s %s/%s: cannot be read, so its last known version is used. This is a defect of the operator; "
    "please report it, with the object"
)
_NOT_SHOWN: Final = (
    "%s/%s: its metrics cannot be read, and are left out. This is a defect of the operator; please report "
    "it, with the run's status"
)
_VERSION_DIGITS: Final = 20
_TOMBSTONE_SECONDS = 600.0
"""Seconds for which an older answer cannot restore a deleted object."""


class InformerCache:
    """The cluster as last seen. Each object is stored under the run that it belongs to."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tombstones: dict[str, tuple[float, int]] = {}
        """Time and resource version of the deletion of each deleted object, by uid."""
        self._gone = GonePods()
        self.store = ObjectStore()
        self.claim_index = ClaimIndex()
        self.host_index = HostIndex()
        self.expectations = Expectations((RUNS, PODS), clock=clock)
        self.on_defect: Callable[[str], None] = lambda resource: None
        """Called with the resource of an object that could not be added because of a defect."""

        def note_unreadable(key: Key, error: Exception) -> None:
            self.on_defect(RUNS)
            log.error(_NOT_SHOWN, *key, exc_info=error)

        self.store.facts.on_defect = note_unreadable

    # ---- reading -------------------------------------------------------------------------------------------

    def run(self, key: Key) -> Raw | None:
        """Return the run, or None if it is not in the cache."""
        return self.store.runs.get(key)

    def runs(self) -> Mapping[Key, Raw]:
        """Return all runs."""
        return self.store.runs

    def pods(self, key: Key) -> Sequence[Raw]:
        """Return the run's pods, reduced to the fields that are used."""
        return self.store.pods(key)

    def gone(self, key: Key) -> Sequence[tuple[Raw, float]]:
        """Return the last states of the run's recently deleted pods, and the seconds since their deletion."""
        return self._gone.find(key, self._clock())

    def drop_gone(self, key: Key, uids: Iterable[str]) -> None:
        """Drop these deleted pods, because a status that counts their time has been written."""
        self._gone.drop(key, uids)

    def claim(self, namespace: str, name: str) -> Raw | None:
        """Return the claim, or None if it does not exist or was never fetched."""
        return self.store.claims.get((namespace, name))

    def children(self, key: Key) -> Mapping[tuple[str, str], Raw]:
        """Return the run's other children by kind and name. Only their metadata is kept."""
        return self.store.children(key)

    def others(self, key: Key) -> Sequence[Raw]:
        """Return other runs whose folders on the same claim overlap with the run's."""
        raw = self.run(key)
        runs = self.store.runs
        if raw is None:
            return ()
        return tuple(runs[other] for other in self.claim_index.neighbours_of(raw))

    # ---- updates -------------------------------------------------------------------------------------------

    def see(
        self,
        resource: str,
        raw: Raw,
        *,
        is_deleted: bool = False,
        is_watched: bool = False,
    ) -> tuple[Key, ...]:
        """Add one object, unless a newer version is known. Returns the runs that must be reconciled.

        ``is_watched``: whether the object comes from a watch event. Otherwise it comes from an answer, and
        the watch has yet to show its version.
        """
        metadata = raw.get("metadata") or {}
        identity = str(metadata.get("uid", ""))
        version = _version(metadata)

        # An answer may be read after the watch has reported the object's deletion. If the answer is not older
        # than the deletion, the object exists: a watch with a label selector also reports a deletion if the
        # object loses the label.
        if not is_deleted and identity in self._tombstones:
            _, end = self._tombstones[identity]
            if version < end:
                return ()
            del self._tombstones[identity]

        # Update the expectations before any comparison, because a version that is already known is no longer
        # expected either.
        if is_deleted:
            self._tombstones[identity] = (self._clock(), version)
            self.expectations.forget(resource, identity)
        elif is_watched:
            self.expectations.observe(resource, identity, version)
        else:
            self.expectations.expect(resource, identity, version)

        keys = self._concerned(resource, raw)
        known = self.store.find(resource, raw)
        is_same = known is not None and uid_of(known) == identity
        if known is not None and not _is_news(known, raw, is_deleted=is_deleted):
            # No watch will ever show this version if it belongs to an older object of the same name.
            if not is_same:
                self.expectations.forget(resource, identity)
            return ()
        if known is not None and not is_same:
            self.expectations.forget(resource, uid_of(known))

        if is_deleted:
            self._remove(resource, raw)
        else:
            if resource == RUNS:
                self._index_run(place_of(raw), known, raw)
            if resource != CLAIMS or self._is_followed(raw):
                self.store.put(resource, raw)

        # Runs whose folders overlap with this run's folder wait until it ends or uses another folder.
        if resource != RUNS:
            return keys
        before = known if is_same and not is_deleted else None
        if before is not None and _what_neighbours_see(before) == _what_neighbours_see(raw):
            return keys
        # A claim that this run mounts or mounted may be deleted with its own run, so that run is affected.
        owners = dict.fromkeys(
            key
            for one in (before, raw)
            if one is not None
            for key in self.claim_index.owners_of_mounts(one)
        )
        return (*keys, *self.claim_index.neighbours_of(raw), *owners)

    def take(
        self,
        resource: str,
        raw: Raw,
        *,
        is_deleted: bool = False,
        is_watched: bool = False,
    ) -> tuple[Key, ...]:
        """Add one object as ``see`` does, but skip the object if this fails.

        Watches and lists contain the objects of all runs, and none of them may end the operator.
        """
        try:
            return self.see(resource, raw, is_deleted=is_deleted, is_watched=is_watched)
        except Exception:
            self.on_defect(resource)
            log.exception(_NOT_TAKEN, resource, *place_of(raw))
            return ()

    def take_page(self, resource: str, raws: Iterable[Raw]) -> set[Key]:
        """Add a page of a list, and return the runs that must be reconciled."""
        changed: set[Key] = set()
        for raw in raws:
            # Skip known versions: if they were added again, they would be expected from the watch, which has
            # already shown them.
            known = self.store.find(resource, raw)
            if (
                known is None
                or uid_of(known) != uid_of(raw)
                or _version(known["metadata"]) < _version(raw["metadata"])
            ):
                changed.update(self.take(resource, raw))
        return changed

    def replace(
        self,
        resource: str,
        raws: Iterable[Raw],
        *,
        version: int,
        covers: Callable[[str], bool],
    ) -> set[Key]:
        """Add a complete list as of ``version``, and drop the objects that are not in it.

        ``covers`` returns whether the list includes a namespace. Objects that are newer than the list stay.
        Returns the runs that must be reconciled.
        """
        raws = list(raws)
        changed = self.take_page(resource, raws)
        listed = {uid_of(raw) for raw in raws}
        return changed | self.prune(resource, listed, version=version, covers=covers)

    def prune(
        self,
        resource: str,
        listed: Collection[str],
        *,
        version: int,
        covers: Callable[[str], bool],
    ) -> set[Key]:
        """Drop the objects that are not in a list as of ``version``.

        ``listed``: uids of the objects in the list. Returns the runs that must be reconciled.
        """
        changed: set[Key] = set()
        for known in find_vanished(self.store.all(resource), listed, version=version):
            if not covers(str(known["metadata"].get("namespace", ""))):
                continue
            changed.update(self._concerned(resource, known))
            # Find the runs with overlapping folders before the run is removed from the index.
            if resource == RUNS:
                changed.update(self.claim_index.neighbours_of(known))
                changed.update(self.claim_index.owners_of_mounts(known))
            self._remove(resource, known)
            # The answer to an older list may still arrive, and would restore the object.
            identity = uid_of(known)
            self._tombstones[identity] = (self._clock(), version)

        # Drop old tombstones with every list, at the latest at a resync, or they would accumulate forever.
        oldest = self._clock() - _TOMBSTONE_SECONDS
        self._tombstones = {
            identity: (since, end)
            for identity, (since, end) in self._tombstones.items()
            if since >= oldest
        }
        return changed

    def forget(self, resource: str, raw: Raw) -> None:
        """Drop an object that the API server no longer has, unless another object has its name now."""
        known = self.store.find(resource, raw)
        if known is None:
            return
        if uid_of(known) == uid_of(raw):
            self._remove(resource, known)

    def _remove(self, resource: str, raw: Raw) -> None:
        self.expectations.forget(resource, uid_of(raw))
        if resource == RUNS:
            place = place_of(raw)
            self._index_run(place, self.run(place), None)
        self.store.remove(resource, raw)
        if resource == PODS:
            self._gone.note(raw, self._clock())

    def _index_run(self, place: Key, old: Raw | None, new: Raw | None) -> None:
        """Update the indexes for a run, which was ``old`` and is now ``new``."""
        unused = self.claim_index.update(place, old, new)
        self.host_index.update(place, new)
        claim = None if unused is None else self.store.claims.get(unused)
        if claim is not None and not self._is_followed(claim):
            self.store.remove(CLAIMS, claim)

    def _is_followed(self, claim: Raw) -> bool:
        """Return whether a claim is kept.

        A claim without our label is kept only while a run uses it, because no watch and no list reports its
        deletion.
        """
        is_labelled = names.LABEL_RUN in get_map(claim, "metadata", "labels")
        return is_labelled or bool(self.claim_index.keepers_of(*place_of(claim)))

    def _concerned(self, resource: str, raw: Raw) -> tuple[Key, ...]:
        """Return the runs that must be reconciled when this object changes."""
        namespace, name = place_of(raw)
        if resource == RUNS:
            return ((namespace, name),)
        owner = get_text(get_map(raw, "metadata", "labels"), names.LABEL_RUN)
        keys = {(namespace, owner)} if owner else set()
        if resource == CLAIMS:
            # All runs that keep their files on a claim wait for it, even if a user has created it.
            return tuple(sorted(keys | self.claim_index.keepers_of(namespace, name)))
        return tuple(keys)


def find_vanished(
    known: Iterable[Raw],
    listed: Collection[str],
    *,
    version: int,
) -> list[Raw]:
    """Return the objects of ``known`` that are missing in a list as of ``version``.

    ``listed``: uids of the objects in the list. Objects that are newer than the list are not returned,
    because they may have been created after it.
    """
    return [
        raw
        for raw in known
        if uid_of(raw) not in listed and _version(raw["metadata"]) <= version
    ]


def _is_news(known: Raw, raw: Raw, *, is_deleted: bool) -> bool:
    """Return whether an object, or its deletion, is newer than the known object of its name."""
    version = _version(raw["metadata"])
    newest = _version(known["metadata"])
    if uid_of(known) == uid_of(raw):
        # The watch often shows a version that an answer of the API server has already delivered. But the
        # answer to a pod's creation has only metadata. Fields that admission added, such as a queue's gate,
        # arrive with the watch event of the same version, and no event follows until the gate is removed.
        is_brief = version == newest and known.get("status") == NEW_POD_STATUS
        is_fuller = is_brief and slim_pod(raw)["status"] != NEW_POD_STATUS
        return is_deleted or version > newest or version == 0 or is_fuller
    # Two objects had this name one after the other. The deletion or a version of the older may arrive late.
    return not is_deleted and (version >= newest or version == 0)


def _what_neighbours_see(raw: Raw) -> Any:
    """Return the parts of a run that affect runs whose folders overlap with its folder."""
    status = get_map(raw, "status")
    return (
        get_map(raw, "spec").get("storage"),
        claims_of(raw),
        status.get("phase") == names.Phase.FAILED,
        "deletionTimestamp" in raw["metadata"],
    )


def _version(metadata: Raw) -> int:
    """Return the resource version as a number; 0 if it is not a valid number, so that any other one wins."""
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else 0
