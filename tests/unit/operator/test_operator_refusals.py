"""For every response of the API server, the same pass reports it in the status, the rest of the run is
handled, and the request is retried."""

import asyncio
from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Simulation
from fake_kubernetes.store import RefusedError, Write

from evergrad_operator.core.objects.errors import ApiError, OperatorError
from evergrad_operator.core.objects.kinds import CLAIM, POD

WEBHOOK = (
    'Internal error occurred: failed calling webhook "w.example.org": connection refused'
)
QUOTA = 'pods "run-1-0" is forbidden: exceeded quota: small'


def begin(simulation: Simulation) -> None:
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.train()
    simulation.settle()


@pytest.fixture
def simulation() -> Simulation:
    simulation = Simulation()
    simulation.create_run()
    return simulation


def refuse(
    simulation: Simulation,
    status: int,
    reason: str,
    text: str = "",
    *,
    verb: str = "create",
    plural: str = "pods",
    name: str = "",
) -> list[str]:
    """Refuse from now on. Returns the attempted names."""
    tried: list[str] = []

    def before(write: Write) -> None:
        if (write.verb, write.plural) == (verb, plural) and name in write.name:
            tried.append(write.name)
            raise RefusedError(status, reason, text)

    simulation.store.before = before
    return tried


def grant(simulation: Simulation) -> None:
    simulation.store.before = lambda write: None


def conditions(simulation: Simulation) -> dict[str, tuple[str, str]]:
    return {
        one["type"]: (one["status"], one["reason"])
        for one in simulation.status["conditions"]
    }


def count_reads(simulation: Simulation, passes: int) -> list[tuple[str, str]]:
    """Return the requests that read from the API server in passes with progress."""
    simulation.cluster.reads.clear()
    for step in range(passes):
        simulation.now += 7.0
        simulation.train(step + 2)
        simulation.reconcile()
    return simulation.cluster.reads


ANSWERS = [
    (
        500,
        "InternalError",
        WEBHOOK,
        "WebhookFailed",
        "an admission webhook does not answer",
    ),
    (
        500,
        "InternalError",
        "Internal error occurred: allocated IP range is full",
        "ApiUnavailable",
        "range is full",
    ),
    (
        503,
        "ServiceUnavailable",
        "the server is currently unable to handle the request",
        "ApiUnavailable",
        "unable to handle",
    ),
    (429, "TooManyRequests", "too many requests", "ApiUnavailable", "too many requests"),
    (401, "Unauthorized", "Unauthorized", "ApiUnavailable", "Unauthorized"),
    (
        409,
        "Conflict",
        "the object has been modified",
        "Starting",
        "the object has been modified",
    ),
    (403, "Forbidden", QUOTA, "QuotaExceeded", "exceeded quota"),
    (404, "NotFound", "namespaces not found", "CreateFailed", "namespaces not found"),
]


@pytest.mark.parametrize(("status", "reason", "text", "told", "words"), ANSWERS)
def test_a_new_run_whose_pods_cannot_be_created_reports_why_after_one_pass(
    simulation: Simulation, status: int, reason: str, text: str, told: str, words: str
) -> None:
    refuse(simulation, status, reason, text)
    delay = simulation.reconcile()
    assert delay is not None and 0 < delay <= 60
    assert simulation.status["reason"] == told
    assert words in simulation.status["message"]
    assert conditions(simulation)["Ready"] == ("False", told)
    assert ("configmaps", "run-config") in simulation.children() and (
        "services",
        "run-coordinator",
    ) in simulation.children()
    grant(simulation)
    simulation.now += delay
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["reason"] == "Starting"


@pytest.mark.parametrize(("status", "reason", "text", "told", "words"), ANSWERS)
def test_a_lost_pod_that_cannot_be_replaced_is_counted_and_reported_after_one_pass(
    simulation: Simulation, status: int, reason: str, text: str, told: str, words: str
) -> None:
    del told
    begin(simulation)
    refuse(simulation, status, reason, text)
    simulation.end_pod("run-1-0", 137)
    simulation.reconcile()
    assert words in simulation.status["message"]
    assert simulation.status["nodes"]["running"] == 1
    assert simulation.status["restarts"]["total"] == 1
    grant(simulation)
    simulation.settle()
    assert "run-1-1" in simulation.pods()


@pytest.mark.parametrize(
    ("plural", "kind"), [("configmaps", "ConfigMap"), ("services", "Service")]
)
def test_a_child_that_cannot_be_created_is_reported_and_the_others_are_created(
    simulation: Simulation, plural: str, kind: str
) -> None:
    refuse(simulation, 500, "InternalError", WEBHOOK, plural=plural)
    simulation.reconcile()
    assert (
        simulation.status["reason"] == "WebhookFailed"
        and kind in simulation.status["message"]
    )
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    grant(simulation)
    simulation.settle()
    assert plural in {child[0] for child in simulation.children()}


def test_no_pod_is_created_while_the_record_on_the_volume_is_refused(
    simulation: Simulation,
) -> None:
    refuse(simulation, 500, "InternalError", WEBHOOK, plural="persistentvolumeclaims")
    simulation.reconcile()
    assert simulation.status["reason"] == "WebhookFailed"
    assert simulation.pods() == [] and simulation.pods("coordinator") == []
    grant(simulation)
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_foreign_pod_with_a_name_of_the_run_is_reported_and_the_other_pods_are_created() -> (
    None
):
    simulation = Simulation()
    theirs = {
        "metadata": {"name": "run-0-0", "namespace": "ns", "labels": {"app": "other"}},
        "spec": {"containers": [{}]},
    }
    with simulation.by_others():
        simulation.store.create("pods", {**theirs, "status": {"phase": "Running"}})
    simulation.create_run()
    simulation.reconcile()
    names = [name for plural, name in simulation.children() if plural == "pods"]
    assert names == ["run-0-0", "run-1-0", "run-coordinator-0"]
    assert simulation.status["reason"] == "NameTaken"
    assert (
        "Pod run-0-0 exists already and belongs to another owner"
        in simulation.status["message"]
    )
    assert conditions(simulation)["Stalled"] == ("True", "NameTaken")
    simulation.store.remove("pods", "ns", "run-0-0")
    simulation.now += 60
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_coordinator_that_accepts_no_bounds_does_not_block_the_replacement_of_a_lost_pod(
    simulation: Simulation,
) -> None:
    begin(simulation)
    post = simulation.coordinators.post_bounds

    async def fail(key: Any, bounds: Any, **_: Any) -> None:
        assert "run-1-1" in simulation.pods()  # bounds are posted last
        raise OperatorError(
            "the coordinator at 10.0.0.1 did not answer POST /bounds: TimeoutError"
        )

    simulation.coordinators.post_bounds = fail  # type: ignore[method-assign]
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": 1, "max": 3}}})
    simulation.end_pod("run-1-0", 137)
    delay = simulation.reconcile()
    assert delay is not None and 0 < delay <= 60
    assert simulation.pods() == ["run-0-0", "run-1-0", "run-1-1", "run-2-0"]
    assert (
        "the new bounds are not in force: the coordinator at 10.0.0.1 did not answer"
        in simulation.status["message"]
    )
    simulation.coordinators.post_bounds = post  # type: ignore[method-assign]
    simulation.now += delay
    simulation.settle()
    assert simulation.coordinators.bounds[-1].max == 3


def test_a_pod_that_cannot_be_deleted_is_reported_and_deleted_later(
    simulation: Simulation,
) -> None:
    begin(simulation)
    refuse(simulation, 500, "InternalError", WEBHOOK, verb="delete", name="run-1")
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    simulation.reconcile()
    assert simulation.status["phase"] == "Suspending"
    assert (
        "could not delete Pod run-1-0: an admission webhook does not answer"
        in simulation.status["message"]
    )
    is_leaving = {
        raw["metadata"]["name"]: "deletionTimestamp" in raw["metadata"]
        for raw in simulation.store.list("pods")
    }
    assert is_leaving == {"run-0-0": True, "run-1-0": False, "run-coordinator-0": False}
    grant(simulation)
    simulation.settle()
    assert "deletionTimestamp" in simulation.store.get("pods", "ns", "run-1-0")["metadata"]
    assert "webhook" not in simulation.status["message"]


def test_pods_that_cannot_be_listed_are_reported_and_neither_created_nor_deleted(
    simulation: Simulation,
) -> None:
    begin(simulation)
    list_all = simulation.cluster.list_all

    async def refuse_pods(kind: Any, *arguments: Any, **options: Any) -> Any:
        if kind is POD:
            raise ApiError(503, "ServiceUnavailable", "etcd has no leader")
        return await list_all(kind, *arguments, **options)

    simulation.cluster.list_all = refuse_pods  # type: ignore[method-assign]
    simulation.end_pod("run-1-0", 137)
    delay = simulation.reconcile()
    assert delay is not None and 0 < delay <= 60
    assert "run-1-1" not in simulation.pods()
    assert "etcd has no leader" in simulation.status["message"]
    assert simulation.status["restarts"]["total"] == 1
    simulation.cluster.list_all = list_all  # type: ignore[method-assign]
    simulation.settle()
    assert "run-1-1" in simulation.pods()
    assert "etcd" not in simulation.status["message"]


def test_a_claim_that_cannot_be_read_is_not_reported_as_missing() -> None:
    simulation = Simulation()
    with simulation.by_others():
        claim = {
            "metadata": {"name": "shared", "namespace": "ns"},
            "spec": {},
            "status": {"phase": "Bound"},
        }
        simulation.store.create("persistentvolumeclaims", claim)
    simulation.start_operator()
    simulation.cache.store.claims.pop(("ns", "shared"), None)
    get = simulation.cluster.get

    async def refuse_claims(kind: Any, *arguments: Any) -> Any:
        if kind is CLAIM:
            raise ApiError(503, "ServiceUnavailable", "etcd has no leader")
        return await get(kind, *arguments)

    simulation.cluster.get = refuse_claims  # type: ignore[method-assign]
    simulation.create_run(storage={"claimName": "shared"})
    simulation.reconcile()
    assert simulation.status["reason"] == "ApiUnavailable"
    assert simulation.pods() == []
    simulation.cluster.get = get  # type: ignore[method-assign]
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_webhook_that_never_responds_leaves_time_to_write_the_status(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = simulation.cluster.create

    async def hang(body: Any, **options: Any) -> Any:
        return await (
            asyncio.sleep(3600) if body["kind"] == "Pod" else create(body, **options)
        )

    simulation.cluster.create = hang  # type: ignore[method-assign]
    monkeypatch.setattr("evergrad_operator.edge.reconcile.apply.APPLY_SECONDS", 0.1)
    simulation.reconcile()
    assert (
        simulation.status["reason"] == "ApiUnavailable"
        and "no answer in time" in simulation.status["message"]
    )
    simulation.cluster.create = create  # type: ignore[method-assign]
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_refused_pod_that_is_no_longer_needed_is_not_requested_again(
    simulation: Simulation,
) -> None:
    refuse(simulation, 403, "Forbidden", QUOTA, name="run-1")
    simulation.settle()
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": 1, "max": 1}}})
    simulation.settle()
    assert simulation.refused() == []
    simulation.now += 120
    delay = simulation.reconcile()
    assert delay is None or delay >= 1.0


def test_a_run_at_its_quota_reads_nothing_in_passes_for_progress_alone(
    simulation: Simulation,
) -> None:
    tried = refuse(simulation, 403, "Forbidden", QUOTA, name="run-1")
    simulation.settle()
    simulation.start_pods()
    simulation.now += 60
    simulation.train(1)
    while len(tried) < 8:  # then it is retried once a minute
        simulation.now += 1.0
        simulation.reconcile()
    assert count_reads(simulation, passes=5) == []
    assert "exceeded quota" in simulation.status["message"]
    before = len(tried)
    simulation.now += 60
    simulation.reconcile()
    assert (
        len(tried) == before + 1
    )  # a minute later it is retried, after the existing pods are listed
    assert ("list", "pods") in simulation.cluster.reads


def test_pods_beyond_a_quota_cause_no_pass_before_the_first_retry() -> None:
    simulation = Simulation()
    simulation.create_run(nodes={"min": 1, "max": 5})
    made: list[str] = []

    def before(write: Write) -> None:
        if (write.verb, write.plural) == ("create", "pods"):
            if len(made) == 2:  # the coordinator and one node fit
                raise RefusedError(403, "Forbidden", QUOTA)
            made.append(write.name)

    simulation.store.before = before
    for _ in range(20):
        delay = simulation.reconcile()
        assert delay is not None and delay >= 1.0
        simulation.now += delay
    assert made == ["run-coordinator-0", "run-0-0"]
    assert {reason for _, _, reason in simulation.refused()} == {"Forbidden"}


def test_refused_pods_cause_no_pass_while_the_record_on_the_volume_is_refused() -> None:
    simulation = Simulation()
    simulation.create_run()
    refuse(simulation, 403, "Forbidden", QUOTA)
    simulation.settle()
    refuse(
        simulation,
        503,
        "ServiceUnavailable",
        "down",
        verb="patch",
        plural="persistentvolumeclaims",
    )
    simulation.store.change(
        "persistentvolumeclaims",
        "ns",
        "run",
        {"metadata": {"annotations": {"run.evergrad.dev/run": ""}}},
    )
    for _ in range(20):
        delay = simulation.reconcile()
        assert delay is not None and delay >= 1.0
        simulation.now += delay


def test_a_failed_pod_list_for_a_silent_coordinator_is_retried_and_then_no_longer_reported(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.fall_silent()
    simulation.now += 16
    list_all = simulation.cluster.list_all

    async def refuse_lists(*arguments: Any, **options: Any) -> Any:
        raise ApiError(503, "ServiceUnavailable", "etcd has no leader")

    simulation.cluster.list_all = refuse_lists  # type: ignore[method-assign]
    simulation.reconcile()
    assert [name for _, name, _ in simulation.refused()] == ["run"]
    simulation.cluster.list_all = list_all  # type: ignore[method-assign]
    simulation.coordinators.silent_since.clear()  # the whole network was down, and is up again
    simulation.now += 60
    simulation.train(5)
    delay = simulation.reconcile()
    assert simulation.refused() == []
    assert "etcd has no leader" not in simulation.status["message"]
    assert delay is None or delay >= 1.0


def make_claim(simulation: Simulation, name: str) -> None:
    claim = {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"accessModes": ["ReadWriteMany"]},
        "status": {"phase": "Bound"},
    }
    with simulation.by_others():
        simulation.store.create("persistentvolumeclaims", claim)


def test_a_refused_read_of_a_claim_that_is_no_longer_referenced_is_forgotten() -> None:
    simulation = Simulation()
    simulation.create_run(storage={"claimName": "old"})
    get = simulation.cluster.get

    async def refuse_old(kind: Any, namespace: str, name: str) -> Any:
        if name == "old":
            raise ApiError(403, "Forbidden", "old is forbidden")
        return await get(kind, namespace, name)

    simulation.cluster.get = refuse_old  # type: ignore[method-assign]
    simulation.reconcile()
    assert simulation.refused() == [("get", "old", "Forbidden")]
    # After repeated requests, it keeps its pause.
    simulation.reconcile()
    assert simulation.refused() == [("get", "old", "Forbidden")]

    make_claim(simulation, "new")
    simulation.store.change(
        "trainingruns", *KEY, {"spec": {"storage": {"claimName": "new"}}}
    )
    begin(simulation)
    assert simulation.refused() == []
    assert simulation.status["reason"] == "Training"


def test_a_claim_that_cannot_be_read_is_not_reported_as_a_refused_record() -> None:
    simulation = Simulation()
    make_claim(simulation, "shared")
    simulation.create_run(storage={"claimName": "shared"})
    begin(simulation)
    simulation.now += 60

    async def refuse_reads(kind: Any, namespace: str, name: str) -> Any:
        raise ApiError(403, "Forbidden", "reading is forbidden")

    simulation.cluster.get = refuse_reads  # type: ignore[method-assign]
    with simulation.by_others():
        simulation.store.remove("pods", "ns", simulation.pods()[0])
    simulation.reconcile()
    message = simulation.status["message"]
    assert "reading is forbidden" in message and "record" not in message


def test_an_ended_run_keeps_its_status_for_any_later_spec(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.train(10, phase="Complete", reason="AllStepsDone")
    for name in simulation.pods():
        simulation.end_pod(name)
    simulation.settle()
    before = simulation.status
    assert before["phase"] == "Complete"
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": "many"}}})
    simulation.reconcile()
    assert simulation.status == before


@pytest.mark.parametrize("status", [404, 409])
def test_a_conflict_while_writing_the_status_is_not_an_error(
    simulation: Simulation, status: int
) -> None:
    refuse(simulation, status, "Conflict", verb="patch", plural="trainingruns")
    delay = simulation.reconcile()
    assert status == 404 or (delay is not None and delay <= 5.0)
    grant(simulation)
    simulation.settle()
    assert simulation.status["phase"] == "Starting"
