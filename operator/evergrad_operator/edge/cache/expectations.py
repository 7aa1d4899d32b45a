"""Expectations: versions that the API server has answered and a watch has yet to show; their age is the delay
of the watch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

Object = tuple[str, str]
"""Resource and uid."""


@dataclass(frozen=True)
class Expectation:
    """A version of one object that its watch owes, and since when (the clock of ``Expectations``)."""

    version: int
    since: float


class Expectations:
    """The versions that the watches of ``resources`` owe; one that a watch has already shown is not owed.

    An answer may come before or after the watch event of the same change: a LIST that shows nothing new, an
    apply that changes nothing and an answer that is read late must leave no mark, or the watch counts as
    behind for ever.
    """

    def __init__(self, resources: Collection[str], *, clock: Callable[[], float]) -> None:
        self._resources, self._clock = frozenset(resources), clock
        self._shown: dict[Object, int] = {}
        self._expected: dict[Object, Expectation] = {}

    def expect(self, resource: str, uid: str, version: int) -> None:
        """Note that the API server has answered this version.

        The oldest version that is owed counts: a watch that shows nothing at all is late by the first one,
        however many follow.
        """
        # An answer may be read after the watch has shown its version.
        known = resource, uid
        if (
            resource in self._resources
            and self._shown.get(known, 0) < version
            and known not in self._expected
        ):
            self._expected[known] = Expectation(version, self._clock())

    def observe(self, resource: str, uid: str, version: int) -> None:
        """Note that the watch has shown this version, and all that are older."""
        if resource not in self._resources:
            return
        known = resource, uid
        self._shown[known] = newest = max(version, self._shown.get(known, 0))
        expected = self._expected.get(known)
        if expected is not None and expected.version <= newest:
            del self._expected[known]

    def forget(self, resource: str, uid: str) -> None:
        """Expect nothing more of an object that is gone."""
        self._shown.pop((resource, uid), None)
        self._expected.pop((resource, uid), None)

    def restart(self) -> None:
        """Count the age of all that is owed from now: nothing could be shown before, as in an outage."""
        now = self._clock()
        self._expected = {
            known: replace(expected, since=now)
            for known, expected in self._expected.items()
        }

    def lag(self) -> Mapping[str, float]:
        """Return the seconds that the watch of each resource is behind; 0 when it owes nothing."""
        now = self._clock()
        # Each watch is as far behind as its oldest debt.
        ages = dict.fromkeys(sorted(self._resources), 0.0)
        for (resource, _), expected in self._expected.items():
            ages[resource] = max(ages[resource], now - expected.since)
        return ages
