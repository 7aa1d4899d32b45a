"""Synchronizes the informer cache with the cluster by watch events, periodic lists, and lists after gaps."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    NETWORK_POLICY,
    POD,
    RUN,
    SERVICE,
    Kind,
    Raw,
)
from evergrad_operator.core.objects.names import LABEL_RUN, Key
from evergrad_operator.edge.api.kube import Kube
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS, RUNS, uid_of

log = logging.getLogger(__name__)
PRUNE_SECONDS: Final = 10.0
"""Minimum seconds between two searches for objects that were deleted during gaps of watches.

kopf delivers the objects of one list over some time. Without a pause, each of them would cause a search,
which lists everything.
"""
_LATE_SECONDS: Final = 30.0
"""Delay of a watch, in seconds, after which the expected version may belong to a deleted object."""
_WATCHED: Final = (
    (RUNS, RUN, ""),
    (PODS, POD, LABEL_RUN),
    (CLAIMS, CLAIM, LABEL_RUN),
)
"""Resource, kind and label selector of each watch of kopf."""
_CHILDREN: Final = (CONFIG_MAP, SERVICE, BUDGET, NETWORK_POLICY)
"""Kinds of children to list. Disabled kinds are included, because older children must be deleted."""


class CacheSync:
    """Adds events and lists to the cache, and adds the affected runs to the queue."""

    def __init__(
        self,
        kube: Kube,
        *,
        cache: InformerCache,
        queue: WorkQueue[Key],
        scopes: Sequence[str | None],
        resync_seconds: float,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._queue = queue
        self._scopes = scopes
        self._resync_seconds = resync_seconds
        self._is_listed_anew = asyncio.Event()
        self.find_pod_group: Callable[[], Awaitable[Kind | None]] | None = None
        """Returns the kind of PodGroup that the API server serves, or None. It is None without gangs."""
        self.on_event: Callable[[str], None] = lambda resource: None
        """Called for every event of a watch, with the watch's resource."""

    def take(self, resource: str, raw: Raw, kind: str | None) -> None:
        """Handle one event of a watch.

        ``kind``: type of the event, or None for an object of a list, which kopf makes at the start and after
        a gap.
        """
        self.on_event(resource)
        if kind is None:
            self.expect_gap()
        is_deleted = kind == "DELETED"
        concerned = self._cache.take(resource, raw, is_deleted=is_deleted, is_watched=True)
        self._add(concerned)

    def expect_gap(self) -> None:
        """Request a search, because objects may have been deleted without an event."""
        self._is_listed_anew.set()

    async def resync(self) -> None:
        """List everything, add objects that the watches missed, and drop deleted objects. Raises ApiError."""
        # Without gangs there is no kind of group to list.
        group = None if self.find_pod_group is None else await self.find_pod_group()
        children = _CHILDREN if group is None else (*_CHILDREN, group)
        for scope in self._scopes:
            covers = partial(_is_within, scope)
            changed: set[Key] = set()
            for resource, kind, selector in _WATCHED:
                listed: set[str] = set()
                pages = self._kube.list_pages(kind, scope, selector=selector)
                version = await self._take_pages(resource, pages, listed, changed)
                changed |= self._cache.prune(
                    resource, listed, version=version, covers=covers
                )

            # All kinds of children are one resource of the cache, so compare with one combined list. Its
            # version is the version of its oldest part.
            listed = set()
            versions = []
            for kind in children:
                pages = self._kube.list_pages(
                    kind, scope, selector=LABEL_RUN, metadata_only=True
                )
                versions.append(await self._take_pages(CHILDREN, pages, listed, changed))
            changed |= self._cache.prune(
                CHILDREN, listed, version=min(versions), covers=covers
            )
            self._add(changed)

    async def _take_pages(
        self,
        resource: str,
        pages: AsyncIterator[tuple[list[Raw], int]],
        listed: set[str],
        changed: set[Key],
    ) -> int:
        """Add a list page by page, so that only one page of complete objects is in memory.

        Adds the uids of the objects to ``listed``, and the affected runs to ``changed``. Returns the resource
        version of the list.
        """
        version = 0
        async for page, as_of in pages:
            listed.update(map(uid_of, page))
            changed |= self._cache.take_page(resource, page)
            version = as_of
            del page
        return version

    async def keep_synced(self) -> None:
        """Resync periodically. Never returns."""
        while True:
            # Add jitter, so that operators that started together do not list everything at the same time.
            await asyncio.sleep(self._resync_seconds * random.uniform(0.9, 1.1))
            try:
                await self.resync()
            except ApiError as error:
                log.warning("the resync is postponed: %s", error)

            # Reconcile every run once in each period. Spread the passes over a quarter of the period, so that
            # the queue does not get all runs at once.
            for key in self._cache.store.known():
                after = random.uniform(0.0, self._resync_seconds / 4)
                self._queue.add(key, after=after)

    async def keep_pruned(self) -> None:
        """Drop objects that were deleted during a gap of a watch or before its start. Never returns.

        After a gap, kopf lists again and delivers only the remaining objects. All resources are searched
        after any list, because an empty list delivers no event.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_SECONDS):
                    await self._is_listed_anew.wait()

            # A watch may also be silent without a new list. Then its expectations become old.
            is_late = max(self._cache.expectations.lag().values()) > _LATE_SECONDS
            if not self._is_listed_anew.is_set() and not is_late:
                continue

            # Clear the flag before the lists: a later event may belong to a newer gap, which these lists do
            # not cover.
            self._is_listed_anew.clear()
            try:
                for scope in self._scopes:
                    covers = partial(_is_within, scope)
                    for resource, kind, selector in _WATCHED:
                        listed: set[str] = set()
                        version = 0
                        async for page, as_of in self._kube.list_pages(
                            kind, scope, selector=selector, metadata_only=True
                        ):
                            listed.update(map(uid_of, page))
                            version = as_of
                            del page
                        gone = self._cache.prune(
                            resource,
                            listed,
                            version=version,
                            covers=covers,
                        )
                        self._add(gone)
            except ApiError as error:
                log.warning(
                    "the search for objects that were deleted during a gap of a watch is postponed: %s",
                    error,
                )
                self._is_listed_anew.set()
            await asyncio.sleep(PRUNE_SECONDS)

    def _add(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._queue.add(key)


def _is_within(scope: str | None, namespace: str) -> bool:
    return scope in (None, namespace)
