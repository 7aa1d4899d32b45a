"""Tokens of runs: the installation key, the Secrets, and which object shows which token."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fake_kubernetes.cluster import FakeCluster
from fake_kubernetes.simulation import KEY_OF_TOKENS, Crash, Simulation, crash_at
from fake_kubernetes.store import RefusedError, Store, Write

from evergrad_operator.core.objects.errors import SettingsError
from evergrad_operator.core.objects.names import token_secret_name
from evergrad_operator.edge.api.tokens import derive_token, load_key


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    world = Simulation()
    world.create_run()
    yield world
    world.store.on_change = lambda kind, plural, raw: None


def secrets_of(world: Simulation) -> list[dict[str, Any]]:
    return world.store.list("secrets")


def token_of(world: Simulation, name: str = "run") -> str:
    return derive_token(
        KEY_OF_TOKENS, world.store.get("trainingruns", "ns", name)["metadata"]["uid"]
    )


def mounted(pod: dict[str, Any]) -> str:
    """Return the Secret that --token-file of a pod's only container refers to."""
    (container,) = pod["spec"]["containers"]
    path = container["args"][container["args"].index("--token-file") + 1]
    mount = next(
        one for one in container["volumeMounts"] if path.startswith(f"{one['mountPath']}/")
    )
    volume = next(one for one in pod["spec"]["volumes"] if one["name"] == mount["name"])
    assert (path, mount["readOnly"]) == ("/etc/evergrad/token/token", True)
    return str(volume["secret"]["secretName"])


# ---- the installation key
# -----------------------------------------------------------------------------------


def test_the_first_operator_creates_the_key_and_all_others_read_it() -> None:
    store = Store()
    first = asyncio.run(load_key(FakeCluster(store), "system", "key"))
    assert len(first) == 32
    assert asyncio.run(load_key(FakeCluster(store), "system", "key")) == first
    (secret,) = store.list("secrets")
    assert secret["immutable"] is True
    assert "ownerReferences" not in secret["metadata"]


def test_operators_that_start_together_agree_on_one_key() -> None:
    store = Store()

    class Slow(FakeCluster):
        """All read before any writes."""

        async def get(self, *place: Any) -> Any:
            found = await super().get(*place)
            await asyncio.sleep(0)
            return found

    async def main() -> list[bytes]:
        return list(
            await asyncio.gather(
                *(load_key(Slow(store), "system", "key") for _ in range(3))
            )
        )

    assert len(set(asyncio.run(main()))) == 1
    assert len(store.list("secrets")) == 1


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"key": ""},
        {"key": "%%%"},
        {"key": base64.b64encode(b"short").decode()},
        {"key": 7},
    ],
)
def test_a_secret_without_a_key_is_reported_and_never_used(data: Any) -> None:
    store = Store()
    store.create(
        "secrets", {"metadata": {"name": "key", "namespace": "system"}, "data": data}
    )
    with pytest.raises(SettingsError, match=r"system/key.*Delete it"):
        asyncio.run(load_key(FakeCluster(store), "system", "key"))


def test_a_missing_permission_for_the_key_is_reported() -> None:
    def refuse(write: Write) -> None:
        raise RefusedError(403, "Forbidden", f"{write.plural} is forbidden")

    with pytest.raises(SettingsError, match=r"secrets is forbidden.*roles"):
        asyncio.run(load_key(FakeCluster(Store(before=refuse)), "system", "key"))


def test_each_run_token_is_an_hmac_of_the_run_uid() -> None:
    assert (
        derive_token(b"k" * 32, "uid-1")
        == hmac.new(b"k" * 32, b"uid-1", hashlib.sha256).hexdigest()
    )
    assert (
        len(
            {
                derive_token(key, uid)
                for key in (b"a" * 32, b"b" * 32)
                for uid in ("uid-1", "uid-2")
            }
        )
        == 4
    )


# ---- the Secret of a run -----------------------------------------------------------------------------------


def test_a_run_has_one_secret_that_all_its_pods_mount(
    simulation: Simulation,
) -> None:
    simulation.settle()
    (secret,) = secrets_of(simulation)
    assert secret["stringData"] == {"token": token_of(simulation)}
    assert secret["metadata"]["name"] == token_secret_name("run", token_of(simulation))
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (
        owner["uid"] == simulation.store.get("trainingruns", "ns", "run")["metadata"]["uid"]
    )
    pods = simulation.store.list("pods")
    assert {mounted(pod) for pod in pods} == {secret["metadata"]["name"]}
    assert len(pods) == 3


def test_the_secret_is_created_before_the_first_pod_and_deleted_with_the_run(
    simulation: Simulation,
) -> None:
    simulation.settle()
    order = [write.plural for write in simulation.store.writes]
    assert order.index("secrets") < order.index("pods")
    simulation.store.remove("trainingruns", "ns", "run")
    assert secrets_of(simulation) == []


def test_the_token_is_in_no_other_object(simulation: Simulation) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.train()
    simulation.settle()
    others = [
        raw
        for (plural, _, _), raw in simulation.store.objects.items()
        if plural != "secrets"
    ]
    assert token_of(simulation) not in json.dumps(others)
    assert KEY_OF_TOKENS.decode() not in json.dumps(others)


def test_no_secret_of_a_run_is_ever_read_listed_or_changed(simulation: Simulation) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.end_pod("run-1-0", 70)
    simulation.settle()
    assert [
        write.verb for write in simulation.store.writes if write.plural == "secrets"
    ] != []
    assert {
        write.verb for write in simulation.store.writes if write.plural == "secrets"
    } == {"create"}
    assert "secrets" not in {plural for _, plural in simulation.cluster.reads}


def test_a_recently_deleted_namesake_leaves_no_token(
    simulation: Simulation,
) -> None:
    simulation.settle()
    (old,) = secrets_of(simulation)
    kept = ("secrets", "ns", old["metadata"]["name"])
    with simulation.by_others():
        secret = simulation.store.objects[kept]
        simulation.store.remove("trainingruns", "ns", "run")
        simulation.store.objects[kept] = secret  # the garbage collector acts later
    simulation.reconcile()
    simulation.create_run()
    simulation.settle()
    assert {mounted(pod) for pod in simulation.store.list("pods")} == {
        token_secret_name("run", token_of(simulation))
    }
    assert len(secrets_of(simulation)) == 2


def test_a_deleted_secret_is_restored_before_the_next_pod(simulation: Simulation) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.train()
    simulation.settle()
    (secret,) = secrets_of(simulation)
    simulation.store.remove("secrets", "ns", secret["metadata"]["name"])
    simulation.end_pod("run-1-0", 70)
    simulation.settle()
    assert "run-1-1" in simulation.pods()
    (back,) = secrets_of(simulation)
    assert back["stringData"] == secret["stringData"]


def test_a_secret_that_is_deleted_before_a_pod_has_mounted_it_is_created_again(
    simulation: Simulation,
) -> None:
    simulation.settle()
    (secret,) = secrets_of(simulation)
    simulation.store.remove("secrets", "ns", secret["metadata"]["name"])
    waiting = {
        "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
        ]
    }
    simulation.store.change(
        "pods", "ns", "run-0-0", {"spec": {"nodeName": "n1"}, "status": waiting}
    )
    start = simulation.now
    while simulation.now < start + 30.0:
        delay = simulation.settle()
        assert delay is not None and delay <= 30.0, "the next look comes by itself"
        assert secrets_of(simulation) == []
        simulation.now += delay
    simulation.settle()
    assert len(secrets_of(simulation)) == 1
    # It is requested at intervals, not in each pass.
    before = len(simulation.store.writes)
    simulation.reconcile()
    assert len(simulation.store.writes) == before


def test_no_pod_is_created_if_its_secret_is_refused_and_the_status_reports_why(
    simulation: Simulation,
) -> None:
    def refuse(write: Write) -> None:
        if write.plural == "secrets":
            raise RefusedError(
                403,
                "Forbidden",
                "exceeded quota: secrets, requested: 1, used: 9, limited: 9",
            )

    simulation.store.before = refuse
    simulation.settle()
    assert simulation.store.list("pods") == []
    assert "exceeded quota: secrets" in simulation.status["message"]
    simulation.store.before = lambda write: None
    simulation.now += 120
    simulation.settle()
    assert len(simulation.store.list("pods")) == 3


def test_an_exhausted_quota_does_not_block_the_replacement_of_pods(
    simulation: Simulation,
) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.train()
    simulation.settle()

    def refuse(write: Write) -> None:
        if write.plural == "secrets":
            raise RefusedError(
                403,
                "Forbidden",
                "exceeded quota: secrets, requested: 1, used: 9, limited: 9",
            )

    simulation.store.before = refuse
    simulation.end_pod("run-1-0", 70)
    simulation.settle()
    assert "run-1-1" in simulation.pods()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("number", range(7))
def test_an_operator_killed_between_two_writes_creates_no_second_secret(
    number: int, is_before: bool
) -> None:
    world = Simulation()
    world.create_run()
    world.store.before, world.store.after = crash_at(number, is_before=is_before)
    with pytest.raises(Crash):
        world.settle()
    world.store.before = world.store.after = lambda write: None
    world.start_operator()
    world.settle()
    assert len(secrets_of(world)) == 1
    assert {mounted(pod) for pod in world.store.list("pods")} == {
        secrets_of(world)[0]["metadata"]["name"]
    }
    assert len(world.store.list("pods")) == 3


def test_the_coordinator_is_polled_with_the_token_of_the_run(
    simulation: Simulation,
) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    (followed,) = simulation.coordinators._followed.values()
    assert followed.token == token_of(simulation)
    assert followed.token not in repr(followed)


def test_a_restart_repairs_a_run_after_the_installation_key_was_lost(
    simulation: Simulation,
) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.train()
    simulation.settle()
    (old,) = secrets_of(simulation)
    simulation.start_operator()
    simulation.reconciler.token_of = partial(derive_token, b"another key" * 4)
    simulation.store.change(
        "trainingruns", "ns", "run", {"spec": {"restartNonce": "new key"}}
    )
    for _ in range(6):
        simulation.settle()
        simulation.reap()
    new = {mounted(pod) for pod in simulation.store.list("pods")}
    assert len(new) == 1 and old["metadata"]["name"] not in new
    assert new <= {secret["metadata"]["name"] for secret in secrets_of(simulation)}
