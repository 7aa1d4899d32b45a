"""The operator's informer cache: runs, their pods, claims and other children as last seen. A hint, never
proof.

Watch events, answers of the API server to our own writes, and resync lists come in. Lists also prune it: a
watch that was restarted after 410 never shows what vanished meanwhile.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from evergrad_operator import names
from evergrad_operator.claim_index import ClaimIndex
from evergrad_operator.expectations import Expectations
from evergrad_operator.names import Key
from evergrad_operator.slim import Raw
from evergrad_operator.store import CLAIMS, PODS, RUNS, Store, place_of

_TOMBSTONE_SECONDS = 600.0
"""Time for which an object that was deleted is not taken in again from an answer that is older."""


class InformerCache:
    """The cluster as it looked when last heard of. Everything is kept by the run it belongs to."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tombstones: dict[str, float] = {}
        self.store = Store()
        self.claim_index = ClaimIndex()
        self.expectations = Expectations((RUNS, PODS), clock=clock)

    # ---- reading -------------------------------------------------------------------------------------------

    def run(self, key: Key) -> Raw | None:
        """Return the run, or None."""
        return self.store.runs.get(key)

    def runs(self) -> Mapping[Key, Raw]:
        """Return all runs."""
        return self.store.runs

    def pods(self, key: Key) -> Sequence[Raw]:
        """Return the run's pods, slimmed."""
        return self.store.pods(key)

    def claim(self, namespace: str, name: str) -> Raw | None:
        """Return the claim, or None if it does not exist or was never looked at."""
        return self.store.claims.get((namespace, name))

    def children(self, key: Key) -> Mapping[tuple[str, str], Raw]:
        """Return the run's other children by kind and name: metadata is all that is kept of them."""
        return self.store.children(key)

    def others(self, key: Key) -> Sequence[Raw]:
        """Return other runs whose folders on the same claim overlap with the run's."""
        raw, runs = self.run(key), self.store.runs
        return (
            tuple(runs[other] for other in self.claim_index.neighbours_of(raw)) if raw else ()
        )

    # ---- taking in -----------------------------------------------------------------------------------------

    def see(
        self, resource: str, raw: Raw, *, is_deleted: bool = False, is_watched: bool = False
    ) -> tuple[Key, ...]:
        """Take in one object, unless something newer is known; the runs it concerns.

        ``is_watched``: a watch has shown it; else it is an answer that the watch has yet to show.
        """
        metadata = raw.get("metadata") or {}
        identity, version = str(metadata.get("uid", "")), _version(metadata)

        # An answer may be read after the watch has shown the object's end.
        if identity in self._tombstones and not is_deleted:
            return ()
        if is_deleted:
            self._tombstones[identity] = self._clock()
            self.expectations.forget(resource, identity)
        elif is_watched:
            self.expectations.observe(resource, identity, version)
        else:
            self.expectations.expect(resource, identity, version)

        keys = self._concerned(resource, raw)
        known = self.store.find(resource, raw)
        is_same = known is not None and known["metadata"].get("uid") == identity
        if known is not None and not is_same and is_deleted:
            return ()  # the end of an object whose name a newer one has
        newest = 0 if known is None or not is_same else _version(known["metadata"])
        if not is_deleted and newest >= version > 0:
            # The watch shows a version that an answer of the API server has brought before: no news.
            return ()
        if known is not None and not is_same:
            self.expectations.forget(resource, str(known["metadata"].get("uid", "")))

        if is_deleted:
            self._remove(resource, raw)
        else:
            if resource == RUNS:
                self.claim_index.update(place_of(raw), known, raw)
            self.store.put(resource, raw)

        # Runs whose folders overlap with this one's wait for its end, or for its leaving the folder.
        if resource == RUNS and (
            known is None
            or not is_same
            or is_deleted
            or _what_neighbours_see(known) != _what_neighbours_see(raw)
        ):
            keys = (*keys, *self.claim_index.neighbours_of(raw))
        return keys

    def replace(
        self, resource: str, raws: Iterable[Raw], *, version: int, covers: Callable[[str], bool]
    ) -> set[Key]:
        """Take in a whole list that is as of ``version`` and drop what it lacks; the runs that this concerns.

        ``covers``: whether the list spans a namespace. Objects that are newer than the list stay.
        """
        raws = list(raws)
        changed: set[Key] = set()
        for raw in raws:
            identity = str(raw["metadata"].get("uid", ""))
            known = self.store.find(resource, raw)
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
        """Drop what a list as of ``version`` lacks; the runs that this concerns.

        Only metadata of what the list has are needed.
        """
        changed: set[Key] = set()
        for known in find_vanished(self.store.all(resource), raws, version=version):
            if covers(str(known["metadata"].get("namespace", ""))):
                changed.update(self._concerned(resource, known))
                if resource == RUNS:
                    changed.update(self.claim_index.neighbours_of(known))
                self._remove(resource, known)
        oldest = self._clock() - _TOMBSTONE_SECONDS
        self._tombstones = {
            identity: since for identity, since in self._tombstones.items() if since >= oldest
        }
        return changed

    def forget(self, resource: str, raw: Raw) -> None:
        """Drop an object that the API server does not know any more, unless its name has a new one by now."""
        known = self.store.find(resource, raw)
        if known is not None and known["metadata"].get("uid") == raw["metadata"].get("uid"):
            self._remove(resource, known)

    def _remove(self, resource: str, raw: Raw) -> None:
        self.expectations.forget(resource, str(raw["metadata"].get("uid", "")))
        if resource == RUNS:
            self.claim_index.update(place_of(raw), self.run(place_of(raw)), None)
        self.store.remove(resource, raw)

    def _concerned(self, resource: str, raw: Raw) -> tuple[Key, ...]:
        """Return the runs that have to look again when this object changes."""
        namespace, name = place_of(raw)
        if resource == RUNS:
            return ((namespace, name),)
        owner = (raw["metadata"].get("labels") or {}).get(names.LABEL_RUN)
        keys = {(namespace, str(owner))} if owner else set()
        if resource == CLAIMS:
            # All runs that keep their files on a claim wait for it, whoever made it.
            return tuple(sorted(keys | self.claim_index.users_of(namespace, name)))
        return tuple(keys)


def find_vanished(known: Iterable[Raw], listed: Iterable[Raw], *, version: int) -> list[Raw]:
    """Return those of ``known`` that a list as of ``version`` lacks.

    Objects that are newer than the list may have come since.
    """
    uids = {raw["metadata"].get("uid") for raw in listed}
    return [
        raw
        for raw in known
        if raw["metadata"].get("uid") not in uids and _version(raw["metadata"]) <= version
    ]


def _what_neighbours_see(raw: Raw) -> Any:
    """Return the parts of a run that decide about runs whose folders overlap with its own."""
    status = raw.get("status") or {}
    return (
        (raw.get("spec") or {}).get("storage"),
        status.get("phase") == names.Phase.FAILED,
        "deletionTimestamp" in raw["metadata"],
    )


def _version(metadata: Raw) -> int:
    """Return the resource version as a number; 0 where it is none, so that whatever comes later wins."""
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
