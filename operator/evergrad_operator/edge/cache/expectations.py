"""Expectations: versions that an answer of the API server has shown, but a watch has not shown yet.

The age of the oldest expectation is the delay of the watch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

Object = tuple[str, str]
"""Resource and uid."""


@dataclass(frozen=True)
class Expectation:
    """A version of one object that its watch has yet to show. ``since``: on the clock of ``Expectations``."""

    version: int
    since: float


class Expectations:
    """The versions that the watches of ``resources`` have yet to show.

    An answer may arrive before or after the watch event of the same change. A LIST without new versions, an
    apply without a change, and an answer that is read late must not add an expectation. Otherwise the watch
    would count as delayed forever.
    """

    def __init__(self, resources: Collection[str], *, clock: Callable[[], float]) -> None:
        self._resources, self._clock = frozenset(resources), clock
        self._shown: dict[Object, int] = {}
        self._expected: dict[Object, Expectation] = {}

    def expect(self, resource: str, uid: str, version: int) -> None:
        """Record that an answer of the API server has shown this version.

        The oldest expected version of an object is kept. If a watch shows nothing at all, its delay therefore
        counts from the first version.
        """
        # Do not expect a version that the watch has already shown, because an answer may be read late.
        known = resource, uid
        if (
            resource in self._resources
            and self._shown.get(known, 0) < version
            and known not in self._expected
        ):
            self._expected[known] = Expectation(version, self._clock())

    def observe(self, resource: str, uid: str, version: int) -> None:
        """Record that the watch has shown this version, and therefore all older versions."""
        if resource not in self._resources:
            return
        known = resource, uid
        self._shown[known] = newest = max(version, self._shown.get(known, 0))
        expected = self._expected.get(known)
        if expected is not None and expected.version <= newest:
            del self._expected[known]

    def forget(self, resource: str, uid: str) -> None:
        """Drop the expectations of an object that is gone."""
        self._shown.pop((resource, uid), None)
        self._expected.pop((resource, uid), None)

    def restart(self) -> None:
        """Count the age of all expectations from now, because no event could arrive during an outage."""
        now = self._clock()
        self._expected = {
            known: replace(expected, since=now)
            for known, expected in self._expected.items()
        }

    def lag(self) -> Mapping[str, float]:
        """Return the delay of each resource's watch in seconds; 0 if it has shown all versions."""
        now = self._clock()
        # The delay of a watch is the age of its oldest expectation.
        ages = dict.fromkeys(sorted(self._resources), 0.0)
        for (resource, _), expected in self._expected.items():
            ages[resource] = max(ages[resource], now - expected.since)
        return ages
