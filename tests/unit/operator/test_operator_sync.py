"""Full lists: page by page, so that no whole list is ever held."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_kubernetes.server import FakeServer
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from patience import PATIENCE

from evergrad_operator.core.objects.kinds import POD, Kind
from evergrad_operator.core.objects.names import Key
from evergrad_operator.edge.api.kube import Kube
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.cache.store import PODS
from evergrad_operator.edge.cache.sync import CacheSync


class Page(list[Any]):
    """A list that can be referred to weakly."""


class Pages:
    """Pods in pages of two, each of which must be freed before the next is read."""

    def __init__(self) -> None:
        self.num_pages = 0

    async def list_pages(
        self, kind: Kind, namespace: str | None, **_: Any
    ) -> AsyncIterator[tuple[list[Any], int]]:
        for start in (0, 2, 4) if kind is POD else ():
            page = Page(make_pod(f"r-{index}-0") for index in range(start, start + 2))
            before = weakref.ref(page)
            yield page, 50
            del page
            assert before() is None, "a page is still held"
            self.num_pages += 1


def make_pod(name: str) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": name,
        "resourceVersion": "10",
        "labels": {"evergrad.dev/run": "r"},
    }
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}


def build_sync(kube: Any) -> tuple[InformerCache, CacheSync]:
    cache = InformerCache()
    queue: WorkQueue[Key] = WorkQueue()
    sync = CacheSync(kube, cache=cache, queue=queue, scopes=[None], resync_seconds=600.0)
    return cache, sync


def test_a_full_list_is_slimmed_page_by_page() -> None:
    pages = Pages()
    cache, sync = build_sync(pages)
    asyncio.run(sync.resync())
    assert len(cache.pods(("ns", "r"))) == 6 and pages.num_pages == 3


def test_the_search_for_missed_deletions_holds_one_page_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evergrad_operator.edge.cache.sync.PRUNE_SECONDS", 0.01)
    pages = Pages()
    cache, sync = build_sync(pages)
    cache.see(PODS, make_pod("r-9-0"), is_watched=True)
    cache.see(PODS, make_pod("r-1-0"), is_watched=True)

    async def main() -> None:
        task = asyncio.create_task(sync.keep_pruned())
        sync.expect_gap()
        async with asyncio.timeout(PATIENCE):
            while len(cache.pods(("ns", "r"))) != 1:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    assert [pod["metadata"]["name"] for pod in cache.pods(("ns", "r"))] == ["r-1-0"]


def test_pages_of_a_list_are_joined_under_one_version() -> None:
    async def main() -> None:
        server = FakeServer()
        for number in range(7):
            body = make_pod(f"r-{number}-0")
            body["metadata"].pop("resourceVersion")
            server.store.create("pods", body)
        server.page_size = 3
        kube = Kube(ApiClient(Configuration(host=await server.listen())))
        try:
            cache, sync = build_sync(kube)
            sizes = [len(page) async for page, _ in kube.list_pages(POD, None)]
            assert sizes == [3, 3, 1]
            raws, version = await kube.list_all(POD, "ns")
            assert len(raws) == 7 and version == server.store.version
            await sync.resync()
            assert len(cache.pods(("ns", "r"))) == 7
        finally:
            await kube.close()
            await server.close()

    asyncio.run(main())
