"""An index of runs by the claims that they name, and of overlapping folders on a claim."""

from collections.abc import Mapping
from typing import Any

from evergrad_manifest.model.claims import claims_of
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map
from evergrad_operator.core.observe.observe import find_place, overlap

Raw = Mapping[str, Any]


class ClaimIndex:
    """Runs by the claims that they name. A thousand runs in folders of their own do not concern each other.

    A run *keeps its files* on one claim (``spec.storage``) and may *mount* others (volumes of its template or
    its profile). Both are users of a claim: its data must not go with another run.
    """

    def __init__(self) -> None:
        self._keepers: dict[Key, dict[Key, str]] = {}
        self._mounters: dict[Key, set[Key]] = {}
        self._fetched_at: dict[Key, float] = {}

    def update(self, key: Key, old: Raw | None, new: Raw | None) -> Key | None:
        """Note that the run ``key``, which was ``old``, is now ``new``; None for a run that does
        not exist. Returns the claim that no run keeps files on any more, if there is one."""
        # A run may be edited to another claim while it is refused: it leaves the one and comes to the
        # other.
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
            # An index of claims without runs would grow for as long as the operator lives.
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
        """Note that a claim was fetched, for as long as a run keeps its files on it."""
        if (namespace, claim) in self._keepers:
            self._fetched_at[namespace, claim] = at

    def fetched_at(self, namespace: str, claim: str) -> float:
        """Return when a claim was fetched last; long ago for one that was not."""
        return self._fetched_at.get((namespace, claim), float("-inf"))

    def keepers_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """Return the runs that keep their files on this claim."""
        return frozenset(self._keepers.get((namespace, claim), ()))

    def users_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """Return the runs that name this claim: they keep their files on it, or mount it."""
        mounters = self._mounters.get((namespace, claim), ())
        return self.keepers_of(namespace, claim).union(mounters)

    def owners_of_mounts(self, raw: Raw) -> tuple[Key, ...]:
        """Return the runs whose own claims the run mounts: whether such a claim goes with its run depends on
        who else uses it."""
        # Only a claim of the run of its name can have an owner.
        namespace = str(raw["metadata"].get("namespace", ""))
        keys = ((namespace, name) for name in claims_of(raw).mounted)
        return tuple(key for key in keys if key in self._keepers.get(key, ()))

    def neighbours_of(self, raw: Raw) -> tuple[Key, ...]:
        """Return other runs whose folders overlap with the run's."""
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
    """Return the existing claim that a raw run names; None for a claim of its own."""
    name = get_map(raw, "spec", "storage").get("claimName")
    return name if isinstance(name, str) else None
