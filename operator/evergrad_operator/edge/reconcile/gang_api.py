"""Discovers which PodGroup version the API server serves, and caches it for a bounded time."""

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from evergrad_operator.core.objects.kinds import POD_GROUP, POD_GROUPS, Kind
from evergrad_operator.edge.reconcile.apply import ApplyResult

FOUND_SECONDS: Final = 600.0
"""Seconds for which a found PodGroup is cached. An upgrade of the cluster may add a newer version."""
MISSING_SECONDS: Final = 60.0
"""Seconds for which a missing PodGroup is cached.

It is shorter than ``FOUND_SECONDS``, because an administrator may install the CRD at any time and all runs of
the installation wait for it.
"""


class Discovery(Protocol):
    """The discovery requests to the API server that this module needs."""

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server has this kind in this version. Raises ApiError."""


class GangApi:
    """The PodGroup of an installation's kind of gang. ``clock`` returns seconds from any origin."""

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
        """Return the PodGroup in the newest version that the API server serves, or None if it serves none.

        Raises ApiError if discovery fails.
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
        """The API group of the PodGroup, or "" for an installation without gangs."""
        return self._kinds[0].version.partition("/")[0] if self._kinds else ""

    def forget(self) -> None:
        """Repeat the discovery at the next ``find``, for example because the cached PodGroup is gone."""
        self._good_until = float("-inf")

    def note(self, results: Iterable[ApplyResult]) -> None:
        """Repeat the discovery at the next ``find`` if an apply of the PodGroup was refused with 404."""
        for result in results:
            failure = result.failure
            is_group = result.step[:2] == ("apply", POD_GROUP)
            if is_group and failure is not None and failure.status == 404:
                self.forget()
