"""The Kubernetes client against a server that refuses, delays, rotates tokens and closes connections."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientRequest, web
from fake_kubernetes.server import FakeServer
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from evergrad_operator.core.objects.errors import ApiError, LeaseLostError, SettingsError
from evergrad_operator.core.objects.kinds import CONFIG_MAP, POD, POD_GROUPS, RUN
from evergrad_operator.edge.api.connection import Connection, connect
from evergrad_operator.edge.api.kube import Kube
from evergrad_operator.edge.api.transport import RequestLimits, build_trace

FAST = RequestLimits(first_pause=0.005, longest_pause=0.02, request_seconds=100.0)


def config_map(name: str = "c", **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "ns"},
        "data": data,
    }


def with_server(
    work: Callable[[FakeServer, Kube], Awaitable[None]], **options: Any
) -> FakeServer:
    """Run ``work`` with a server and a client."""

    async def main() -> FakeServer:
        server = FakeServer()
        configuration = Configuration(host=await server.listen())
        configuration.trace_configs = [build_trace()]
        kube = Kube(ApiClient(configuration), **{"limits": FAST, **options})
        try:
            await work(server, kube)
        finally:
            await kube.close()
            await server.close()
        return server

    return asyncio.run(main())


def refuse(status: int, **headers: str) -> Callable[[], web.Response]:
    return lambda: web.json_response(
        {"reason": "Planned", "message": "planned"}, status=status, headers=headers
    )


def test_verbs_send_the_expected_requests_without_discovery() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        assert await kube.get(CONFIG_MAP, "ns", "c") is None
        await kube.apply(config_map(a="1"))
        await kube.apply(config_map(a="2"))
        found = await kube.get(CONFIG_MAP, "ns", "c")
        assert found is not None and found["data"] == {"a": "2"}
        await kube.create(config_map("d"))
        raws, version = await kube.list_all(CONFIG_MAP, None)
        assert [raw["metadata"]["name"] for raw in raws] == ["c", "d"] and version > 0
        uid = found["metadata"]["uid"]
        assert not await kube.delete(CONFIG_MAP, "ns", "c", uid="another")
        assert not await kube.delete(CONFIG_MAP, "ns", "c", uid=uid, resource_version="1")
        assert await kube.delete(CONFIG_MAP, "ns", "c", uid=uid)
        assert not await kube.delete(CONFIG_MAP, "ns", "c", uid=uid)
        assert await kube.may("list", RUN, namespace=None)

    server = with_server(work)
    assert {path for _, path in server.requests} <= {
        "/api/v1/namespaces/ns/configmaps",
        "/api/v1/namespaces/ns/configmaps/c",
        "/api/v1/configmaps",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    }


def test_a_kind_is_served_if_discovery_lists_its_plural() -> None:
    (group,) = POD_GROUPS["coscheduling"]
    found: list[bool] = []
    listed = {"resources": [{"name": "podgroups/status"}, {"name": "podgroups"}]}
    lists: list[Callable[[], web.Response]] = [
        lambda: web.json_response(listed),
        lambda: web.json_response({"resources": [{"name": "workloads"}]}),
        refuse(404),
        refuse(403),
    ]

    async def work(server: FakeServer, kube: Kube) -> None:
        server.answers = list(lists)
        found.extend([await kube.serves(group) for _ in lists])
        server.answers = [refuse(400)]
        with pytest.raises(ApiError):
            await kube.serves(group)

    requests = with_server(work).requests
    assert set(requests) == {("GET", "/apis/scheduling.x-k8s.io/v1alpha1")}
    assert found == [True, False, False, False]


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_temporary_errors_are_retried(status: int) -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        server.answers = [refuse(status), refuse(status)]
        await kube.apply(config_map(a="1"))

    assert len(with_server(work).requests) == 3


def test_a_retry_waits_for_the_retry_after_of_the_server() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        server.answers = [refuse(429, **{"Retry-After": "1"})]
        loop = asyncio.get_running_loop()
        started = loop.time()
        await kube.apply(config_map(a="1"))
        assert loop.time() - started >= 1.0

    with_server(work, limits=RequestLimits(first_pause=0.005, longest_pause=1.0))


@pytest.mark.parametrize("status", [400, 403, 409, 422])
def test_permanent_errors_are_not_retried_and_keep_the_message_of_the_server(
    status: int,
) -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        server.answers = [refuse(status)]
        with pytest.raises(ApiError) as caught:
            await kube.apply(config_map(a="1"))
        assert (caught.value.status, caught.value.reason, caught.value.message) == (
            status,
            "Planned",
            "planned",
        )

    assert len(with_server(work).requests) == 1


def test_an_unreachable_server_is_an_error_with_its_reason_after_a_few_retries() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        await server.close()
        with pytest.raises(ApiError, match="no answer Unreachable"):
            await kube.get(POD, "ns", "p")

    with_server(work)


def test_a_request_without_a_response_ends_at_its_timeout() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        server.delay = 30.0
        with pytest.raises(ApiError, match="Unreachable"):
            await kube.get(POD, "ns", "p")

    with_server(work, limits=RequestLimits(request_seconds=0.1, tries=2, first_pause=0.01))


def test_the_number_of_concurrent_requests_is_bounded() -> None:
    most = [0]

    async def work(server: FakeServer, kube: Kube) -> None:
        under_way, answer = [0], server.store.get

        def count(*place: str) -> Any:
            return answer(*place)

        server.store.get = count  # type: ignore[method-assign]
        original = server._serve

        async def slow(*arguments: Any) -> Any:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            await asyncio.sleep(0.02)
            under_way[0] -= 1
            return await original(*arguments)

        server._serve = slow  # type: ignore[method-assign]
        await asyncio.gather(*(kube.get(POD, "ns", str(number)) for number in range(20)))

    with_server(work, limits=RequestLimits(in_flight=4))
    assert most[0] == 4


def test_a_slow_server_never_blocks_the_event_loop() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        gate, original = asyncio.Event(), server._serve

        async def serve(*arguments: Any) -> Any:
            await gate.wait()
            return await original(*arguments)

        server._serve = serve  # type: ignore[method-assign]
        calls = [
            asyncio.create_task(kube.apply(config_map(str(number), a="1")))
            for number in range(100)
        ]
        # The server answers in the same loop, and only after this call: a call that waits for the answer
        # would hang.
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not any(call.done() for call in calls)
        gate.set()
        await asyncio.gather(*calls)

    with_server(work, limits=RequestLimits(request_seconds=100.0))


class Gate:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def remaining(self) -> float:
        return self.seconds


def test_without_the_lease_nothing_is_written_and_reads_continue() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        await kube.list_all(POD, "ns")
        for act in (
            kube.apply(config_map(a="1")),
            kube.create(config_map()),
            kube.delete(POD, "ns", "p"),
            kube.merge(POD, "ns", "p", {}),
            kube.replace(config_map()),
        ):
            with pytest.raises(LeaseLostError):
                await act

    assert [method for method, _ in with_server(work, gate=Gate(0.0)).requests] == ["GET"]


def test_a_write_is_not_sent_if_the_process_was_stopped_while_it_waited_for_a_connection() -> (
    None
):
    gate = Gate(10.0)

    async def work(server: FakeServer, kube: Kube) -> None:
        original = kube._transport._client.rest_client.request

        async def late(*arguments: Any, **options: Any) -> Any:
            gate.seconds = -1.0
            return await original(*arguments, **options)

        kube._transport._client.rest_client.request = late
        with pytest.raises(LeaseLostError):
            await kube.apply(config_map(a="1"))

    assert with_server(work, gate=gate).requests == []


def test_a_write_is_not_sent_if_the_process_was_stopped_before_it_sent_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(10.0)
    original = ClientRequest.write_bytes

    async def late(*arguments: Any, **options: Any) -> None:
        gate.seconds = -1.0
        await original(*arguments, **options)

    monkeypatch.setattr(ClientRequest, "write_bytes", late)

    async def work(server: FakeServer, kube: Kube) -> None:
        with pytest.raises(LeaseLostError):
            await kube.apply(config_map(a="1"))

    assert with_server(work, gate=gate).requests == []


def test_the_timeout_of_a_write_is_limited_by_the_remaining_time_of_the_lease() -> None:
    async def work(server: FakeServer, kube: Kube) -> None:
        server.delay = 30.0
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(ApiError, match="Unreachable"):
            await kube.apply(config_map(a="1"))
        assert loop.time() - started < 5.0

    with_server(work, gate=Gate(0.1), limits=RequestLimits(tries=1))


def test_every_request_is_counted_by_verb_resource_and_code() -> None:
    seen: list[tuple[str, str, str]] = []

    async def work(server: FakeServer, kube: Kube) -> None:
        server.answers = [refuse(500)]
        await kube.apply(config_map(a="1"))
        await kube.get(POD, "ns", "p")

    with_server(
        work,
        observer=lambda verb, resource, code, seconds: seen.append((verb, resource, code)),
    )
    assert seen == [
        ("patch", "configmaps", "500"),
        ("patch", "configmaps", "200"),
        ("get", "pods", "404"),
    ]


def in_pod(server: FakeServer, folder: Path, token: str) -> dict[str, str]:
    """Create the environment of a pod. The certificate only needs to be valid: the server uses plain HTTP."""
    import certifi

    (folder / "token").write_text(token)
    (folder / "ca.crt").write_text(Path(certifi.where()).read_text())
    host, port = server.url.removeprefix("http://").split(":")
    return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


def test_a_rotated_token_is_read_from_its_file_if_the_server_refuses_the_old_token(
    tmp_path: Path,
) -> None:
    async def main() -> list[str]:
        server = FakeServer()
        await server.listen()
        server.tokens = {"first"}
        connection = await connect(
            in_pod(server, tmp_path, "first"), service_account=tmp_path
        )
        assert connection._loader is not None
        connection._loader.host = connection.configuration.host = server.url
        kube = Kube(
            connection.build_client(), limits=FAST, on_unauthorized=connection.expire_token
        )
        try:
            assert await kube.get(POD, "ns", "p") is None
            (tmp_path / "token").write_text("second")
            server.tokens = {"second"}
            assert await kube.get(POD, "ns", "p") is None
            return [str((await connection.describe())["token"])]
        finally:
            await kube.close()
            await server.close()

    assert asyncio.run(main()) == ["second"]


def test_outside_a_cluster_the_kubeconfig_is_read_and_a_missing_one_is_reported(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match="KUBECONFIG"):
        asyncio.run(connect({"KUBECONFIG": str(tmp_path / "none")}))
    path = tmp_path / "config"
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    path.write_text(json.dumps(content))
    connection = asyncio.run(connect({"KUBECONFIG": str(path)}))
    assert isinstance(connection, Connection)
    described = asyncio.run(connection.describe())
    assert (described["server"], described["token"]) == ("http://127.0.0.1:1", "secret")
