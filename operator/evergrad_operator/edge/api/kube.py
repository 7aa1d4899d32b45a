"""The only access to the API server for the other modules: few verbs, objects as dictionaries."""

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
"""Requests an answer with metadata only, because the rest is mostly equal to the sent object."""
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE_SIZE: Final = "500"
"""Number of objects in one page of a list, as in kubectl."""
_MANAGED = {"fieldManager": FIELD_MANAGER}


class Kube:
    """Verbs on objects.

    All methods raise ApiError if a request is refused or not answered, and LeaseLostError for a write if this
    process does not hold the lease.
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
        """Return the object, or None."""
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
        """Return the objects that match, and the resource version of the list.

        ``selector``: label selector. ``name``: name of a single object. ``metadata_only``: return
        PartialObjectMetadata. Use this method for the objects of one run, and ``list_pages`` for the objects
        of all runs.
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
        """Yield the objects of ``list_all`` page by page, each page with the resource version of the list.

        A complete object takes ten times the memory of its used fields, so do not keep a page longer than
        necessary.
        """
        accept = _METADATA_LIST if metadata_only else JSON
        query = {"limit": _PAGE_SIZE}
        if selector:
            query["labelSelector"] = selector
        if name:
            query["fieldSelector"] = f"metadata.name={name}"

        # Pages bound the memory of the API server and the operator. The continue token keeps all pages at the
        # same version.
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
            # Add the kind, which the items of a list lack. The cache needs it for a run's children.
            items: list[Raw] = [
                {**item, "kind": kind.kind} for item in page.get("items") or ()
            ]
            del page
            yield items, int(metadata.get("resourceVersion") or 0)
            # Release this page before the next one is read, so that only one page is in memory.
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
        """Create an object and return the stored object. If ``is_brief``, return only its metadata.

        Raises ApiError with status 409 if an object of this name exists.
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
        """Apply the complete intent of ``manager`` by server-side apply, and return the stored object.

        If ``is_brief``, return only its metadata. The apply is forced, so it takes fields of other managers.
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
        """Apply a JSON merge patch, and return the metadata of the stored object."""
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
        """Replace the whole object.

        Raises ApiError with status 409 if the object was changed since ``body`` was read.
        """
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
        """Delete one object, and return False if it is already gone or a precondition fails.

        ``uid`` and ``resource_version`` are preconditions: for example, with ``uid`` no other object of the
        same name is deleted. ``grace``: grace period in seconds, or None for the object's own grace period.
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
            # 409 with a precondition: the name belongs to another object now, or the object was changed.
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
        """Return whether this process may do ``verb`` in ``namespace``; None means in all namespaces."""
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
        # Do not fence this POST, because a standby without the lease also sends it.
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
        """Return whether the API server serves this kind in this version."""
        try:
            answer = await self._transport.send(
                Request("GET", kind, f"/apis/{kind.version}", "get")
            )
        except ApiError as error:
            # If discovery is forbidden, treat the API group as missing.
            if error.status in (403, 404):
                return False
            raise
        return any(one.get("name") == kind.plural for one in answer.get("resources") or ())

    async def is_ready(self) -> bool:
        """Return whether the API server has finished its start; True if this cannot be determined.

        During its start it may refuse permitted requests and return 404 for existing kinds.
        """
        try:
            await self._transport.send(Request("GET", READINESS, "/readyz", "get"))
        except ApiError as error:
            # A ready API server answers "ok", which is not JSON.
            return not error.is_transient or error.reason == BAD_ANSWER
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


def _locate(body: Raw) -> tuple[Kind, str]:
    return kind_of(body), str(body["metadata"].get("namespace", ""))
