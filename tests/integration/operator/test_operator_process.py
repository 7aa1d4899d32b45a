"""The operator as a process: kopf, client, queue and reconcile together, killed, stopped, restarted and
doubled."""

import asyncio
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes.processes import SPEC, OperatorProcess, ServerThread, running, wait_for
from fake_kubernetes.server import FakeServer
from fake_kubernetes.store import RefusedError, Store, Write
from patience import PATIENCE

from evergrad_operator.edge.api.connection import connect
from evergrad_operator.edge.service import Service
from evergrad_operator.edge.settings import OperatorSettings, parse_settings

CHILDREN = ["r-0-0", "r-1-0", "r-coordinator-0"]


@pytest.fixture
def api() -> Iterator[ServerThread]:
    with ServerThread() as server:
        yield server


def has_status(api: ServerThread, name: str) -> bool:
    return api.status(name).get("phase") == "Starting"


def test_an_applied_run_gets_its_children_and_a_status(
    api: ServerThread, tmp_path: Path
) -> None:
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        operator.wait_ready()
        api.create_run("r")
        wait_for(lambda: has_status(api, "r"), "a status")
        assert api.pods() == CHILDREN
        status, text = operator.get("/metrics")
        assert status == 200
        assert 'evergrad_operator_runs{phase="Starting"} 1.0' in text
        assert (
            'evergrad_operator_run_phase{phase="Starting",run="r",run_namespace="ns"} 1.0'
            in text
        )
        assert operator.get("/healthz") == (200, "ok\n")
    asked = {path for _, path in api.server.requests}
    # Pitfall 4: a namespaced operator requests nothing of the whole cluster that it may not read.
    assert not [
        path
        for path in asked
        if path.endswith(("/customresourcedefinitions", "/api/v1/namespaces"))
    ]


def test_deleted_runs_leave_no_series(api: ServerThread, tmp_path: Path) -> None:
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        operator.wait_ready()
        wait_for(
            lambda: (
                'mirror_objects{resource="trainingruns"} 0.0' in operator.get("/metrics")[1]
            ),
            "metrics",
        )
        api.create_run("first")
        wait_for(lambda: has_status(api, "first"), "a status")
        api.do(lambda store: store.remove("trainingruns", "ns", "first"))
        wait_for(lambda: 'run="first"' not in operator.get("/metrics")[1], "no series")
        before = len(operator.get("/metrics")[1].splitlines())
        for number in range(20):
            api.create_run(f"r{number}")
        wait_for(
            lambda: all(has_status(api, f"r{number}") for number in range(20)),
            "all statuses",
        )
        assert len(operator.get("/metrics")[1].splitlines()) > before + 20
        for number in range(20):
            api.do(
                lambda store, number=number: store.remove(
                    "trainingruns", "ns", f"r{number}"
                )
            )
        wait_for(
            lambda: (
                'mirror_objects{resource="trainingruns"} 0.0' in operator.get("/metrics")[1]
            ),
            "all gone",
        )
        assert len(operator.get("/metrics")[1].splitlines()) <= before + 5


def test_an_operator_that_restarts_with_unchanged_runs_writes_nothing_and_exits_gracefully(
    api: ServerThread, tmp_path: Path
) -> None:
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        operator.wait_ready()
        for number in range(30):
            api.create_run(f"r{number}")
        # The pods of the first pass are counted later, in a second write.
        wait_for(
            lambda: all(
                "usagePods" in api.status(f"r{number}").get("memory", {})
                for number in range(30)
            ),
            "all statuses",
        )
        operator.signal(signal.SIGTERM)
        assert operator.wait() == 0, operator.text()
    before = len(api.server.writers)
    again = OperatorProcess(tmp_path, api.server.url)
    with running(again):
        again.wait_ready()
        wait_for(
            lambda: (
                'reconcile_total{result="success"} 3'
                in again.get("/metrics")[1].replace("3.0", "3")
            ),
            "reconciles",
        )
        time.sleep(1.0)
        assert api.server.writers[before:] == []


@pytest.mark.parametrize("write", [0, 2, 4, 6])
def test_an_operator_killed_at_a_write_is_followed_by_one_that_continues(
    write: int, api: ServerThread, tmp_path: Path
) -> None:
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        operator.wait_ready()
        count = [-1]

        def kill(_: Any) -> None:
            count[0] += 1
            if count[0] == write:
                operator.process.kill()

        api.server.store.after = kill
        api.create_run("r")
        operator.wait()
    again = OperatorProcess(tmp_path, api.server.url)
    with running(again):
        wait_for(lambda: has_status(api, "r"), "a status")
        assert api.pods() == CHILDREN


def test_one_of_two_operators_writes_and_a_suspended_leader_never_writes_again(
    api: ServerThread, tmp_path: Path
) -> None:
    options = ("--lease", "--lease-namespace", "ns", "--lease-seconds", "10")
    first = OperatorProcess(tmp_path, api.server.url, *options, token="first")
    with running(first):
        first.wait_ready()
        wait_for(lambda: "holding the lease" in first.text(), "the lease")
        second = OperatorProcess(tmp_path, api.server.url, *options, token="second")
        with running(second):
            second.wait_ready()
            api.create_run("r")
            wait_for(lambda: has_status(api, "r"), "a status")
            assert {token for token, _ in api.server.writers} == {"first"}
            first.signal(signal.SIGSTOP)
            for number in range(5):
                api.create_run(f"more{number}")
            wait_for(
                lambda: "holding the lease" in second.text(), "the lease of the second"
            )
            taken = len(api.server.writers)
            first.signal(signal.SIGCONT)
            wait_for(lambda: "is lost" in first.text(), "the end of the first's lead")
            wait_for(
                lambda: all(has_status(api, f"more{number}") for number in range(5)),
                "all statuses",
            )
            assert {token for token, _ in api.server.writers[taken:]} == {"second"}
            # It waits as any other standby does, and shows no run, of which the leader's series are.
            assert first.process.poll() is None
            assert first.get("/healthz")[0] == first.get("/readyz")[0] == 200
            wait_for(lambda: 'run="r"' not in first.get("/metrics")[1], "no series of runs")
            assert 'run="r"' in second.get("/metrics")[1]

            # When the second leaves, the first leads again, and has the objects that the second has created.
            second.signal(signal.SIGTERM)
            assert second.wait() == 0, second.text()
            left = len(api.server.writers)
            wait_for(
                lambda: "working again over" in first.text(), "the first's second lead"
            )
            api.create_run("last")
            wait_for(lambda: has_status(api, "last"), "a status")
            assert {token for token, _ in api.server.writers[left:]} == {"first"}
            assert sorted(api.pods()) == sorted(
                f"{name}-{pod}"
                for name in ("r", "last", *(f"more{number}" for number in range(5)))
                for pod in ("0-0", "1-0", "coordinator-0")
            )


LEASE = ("--lease", "--lease-namespace", "ns", "--lease-seconds", "6")


def leads(operator: OperatorProcess) -> bool:
    return "evergrad_operator_leader 1.0" in operator.get("/metrics")[1]


def waits(operator: OperatorProcess) -> bool:
    return "evergrad_operator_leader 0.0" in operator.get("/metrics")[1]


def test_the_operator_survives_two_outages_longer_than_the_lease(
    api: ServerThread, tmp_path: Path
) -> None:
    operator = OperatorProcess(tmp_path, api.server.url, *LEASE)
    with running(operator):
        for number in range(2):
            wait_for(lambda: leads(operator), "the lease")
            api.go_away()
            wait_for(lambda: waits(operator), "the loss of the lease")
            assert operator.get("/healthz") == (200, "ok\n")
            api.create_run(f"r{number}")
            api.come_back()
            wait_for(lambda number=number: has_status(api, f"r{number}"), "a status")
        assert operator.process.poll() is None
        assert len(api.pods()) == 6
        operator.signal(signal.SIGTERM)
        assert operator.wait() == 0, operator.text()


def test_without_the_lease_nothing_is_written_although_the_api_server_responds(
    api: ServerThread, tmp_path: Path
) -> None:
    operator = OperatorProcess(tmp_path, api.server.url, *LEASE)
    with running(operator):
        operator.wait_ready()
        api.create_run("r")
        wait_for(lambda: has_status(api, "r"), "a status")
        api.do(lambda store: api.server.refused.add("leases"))
        wait_for(
            lambda: "evergrad_operator_leader 0.0" in operator.get("/metrics")[1], "loss"
        )
        before = len(api.server.writers)
        api.create_run("late")
        api.do(lambda store: store.remove("pods", "ns", "r-1-0"))
        # It has seen both, and both wait for their turn.
        seen = 'mirror_objects{resource="trainingruns"} 2.0'
        wait_for(lambda: seen in operator.get("/metrics")[1], "the new run")
        wait_for(lambda: "queue_depth 2.0" in operator.get("/metrics")[1], "a queue")
        assert len(api.server.writers) == before
        api.do(lambda store: api.server.refused.clear())
        wait_for(lambda: has_status(api, "late"), "a status")
        wait_for(lambda: "r-1-1" in api.pods(), "the replacement")


def test_an_operator_that_starts_first_waits_for_the_api_server(
    api: ServerThread, tmp_path: Path
) -> None:
    api.go_away()
    operator = OperatorProcess(tmp_path, api.server.url, *LEASE)
    with running(operator):
        wait_for(lambda: "waiting for the API server" in operator.text(), "its report")
        assert operator.get("/healthz") == (200, "ok\n")
        assert operator.get("/readyz")[0] == 503
        # A starting server refuses requests that it will allow later.
        api.server.is_starting = True
        api.come_back()
        wait_for(lambda: "still starting" in operator.text(), "its second report")
        api.server.is_starting = False
        operator.wait_ready()
        api.create_run("r")
        wait_for(lambda: has_status(api, "r"), "a status")
        assert operator.process.poll() is None


@pytest.mark.long
def test_a_leader_that_exits_gracefully_is_replaced_at_once(
    api: ServerThread, tmp_path: Path
) -> None:
    options = ("--lease", "--lease-namespace", "ns", "--lease-seconds", "60")
    first = OperatorProcess(tmp_path, api.server.url, *options)
    with running(first):
        wait_for(lambda: "holding the lease" in first.text(), "the lease")
        first.wait_ready()
        second = OperatorProcess(tmp_path, api.server.url, *options)
        with running(second):
            second.wait_ready()
            first.signal(signal.SIGTERM)
            assert first.wait() == 0
            wait_for(
                lambda: "holding the lease" in second.text(), "the lease of the second"
            )


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        ("pods", "may not list pods, watch pods, create pods, delete pods in namespace ns"),
        ("trainingruns", "trainingruns/status"),
    ],
)
def test_missing_permissions_are_reported_at_once(
    refused: str, text: str, api: ServerThread, tmp_path: Path
) -> None:
    api.server.refused = {refused}
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        assert operator.wait() == 64
        assert text in operator.text()


def settings(**more: str) -> OperatorSettings:
    options = [
        "--namespace",
        "ns",
        "--no-lease",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--trainer-image",
        "t",
        "--operator-image",
        "o",
    ]
    return parse_settings(
        [
            *options,
            *(
                word
                for name, value in more.items()
                for word in (f"--{name.replace('_', '-')}", value)
            ),
        ],
        {},
    )


def in_one_process(tmp_path: Path, scenario: Any, **options: str) -> None:
    """Run ``scenario`` with a server, and a service whose token is in a file."""
    import certifi

    async def main() -> None:
        server = FakeServer(Store())
        await server.listen()
        (tmp_path / "token").write_text("first")
        (tmp_path / "ca.crt").write_text(Path(certifi.where()).read_text())
        surroundings = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": "1",
        }
        connection = await connect(surroundings, service_account=tmp_path)
        assert connection._loader is not None
        connection._loader.host = connection.configuration.host = server.url
        service = Service(settings(**options), connection)
        task = asyncio.create_task(service.run())
        try:
            await until(lambda: service.vitals.is_synced)
            await scenario(server, service)
        finally:
            service._stop.set()
            await asyncio.wait_for(task, PATIENCE)
            await server.close()

    asyncio.run(main())


async def until(is_true: Any, seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.02)


def create(store: Store, name: str) -> None:
    store.create(
        "trainingruns", {"metadata": {"name": name, "namespace": "ns"}, "spec": SPEC}
    )


def pods_of(store: Store) -> list[str]:
    return [raw["metadata"]["name"] for raw in store.list("pods")]


def test_watches_and_writes_continue_after_the_token_was_rotated(tmp_path: Path) -> None:
    async def scenario(server: FakeServer, service: Service) -> None:
        server.tokens = {"first"}
        create(server.store, "a")
        await until(lambda: len(pods_of(server.store)) == 3)
        (tmp_path / "token").write_text("second")
        server.tokens = {"second"}
        server.drop_watches()
        create(server.store, "b")
        await until(lambda: len(pods_of(server.store)) == 6)

    in_one_process(tmp_path, scenario)


def test_a_pod_deleted_while_the_watch_was_disconnected_is_found_by_the_next_list(
    tmp_path: Path,
) -> None:
    async def scenario(server: FakeServer, service: Service) -> None:
        create(server.store, "a")
        await until(lambda: len(pods_of(server.store)) == 3)
        server.store.remove("pods", "ns", "a-1-0", is_silent=True)
        await until(lambda: "a-1-1" in pods_of(server.store))

    in_one_process(tmp_path, scenario, resync_seconds="1")


def test_a_worker_that_hangs_makes_the_operator_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: FakeServer, service: Service) -> None:
        assert service.vitals.find_stall() is None
        monkeypatch.setattr(
            "evergrad_operator.edge.metrics.health_checks.STALLED_SECONDS", 0.2
        )

        async def hang(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(60)

        service.kube.apply = hang  # type: ignore[method-assign]
        create(server.store, "a")
        await until(lambda: service.vitals.find_stall() is not None)
        assert "work is stalled" in str(service.vitals.find_stall())

    in_one_process(tmp_path, scenario)


def test_a_watch_that_is_behind_makes_the_operator_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: FakeServer, service: Service) -> None:
        monkeypatch.setattr(
            "evergrad_operator.edge.metrics.health_checks.STALLED_SECONDS", 0.3
        )
        server.store.on_change = lambda *_: None
        create(server.store, "a")
        service.queue.add(("ns", "a"))
        await service.sync.resync()
        await until(lambda: "watch is behind" in str(service.vitals.find_stall()))

    in_one_process(tmp_path, scenario)


def test_three_quiet_minutes_after_a_killed_pod_leave_the_operator_healthy(
    tmp_path: Path,
) -> None:
    def run_pods(store: Store) -> None:
        for raw in store.list("pods"):
            if raw["status"]["phase"] == "Pending":
                state = {
                    "name": raw["spec"]["containers"][0]["name"],
                    "state": {"running": {}},
                    "ready": True,
                }
                status = {
                    "phase": "Running",
                    "podIP": "127.0.0.1",
                    "containerStatuses": [state],
                }
                store.change("pods", "ns", raw["metadata"]["name"], {"status": status})

    async def scenario(server: FakeServer, service: Service) -> None:
        ahead = [0.0]
        service.cache.expectations._clock = lambda: time.monotonic() + ahead[0]
        create(server.store, "a")
        await until(lambda: len(pods_of(server.store)) == 3)
        run_pods(server.store)
        ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137}}}
        server.store.change(
            "pods",
            "ns",
            "a-1-0",
            {"status": {"phase": "Failed", "containerStatuses": [ended]}},
        )
        await until(lambda: "a-1-1" in pods_of(server.store))
        run_pods(server.store)
        # Each written object is shown by the watches a little later; then nothing more is expected.
        await until(lambda: max(service.cache.expectations.lag().values()) == 0.0)
        ahead[0] = 180.0
        assert service.vitals.find_stall() is None

    in_one_process(tmp_path, scenario)


def test_a_run_blocked_by_a_webhook_reports_it_and_starts_when_the_webhook_responds(
    api: ServerThread, tmp_path: Path
) -> None:
    def fail(write: Write) -> None:
        if write.plural == "pods":
            raise RefusedError(
                500,
                "InternalError",
                'failed calling webhook "w.example.org": connection refused',
            )

    def answer(store: Store, before: Any) -> None:
        store.before = before

    api.do(lambda store: answer(store, fail))
    operator = OperatorProcess(tmp_path, api.server.url)
    with running(operator):
        operator.wait_ready()
        api.create_run("r")
        wait_for(
            lambda: api.status("r").get("reason") == "WebhookFailed",
            "a status that says why",
        )
        assert "an admission webhook does not answer" in api.status("r")["message"]
        assert api.pods() == []
        api.do(lambda store: answer(store, lambda write: None))
        wait_for(lambda: api.pods() == CHILDREN, "pods")
        wait_for(
            lambda: api.status("r").get("reason") == "Starting",
            "a status without the obstacle",
        )
        assert operator.get("/healthz") == (200, "ok\n")


def test_an_object_deleted_in_a_gap_of_the_watch_is_found_by_the_periodic_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "evergrad_operator.edge.cache.sync.PRUNE_SECONDS", 0.5, raising=False
    )

    async def scenario(server: FakeServer, service: Service) -> None:
        create(server.store, "a")
        create(server.store, "b")
        await until(lambda: len(pods_of(server.store)) == 6)
        await until(lambda: max(service.cache.expectations.lag().values()) == 0.0)
        for _ in range(2):  # the second gap counts, too
            (node,) = [name for name in pods_of(server.store) if name.startswith("a-1-")]
            server.store.remove("pods", "ns", node, is_silent=True)
            server.expire_watches()
            await until(partial(replaced, node, server.store))
        server.store.remove("trainingruns", "ns", "b", is_silent=True)
        server.expire_watches()
        await until(lambda: service.cache.run(("ns", "b")) is None)

    def replaced(node: str, store: Store) -> bool:
        return any(name.startswith("a-1-") and name != node for name in pods_of(store))

    in_one_process(tmp_path, scenario)
