"""Serves a Store over HTTP for kopf and the official client.

To run a server, use ``python -m fake_kubernetes.server PORT``.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from fake_kubernetes.store import KINDS, RefusedError, Store, matches

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
    """``tokens``: accepted tokens; if empty, all are accepted. ``delay``: seconds before each answer."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.tokens: set[str] = set()
        self.delay = 0.0
        self.requests: list[tuple[str, str]] = []
        self.writers: list[tuple[str, str]] = []
        """Token and path of each write request, except leases and access reviews."""
        self.refused: set[str] = set()
        """Resources whose requests are answered with 403."""
        self.answers: list[Callable[[], web.Response]] = []
        """Answers that replace the next regular answers, once each."""
        self.is_starting = False
        """Whether the server is starting: /readyz answers 500, and access reviews are denied."""
        self.page_size = 0
        """Maximum number of objects in one page of a list. 0 disables paging."""
        self._oldest = 0
        self._watchers: list[asyncio.Queue[tuple[str, str, Any] | None]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def listen(self, port: int = 0) -> str:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.store.on_change = self._publish
        return self.url

    async def close(self) -> None:
        self.drop_watches()
        if self._runner:
            await self._runner.cleanup()

    def drop_watches(self) -> None:
        """End all watches. Clients miss the changes until they watch again."""
        for queue in self._watchers:
            queue.put_nowait(None)

    def expire_watches(self) -> None:
        """End all watches and expire their resource versions, so that clients must list again."""
        self._oldest = self.store.version
        self.drop_watches()

    def _publish(self, kind: str, plural: str, raw: Any) -> None:
        text = json.dumps({"type": kind, "object": raw})
        for queue in self._watchers:
            queue.put_nowait((plural, text, raw))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if self.delay:
            await asyncio.sleep(self.delay)
        token = request.headers.get("Authorization", "").partition(" ")[2]
        if self.tokens and token not in self.tokens:
            return _refuse(RefusedError(401, "Unauthorized"))
        if self.answers:
            return self.answers.pop(0)()
        if (
            request.method != "GET"
            and "/leases" not in request.path
            and "/selfsubject" not in request.path
        ):
            self.writers.append((token, request.path))
        parts = request.path.strip("/").split("/")
        try:
            if parts == ["readyz"] and self.is_starting:
                return web.Response(status=500, text="[-]informer-sync failed\n")
            if parts == ["readyz"]:
                return web.Response(text="ok")
            if parts[-1] == "selfsubjectaccessreviews":
                asked = await request.json()
                resource = asked["spec"]["resourceAttributes"]["resource"]
                allowed = not self.is_starting and resource not in self.refused
                return web.json_response(
                    {**asked, "status": {"allowed": allowed}}, status=201
                )
            if found := _discover(parts):
                return web.json_response(found)
            return await self._serve(request, *_locate(parts))
        except RefusedError as error:
            return _refuse(error)

    async def _serve(
        self, request: web.Request, plural: str, namespace: str, name: str, subresource: str
    ) -> web.StreamResponse:
        method, query, store = request.method, request.query, self.store
        if plural in self.refused:
            raise RefusedError(403, "Forbidden", f"{plural} is forbidden")
        if method == "GET" and name:
            return web.json_response(store.get(plural, namespace, name))
        if method == "GET" and query.get("watch"):
            return await self._watch(request, plural, namespace)
        if method == "GET":
            items = store.list(plural, namespace, query.get("labelSelector", ""))
            key, _, value = query.get("fieldSelector", "").partition("=")
            if key:
                # Every kind supports this field selector, and no client here uses another.
                assert key == "metadata.name", key
                items = [item for item in items if item["metadata"]["name"] == value]
            metadata = {"resourceVersion": str(store.version)}
            if self.page_size:
                start = int(query.get("continue") or 0)
                if start + self.page_size < len(items):
                    metadata["continue"] = str(start + self.page_size)
                items = items[start : start + self.page_size]
            return web.json_response({"kind": "List", "items": items, "metadata": metadata})
        body = await request.json() if request.can_read_body else {}
        if method == "POST":
            body["metadata"].setdefault("namespace", namespace)
            return web.json_response(store.create(plural, body), status=201)
        if method == "PUT":
            return web.json_response(store.replace(plural, body))
        if method == "DELETE":
            conditions = body.get("preconditions") or {}
            uid, version = conditions.get("uid"), conditions.get("resourceVersion")
            return web.json_response(store.delete(plural, namespace, name, uid, version))
        if request.content_type == "application/apply-patch+yaml":
            return web.json_response(store.apply(plural, body, subresource))
        return web.json_response(store.merge(plural, namespace, name, body))

    async def _watch(
        self, request: web.Request, plural: str, namespace: str
    ) -> web.StreamResponse:
        selector, since = (
            request.query.get("labelSelector", ""),
            int(request.query.get("resourceVersion") or 0),
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self._oldest:
            expired = {
                "kind": "Status",
                "status": "Failure",
                "code": 410,
                "reason": "Expired",
                "message": "too old",
            }
            await response.write(
                json.dumps({"type": "ERROR", "object": expired}).encode() + b"\n"
            )
            return response
        queue: asyncio.Queue[tuple[str, str, Any] | None] = asyncio.Queue()
        for version, kind, which, raw in self.store.changes:
            if version > since:
                queue.put_nowait((which, json.dumps({"type": kind, "object": raw}), raw))
        self._watchers.append(queue)
        try:
            while (told := await queue.get()) is not None:
                which, text, raw = told
                if (
                    which == plural
                    and namespace in ("", raw["metadata"].get("namespace"))
                    and matches(raw, selector)
                ):
                    await response.write(text.encode() + b"\n")
        except ConnectionError:
            pass  # The watching client has disconnected.
        finally:
            self._watchers.remove(queue)
        return response


def _locate(parts: list[str]) -> tuple[str, str, str, str]:
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest and rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    if not rest or rest[0] not in KINDS:
        raise RefusedError(404, "NotFound", "no such resource")
    return (
        rest[0],
        namespace,
        rest[1] if len(rest) > 1 else "",
        rest[2] if len(rest) > 2 else "",
    )


def _discover(parts: list[str]) -> dict[str, Any] | None:
    if parts == ["version"]:
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = sorted({version for _, version in KINDS.values() if "/" in version})
    if parts == ["apis"]:
        names = [
            (version.partition("/")[0], version.partition("/")[2]) for version in groups
        ]
        entries = [
            {"name": name, "versions": [{"groupVersion": f"{name}/{number}", "version": number}],
             "preferredVersion": {"groupVersion": f"{name}/{number}", "version": number}}
            for name, number in names
        ]  # fmt: skip
        return {"kind": "APIGroupList", "groups": entries}
    version = "/".join(parts[1:])
    if (parts[0] == "api" and len(parts) == 2) or (parts[0] == "apis" and len(parts) == 3):
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": True,
                "verbs": verbs,
                "shortNames": [],
            }
            for plural, (kind, where) in KINDS.items()
            if where == version
        ]
        if version == "v1":
            names = {"name": "namespaces", "singularName": "namespace", "kind": "Namespace"}
            resources.append({**names, "namespaced": False, "verbs": verbs})
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return None


def _refuse(error: RefusedError) -> web.Response:
    body = {
        "kind": "Status",
        "status": "Failure",
        "code": error.status,
        "reason": error.reason,
        "message": error.message,
    }
    headers = (
        {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    )
    return web.json_response(body, status=error.status, headers=headers)


async def _main(port: int) -> None:
    server = FakeServer()
    print(await server.listen(port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
