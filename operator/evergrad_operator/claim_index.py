"""An index of runs by the claim that they keep their files on, and of overlapping folders there."""

from collections.abc import Mapping
from typing import Any

from evergrad_operator.names import Key
from evergrad_operator.observe import find_place, overlap
from evergrad_operator.raw import get_map

Raw = Mapping[str, Any]


class ClaimIndex:
    """Runs by the claim that they name. A thousand runs in folders of their own do not concern each other."""

    def __init__(self) -> None:
        self._users: dict[Key, dict[Key, str]] = {}
        self._fetched_at: dict[Key, float] = {}

    def update(self, key: Key, old: Raw | None, new: Raw | None) -> Key | None:
        """Note that the run ``key``, which was ``old``, is now ``new``; None for a run that does
        not exist. Returns the claim that no run keeps files on any more, if there is one."""
        # A run may be edited to another claim while it is refused: it leaves the one and comes to the
        # other.
        before = claim_of(old) if old else None
        after = claim_of(new) if new else None
        unused: Key | None = None
        if before != after and before is not None:
            users = self._users.get((key[0], before), {})
            users.pop(key, None)
            # An index of claims without runs would grow for as long as the operator lives.
            if not users:
                unused = key[0], before
                self._users.pop(unused, None)
                self._fetched_at.pop(unused, None)
        if new is not None and after is not None:
            _, folder = find_place(new)
            users = self._users.setdefault((key[0], after), {})
            users[key] = folder
        return unused

    def note_fetched(self, namespace: str, claim: str, at: float) -> None:
        """Note that a claim was fetched, for as long as a run keeps its files on it."""
        if (namespace, claim) in self._users:
            self._fetched_at[namespace, claim] = at

    def fetched_at(self, namespace: str, claim: str) -> float:
        """Return when a claim was fetched last; long ago for one that was not."""
        return self._fetched_at.get((namespace, claim), float("-inf"))

    def users_of(self, namespace: str, claim: str) -> frozenset[Key]:
        """Return the runs that keep their files on this claim."""
        return frozenset(self._users.get((namespace, claim), ()))

    def neighbours_of(self, raw: Raw) -> tuple[Key, ...]:
        """Return other runs whose folders overlap with the run's."""
        claim, path = find_place(raw)
        metadata = raw["metadata"]
        key = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        users = self._users.get((key[0], claim), {})
        found = [
            user for user, other in users.items() if user != key and overlap(path, other)
        ]
        return tuple(sorted(found))


def claim_of(raw: Raw) -> str:
    """Return the claim that a raw run keeps its files on: the existing one it names, else its own."""
    return existing_claim(raw) or str(raw["metadata"]["name"])


def existing_claim(raw: Raw) -> str | None:
    """Return the existing claim that a raw run names; None for a claim of its own."""
    name = get_map(raw, "spec", "storage").get("claimName")
    return name if isinstance(name, str) else None
