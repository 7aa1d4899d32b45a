"""Finds out which PodGroup the API server has, and remembers it for a bounded time."""

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from evergrad_operator.core.objects.kinds import POD_GROUP, POD_GROUPS, Kind
from evergrad_operator.edge.reconcile.apply import ApplyResult

FOUND_SECONDS: Final = 600.0
"""Time for which a PodGroup that was found is trusted: a cluster's upgrade may bring a newer version."""
MISSING_SECONDS: Final = 60.0
"""Time for which a missing PodGroup is not asked for again: somebody may install it at any moment, and
all runs of the installation wait for the same answer."""


class Discovery(Protocol):
    """The part of the API server that tells which kinds it has."""

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server has this kind in this version. Raises ApiError."""


class GangApi:
    """The PodGroup of an installation's kind of gang. ``clock``: seconds of any origin."""

    def __init__(
        self,
        discovery: Discovery,
        gang: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discovery = discovery
        self._kinds = POD_GROUPS.get(gang, ())
        self._clock = clock
        self.known: Kind | None = None
        """The PodGroup that was found last."""
        self._good_until = float("-inf")

    async def find(self) -> Kind | None:
        """Return the PodGroup in the newest version that the API server has, None where it has none.

        Raises ApiError.
        """
        if not self._kinds or self._clock() < self._good_until:
            return self.known
        found = None
        for kind in self._kinds:
            if found is None and await self._discovery.serves(kind):
                found = kind
        self.known = found
        self._good_until = self._clock() + (
            MISSING_SECONDS if found is None else FOUND_SECONDS
        )
        return found

    @property
    def group(self) -> str:
        """The API group of the PodGroup, empty for an installation without gangs."""
        return self._kinds[0].version.partition("/")[0] if self._kinds else ""

    def forget(self) -> None:
        """Ask again the next time: the API server has not got the PodGroup that is remembered."""
        self._good_until = float("-inf")

    def note(self, results: Iterable[ApplyResult]) -> None:
        """Ask again at the next pass where the API server no longer has the PodGroup that is remembered."""
        for result in results:
            failure = result.failure
            is_group = result.step[:2] == ("apply", POD_GROUP)
            if is_group and failure is not None and failure.status == 404:
                self.forget()
