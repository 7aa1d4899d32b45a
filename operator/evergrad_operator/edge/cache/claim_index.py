"""An index of runs by the claims that they name, and of overlapping folders on a claim."""

from collections.abc import Mapping
from typing import Any

from evergrad_manifest.model.claims import claims_of
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map
from evergrad_operator.core.observe.observe import find_place, overlap

Raw = Mapping[str, Any]


class ClaimIndex:
    """Runs by the claims that they name.

    A run *keeps its files* on one claim (``spec.storage``) and may *mount* others (volumes of its template or
    its profile). In both cases it is a user of the claim, whose data must not be deleted with another run.

    Runs on one claim affect each other only if their folders overlap. For example, a thousand runs in
    separate folders do not.
    """

    def __init__(self) -> None:
        self._keepers: dict[Key, dict[Key, str]] = {}
        self._mounters: dict[Key, set[Key]] = {}
        self._fetched_at: dict[Key, float] = {}

    def update(self, key: Key, old: Raw | None, new: Raw | None) -> Key | None:
        """Record that the run ``key``, which was ``old``, is now ``new``; None if the run does not exist.

        Returns the claim on which no run keeps files any more, or None.
        """
        # While a run is refused, its claim may be edited. Remove it from the old claim and add it to the new
        # one.
        claims_before = claims_of(old) if old else None
        claims_after = claims_of(new) if new else None
        self._note_mounts(
            key,
            claims_before.mounted if claims_before else (),
            claims_after.mounted if claims_after else (),
        )
        before = claims_before.storage if claims_before else None
        after = claims_after.storage if claims_after else None
        unused: Key | None = None
        if before != after and before is not None:
            keepers = self._keepers.get((key[0], before), {})
            keepers.pop(key, None)
            # Drop claims without runs, or the index would grow while the operator runs.
            if not keepers:
                unused = key[0], before
                self._keepers.pop(unused, None)
                self._fetched_at.pop(unused, None)
        if new is not None and after is not None:
            _, folder = find_place(new)
            keepers = self._keepers.setdefault((key[0], after), {})
            keepers[key] = folder
        return unused

    def _note_mounts(
        self, key: Key, before: tuple[str, ...], after: tuple[str, ...]
    ) -> None:
        for name in set(before) - set(after):
            mounters = self._mounters.get((key[0], name), set())
            mounters.discard(key)
            if not mounters:
                self._mounters.pop((key[0], name), None)
        for name in after:
            self._mounters.setdefault((key[0], name), set()).add(key)

    def note_fetched(self, namespace: str, claim: str, at: float) -> None:
        """Record the time of a claim's last fetch. It is kept while a run keeps its files on the claim."""
        if (namespace, claim) in self._keepers:
            self._fetched_at[namespace, claim] = at

    def fetched_at(self, namespace: str, claim: str) -> float:
        """Return the time of a claim's last fetch; -inf if it was not fetched."""
        return self._fetched_at.get((namespace, claim), float("-inf"))

    def keepers_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """Return the runs that keep their files on this claim."""
        return frozenset(self._keepers.get((namespace, claim), ()))

    def users_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """Return the runs that keep their files on this claim or mount it."""
        mounters = self._mounters.get((namespace, claim), ())
        return self.keepers_of(namespace, claim).union(mounters)

    def owners_of_mounts(self, raw: Raw) -> tuple[Key, ...]:
        """Return the runs whose own claims the run mounts.

        Such a claim is deleted with its own run only if no other run uses it.
        """
        # Only a claim with the name of its own run can have an owner.
        namespace = str(raw["metadata"].get("namespace", ""))
        keys = ((namespace, name) for name in claims_of(raw).mounted)
        return tuple(key for key in keys if key in self._keepers.get(key, ()))

    def neighbours_of(self, raw: Raw) -> tuple[Key, ...]:
        """Return the other runs whose folders overlap with the run's folder."""
        claim, path = find_place(raw)
        metadata = raw["metadata"]
        key = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        keepers = self._keepers.get((key[0], claim), {})
        found = [
            keeper
            for keeper, other in keepers.items()
            if keeper != key and overlap(path, other)
        ]
        return tuple(sorted(found))


def existing_claim(raw: Raw) -> str | None:
    """Return the existing claim that a raw run names, or None if the run has its own claim."""
    name = get_map(raw, "spec", "storage").get("claimName")
    return name if isinstance(name, str) else None
