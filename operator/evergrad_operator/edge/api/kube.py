"""The only module that talks to the API server: few verbs, dictionaries in and out."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from kubernetes.aio.client.api_client import ApiClient

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import (
    ACCESS_REVIEW,
    READINESS,
    Kind,
    Raw,
    kind_of,
)
from evergrad_operator.core.objects.names import FIELD_MANAGER
from evergrad_operator.edge.api.transport import (
    BAD_ANSWER,
    JSON,
    ApiTransport,
    Gate,
    Observer,
    OpenGate,
    Request,
    RequestLimits,
)

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Asks for an answer of metadata alone: the rest of a stored object is mostly what was sent."""
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE_SIZE: Final = "500"
"""Objects in one page of a list, as kubectl asks for."""
_MANAGED = {"fieldManager": FIELD_MANAGER}


class Kube:
    """Verbs on objects.

    All raise ApiError for a request that is refused or not answered, and LeaseLostError for a write that is
    not allowed without the lease.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        gate: Gate | None = None,
        limits: RequestLimits | None = None,
        observer: Observer | None = None,
        on_unauthorized: Callable[[], None] | None = None,
    ) -> None:
        self._transport = ApiTransport(
            client,
            gate=gate or OpenGate(),
            limits=limits or RequestLimits(),
            observer=observer or (lambda verb, resource, code, seconds: None),
            on_unauthorized=on_unauthorized or (lambda: None),
        )

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """Return the object, or None if there is none."""
        try:
            return await self._transport.send(
                Request("GET", kind, kind.path(namespace, name), "get")
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_all(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> tuple[list[Raw], int]:
        """Return all objects, or those of one name, and the version the list is as of.

        ``metadata_only``: as the API server's PartialObjectMetadata. For the objects of one run: those of all
        runs together are read by ``list_pages``.
        """
        items: list[Raw] = []
        version = 0
        async for page, as_of in self.list_pages(
            kind, namespace, selector=selector, name=name, metadata_only=metadata_only
        ):
            items += page
            version = as_of
        return items, version

    async def list_pages(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> AsyncGenerator[tuple[list[Raw], int], None]:
        """Yield the objects of ``list_all`` page by page, each with the version that the whole list is as of.

        An object takes ten times the memory before its parts that are read are picked out: nothing may keep
        a page longer than it needs.
        """
        accept = _METADATA_LIST if metadata_only else JSON
        query = {"limit": _PAGE_SIZE}
        if selector:
            query["labelSelector"] = selector
        if name:
            query["fieldSelector"] = f"metadata.name={name}"

        # Pages bound the API server's memory and ours. The continue token keeps them all at one version.
        while True:
            request = Request(
                "GET",
                kind,
                kind.path(namespace),
                "list",
                query=dict(query),
                accept=accept,
            )
            page = await self._transport.send(request)
            metadata = page.get("metadata") or {}
            # The items of a list carry no kind, by which the cache tells a run's children apart.
            items: list[Raw] = [
                {**item, "kind": kind.kind} for item in page.get("items") or ()
            ]
            del page
            yield items, int(metadata.get("resourceVersion") or 0)
            # At most one page is held: also the one before goes before the next is read.
            del items
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def create(
        self,
        body: Raw,
        *,
        is_fenced: bool = True,
        is_brief: bool = False,
    ) -> Raw:
        """Create an object and return it as it was stored; ``is_brief``: only its metadata.

        ApiError 409: one of that name exists.
        """
        kind, namespace = _locate(body)
        return await self._transport.send(
            Request(
                "POST",
                kind,
                kind.path(namespace),
                "create",
                query=_MANAGED,
                body=body,
                accept=_METADATA if is_brief else JSON,
                is_fenced=is_fenced,
            )
        )

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = FIELD_MANAGER,
        is_brief: bool = False,
    ) -> Raw:
        """Apply the complete intent of ``manager`` server-side, and return the object as it was stored.

        ``is_brief``: only its metadata. Fields of other managers are taken over by force.
        """
        kind, namespace = _locate(body)
        return await self._transport.send(
            Request(
                "PATCH",
                kind,
                kind.path(namespace, body["metadata"]["name"], subresource),
                "patch",
                query={"fieldManager": manager, "force": "true"},
                body=body,
                content=_APPLY,
                accept=_METADATA if is_brief else JSON,
            )
        )

    async def merge(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Raw,
    ) -> Raw:
        """Send a JSON merge patch, and return the metadata of the object as it was stored."""
        return await self._transport.send(
            Request(
                "PATCH",
                kind,
                kind.path(namespace, name),
                "patch",
                query=_MANAGED,
                body=patch,
                content=_MERGE,
                accept=_METADATA,
            )
        )

    async def replace(self, body: Raw, *, is_fenced: bool = True) -> Raw:
        """Replace the whole object if its resourceVersion is still the newest. ApiError 409: it is not."""
        kind, namespace = _locate(body)
        return await self._transport.send(
            Request(
                "PUT",
                kind,
                kind.path(namespace, body["metadata"]["name"]),
                "update",
                query=_MANAGED,
                body=body,
                is_fenced=is_fenced,
            )
        )

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
        """Delete one object, but no other of the same name. Returns False if it was gone, or has changed.

        ``grace``: seconds until it is killed, or None for the object's own.
        """
        conditions = {"uid": uid, "resourceVersion": resource_version}
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {name: value for name, value in conditions.items() if value},
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self._transport.send(
                Request("DELETE", kind, kind.path(namespace, name), "delete", body=options)
            )
        except ApiError as error:
            # 409 under a precondition: the name belongs to another object by now, or it was changed.
            if error.status == 404 or (error.status == 409 and uid is not None):
                return False
            raise
        return True

    async def may(
        self,
        verb: str,
        kind: Kind,
        *,
        namespace: str | None,
        subresource: str = "",
    ) -> bool:
        """Return whether this process may do ``verb``, as the API server sees it."""
        group, slash, _ = kind.version.partition("/")
        asked = {
            "verb": verb,
            # The core API has a version and no group.
            "group": group if slash else "",
            "resource": kind.plural,
            "subresource": subresource,
            "namespace": namespace or "",
        }
        body = {
            "kind": ACCESS_REVIEW.kind,
            "apiVersion": ACCESS_REVIEW.version,
            "spec": {"resourceAttributes": asked},
        }
        # A standby, which has no lease, asks too.
        path = ACCESS_REVIEW.path(None)
        request = Request(
            "POST",
            ACCESS_REVIEW,
            path,
            "create",
            body=body,
            is_fenced=False,
        )
        answer = await self._transport.send(request)
        return bool((answer.get("status") or {}).get("allowed"))

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server has this kind in this version."""
        try:
            answer = await self._transport.send(
                Request("GET", kind, f"/apis/{kind.version}", "get")
            )
        except ApiError as error:
            # Discovery that is forbidden shows as little as an API group that is not there.
            if error.status in (403, 404):
                return False
            raise
        return any(one.get("name") == kind.plural for one in answer.get("resources") or ())

    async def is_ready(self) -> bool:
        """Return whether the API server has finished its start; True if it does not say.

        Before, it may refuse what is allowed and not know kinds that it has.
        """
        try:
            await self._transport.send(Request("GET", READINESS, "/readyz", "get"))
        except ApiError as error:
            # The answer of a ready one is "ok", which is not JSON.
            return not error.is_transient or error.reason == BAD_ANSWER
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


def _locate(body: Raw) -> tuple[Kind, str]:
    return kind_of(body), str(body["metadata"].get("namespace", ""))
