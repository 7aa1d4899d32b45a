"""Keeps the informer cache in step with the cluster: watch events, lists of everything, gaps of a watch."""

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
"""Time between two searches for objects that vanished in gaps of watches. kopf shows the objects of one list
over some time, and a search for each of them would list everything as often."""
_LATE_SECONDS: Final = 30.0
"""A watch that has owed a version for this long may owe it for an object that is gone."""
_WATCHED: Final = (
    (RUNS, RUN, ""),
    (PODS, POD, LABEL_RUN),
    (CLAIMS, CLAIM, LABEL_RUN),
)
"""Resource, kind and label selector of each watch of kopf's."""
_CHILDREN: Final = (CONFIG_MAP, SERVICE, BUDGET, NETWORK_POLICY)
"""Kinds that are switched off are listed, too: children from before are to be deleted."""


class CacheSync:
    """Brings news into the cache, and the runs that the news concern into the queue."""

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
        """Finds the kind of a run's PodGroup, None where there is none."""
        self.on_event: Callable[[str], None] = lambda resource: None
        """Called for every event of a watch, with the watch's resource."""

    def take(self, resource: str, raw: Raw, kind: str | None) -> None:
        """Take in one event of a watch. ``kind`` is None where kopf has listed anew, at the start and after a
        gap."""
        self.on_event(resource)
        if kind is None:
            self.expect_gap()
        is_deleted = kind == "DELETED"
        concerned = self._cache.take(resource, raw, is_deleted=is_deleted, is_watched=True)
        self._add(concerned)

    def expect_gap(self) -> None:
        """Note that something may have vanished unseen."""
        self._is_listed_anew.set()

    async def resync(self) -> None:
        """List everything, take in what the watches lost, and drop what is gone. Raises ApiError."""
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

            # All kinds of children are one resource of the cache, so that one list of them all is compared.
            # It is as old as its oldest part.
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
        """Take in a list page by page, so that only one page is held unslimmed.

        The uids of its objects are added to ``listed``, and the runs that they concern to ``changed``.
        Returns the version that the list is as of.
        """
        version = 0
        async for page, as_of in pages:
            listed.update(map(uid_of, page))
            changed |= self._cache.take_page(resource, page)
            version = as_of
            del page
        return version

    async def keep_synced(self) -> None:
        """Resync at a steady pace, for ever."""
        while True:
            # The time varies: operators that were started together must not list everything at once.
            await asyncio.sleep(self._resync_seconds * random.uniform(0.9, 1.1))
            try:
                await self.resync()
            except ApiError as error:
                log.warning("the resync comes later: %s", error)

            # Every run is looked at once in each period. The looks are spread, or all runs would wait in one
            # queue.
            for key in self._cache.store.known():
                after = random.uniform(0.0, self._resync_seconds / 4)
                self._queue.add(key, after=after)

    async def keep_pruned(self) -> None:
        """Drop objects that vanished in a gap of a watch, or before its start, for ever.

        kopf lists anew after a gap, and shows only the objects that are left. All resources are searched,
        whichever list was new: a list that is empty by now shows nothing at all.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_SECONDS):
                    await self._is_listed_anew.wait()

            # A watch may be silent without having been listed anew: then it still owes versions.
            is_late = max(self._cache.expectations.lag().values()) > _LATE_SECONDS
            if not self._is_listed_anew.is_set() and not is_late:
                continue

            # Cleared before the lists: an event that is shown from here on may belong to a newer gap, which
            # these lists do not cover.
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
                    "what vanished in a gap of a watch is looked for later: %s", error
                )
                self._is_listed_anew.set()
            await asyncio.sleep(PRUNE_SECONDS)

    def _add(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._queue.add(key)


def _is_within(scope: str | None, namespace: str) -> bool:
    return scope in (None, namespace)
