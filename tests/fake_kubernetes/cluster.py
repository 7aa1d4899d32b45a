"""The API client that the reconciler needs, backed by a Store instead of HTTP."""

from collections.abc import Mapping
from typing import Any

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import Kind, kind_of
from fake_kubernetes.store import RefusedError, Store


class FakeCluster:
    """Implements the protocols Cluster and Poster of ``evergrad_operator``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reads: list[tuple[str, str]] = []
        self.served: set[str] = set()
        """Optional API versions that this cluster serves in addition to the built-in versions."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        self.reads.append(("get", kind.plural))
        return (
            self.store.get(kind.plural, namespace, name)
            if (kind.plural, namespace, name) in self.store.objects
            else None
        )

    async def list_all(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> tuple[list[Any], int]:
        self.reads.append(("list", kind.plural))
        found = self.store.list(kind.plural, namespace, selector)
        return [
            raw for raw in found if name in ("", raw["metadata"]["name"])
        ], self.store.version

    async def create(
        self, body: Mapping[str, Any], *, is_brief: bool = False
    ) -> Mapping[str, Any]:
        return self._try(lambda: self.store.create(kind_of(body).plural, body))

    async def apply(
        self,
        body: Mapping[str, Any],
        *,
        subresource: str = "",
        manager: str = "",
        is_brief: bool = False,
    ) -> Mapping[str, Any]:
        return self._try(lambda: self.store.apply(kind_of(body).plural, body, subresource))

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return self._try(lambda: self.store.merge(kind.plural, namespace, name, patch))

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace: int | None = None,
    ) -> bool:
        try:
            self._try(
                lambda: self.store.delete(
                    kind.plural, namespace, name, uid, resource_version
                )
            )
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def serves(self, kind: Kind) -> bool:
        self.reads.append(("get", kind.version))
        return kind.version in self.served

    def _try(self, act: Any) -> Any:
        try:
            return act()
        except RefusedError as error:
            raise ApiError(error.status, error.reason, error.message) from None
