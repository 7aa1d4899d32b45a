"""Reconciling with an in-memory cluster: the same children and status for any course of events, and no
needless write."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import virtual_time
from fake_kubernetes.recipe import TRAINING
from fake_kubernetes.simulation import KEY, Crash, Simulation, crash_at
from fake_kubernetes.store import RefusedError, Write

from evergrad_operator.core.decision import NodeBounds
from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.observe import VolumeRecord, build_record

Scenario = Callable[[Simulation], None]
NONE_CONNECTED = {"min": 1, "max": 2, "ready": 0, "connected": 0, "members": []}


def writes(simulation: Simulation, since: int = 0) -> list[tuple[str, str, str]]:
    return [
        (write.verb, write.plural, write.name)
        for write in simulation.store.writes[since:]
        if write.plural != "events"
    ]


def conditions(simulation: Simulation) -> dict[str, tuple[str, str]]:
    return {
        one["type"]: (one["status"], one["reason"])
        for one in simulation.status["conditions"]
    }


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


def test_a_new_run_gets_all_its_children_and_one_status_in_one_pass(
    simulation: Simulation,
) -> None:
    simulation.reconcile()
    assert simulation.children() == [
        ("configmaps", "run-config"),
        ("persistentvolumeclaims", "run"),
        ("pods", "run-0-0"),
        ("pods", "run-1-0"),
        ("pods", "run-coordinator-0"),
        ("secrets", simulation.store.list("secrets")[0]["metadata"]["name"]),
        ("services", "run-coordinator"),
    ]
    assert len([write for write in writes(simulation) if write[1] == "trainingruns"]) == 1
    assert writes(simulation)[-1] == ("patch", "trainingruns", "run")


def test_two_reconciles_of_an_unchanged_run_write_nothing(simulation: Simulation) -> None:
    begin(simulation)
    before = len(simulation.store.writes)
    for _ in range(2):
        simulation.reconcile()
    assert simulation.store.writes[before:] == []


def test_an_operator_that_restarts_with_an_unchanged_run_writes_nothing(
    simulation: Simulation,
) -> None:
    begin(simulation)
    before = len(simulation.store.writes)
    simulation.start_operator()
    for _ in range(3):
        simulation.reconcile()
    assert simulation.store.writes[before:] == []


@pytest.mark.parametrize("labels", [{}, {"evergrad.dev/run": "run"}])
def test_an_object_of_another_owner_is_neither_taken_over_nor_deleted(
    labels: dict[str, str],
) -> None:
    simulation = Simulation()
    theirs = {
        "metadata": {"name": "run-config", "namespace": "ns", "labels": labels},
        "data": {"theirs": "1"},
    }
    with simulation.by_others():
        simulation.store.create("configmaps", theirs)
    simulation.start_operator()
    simulation.create_run()
    simulation.reconcile()
    stored = simulation.store.get("configmaps", "ns", "run-config")
    assert stored["data"] == {"theirs": "1"} and "ownerReferences" not in stored["metadata"]
    assert simulation.status["reason"] == "NameTaken"
    assert (
        "ConfigMap run-config exists already and belongs to another owner. Delete or rename it"
        in simulation.status["message"]
    )
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    for _ in range(3):
        simulation.settle()
        simulation.reap()
    assert simulation.store.get("configmaps", "ns", "run-config")["data"] == {"theirs": "1"}
    simulation.store.remove("configmaps", "ns", "run-config")
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": False}})
    simulation.now += 120
    simulation.settle()
    assert simulation.store.get("configmaps", "ns", "run-config")["metadata"][
        "ownerReferences"
    ]


def test_leftovers_that_are_not_pods_are_reported_together_and_no_pod_is_created() -> None:
    simulation = Simulation()
    labels = {"app.kubernetes.io/managed-by": "evergrad", "evergrad.dev/run": "run"}
    with simulation.by_others():
        for kind, name in (("configmaps", "run-config"), ("services", "run-coordinator")):
            metadata = {"name": name, "namespace": "ns", "labels": labels}
            simulation.store.create(kind, {"metadata": metadata})
    simulation.start_operator()
    simulation.create_run()
    simulation.reconcile()
    assert simulation.status["reason"] == "NameTaken"
    message = simulation.status["message"]
    assert "ConfigMap run-config" in message and "Service run-coordinator" in message
    assert "evergrad.dev/run=run" in message
    assert simulation.pods() == []


def test_leftovers_of_an_older_run_of_the_same_name_are_waited_for(
    simulation: Simulation,
) -> None:
    simulation.reconcile()
    del simulation.store.objects[
        "trainingruns", *KEY
    ]  # the garbage collector has not acted yet
    simulation.create_run()
    simulation.start_operator()
    simulation.reconcile()
    assert ("create", "run-0-0", "NameLeaving") in simulation.refused()
    assert "of an older run of this name is being deleted" in simulation.status["message"]
    for plural, name in simulation.children():
        if plural != "persistentvolumeclaims":
            simulation.store.remove(plural, "ns", name)
    simulation.settle()
    uid = simulation.store.get("trainingruns", *KEY)["metadata"]["uid"]
    assert (
        simulation.store.get("configmaps", "ns", "run-config")["metadata"][
            "ownerReferences"
        ][0]["uid"]
        == uid
    )


@pytest.mark.parametrize("exit_code", [70, 137, 143])
def test_ended_nodes_are_replaced_only_after_the_coordinator_was_polled(
    simulation: Simulation, exit_code: int
) -> None:
    begin(simulation)
    failure = {
        "cause": "user_error",
        "node": "1",
        "rank": 1,
        "exitCode": 1,
        "message": "ValueError: x",
        "secondsAgo": 1,
    }
    running = simulation.coordinators.answers[KEY]
    outcome = {
        **running,
        "phase": "Failed",
        "reason": "FailuresWithoutProgress",
        "lastFailure": failure,
    }
    simulation.coordinators.unheard[KEY] = outcome
    simulation.end_pod("run-1-0", exit_code)
    simulation.settle()
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Failed",
        "UserError",
    )
    assert "run-1-1" not in simulation.pods()


def test_a_step_that_the_coordinator_knew_before_a_pod_was_killed_is_not_progress(
    simulation: Simulation,
) -> None:
    begin(simulation)
    running = simulation.coordinators.answers[KEY]
    simulation.coordinators.answers[KEY] = {**running, "step": 19, "newSteps": 20}
    simulation.settle()
    # The next poll would show a step that was finished before the kill.
    simulation.coordinators.unheard[KEY] = {**running, "step": 20, "newSteps": 21}
    simulation.end_pod("run-1-0", 137, reason="OOMKilled")
    simulation.settle()
    assert simulation.status["failures"]["withoutProgress"] == 1
    simulation.now += 60
    simulation.settle()
    assert simulation.status["failures"]["withoutProgress"] == 1
    simulation.coordinators.answers[KEY] = {**running, "step": 21, "newSteps": 22}
    simulation.now += 60
    simulation.settle()
    assert simulation.status["failures"]["withoutProgress"] == 0


def test_without_a_coordinator_status_after_a_kill_the_next_observed_step_is_not_progress(
    simulation: Simulation,
) -> None:
    begin(simulation)
    running = simulation.coordinators.answers[KEY]
    asked = simulation.coordinators.ask
    simulation.coordinators.ask = no_answer  # type: ignore[method-assign]
    simulation.end_pod("run-1-0", 137, reason="OOMKilled")
    simulation.settle()
    # Later responses come from polls. Only responses after the first can show progress.
    simulation.coordinators.ask = asked  # type: ignore[method-assign]
    for step, failures in ((20, 1), (20, 1), (21, 0)):
        simulation.coordinators.answers[KEY] = {
            **running,
            "step": step,
            "newSteps": step + 1,
        }
        simulation.coordinators.asked_at[KEY] = simulation.coordinators.clock()
        simulation.now += 60
        simulation.settle()
        assert simulation.status["failures"]["withoutProgress"] == failures


async def no_answer(key: Any) -> None:
    """Return nothing, like a poll of a coordinator that does not answer in time."""


def slow_down(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Let the API server need ``seconds`` for the creation of a pod."""
    create = simulation.cluster.create

    async def create_slowly(body: Any, **options: Any) -> Any:
        if body["kind"] == "Pod":
            await asyncio.sleep(seconds)
        return await create(body, **options)

    monkeypatch.setattr(simulation.cluster, "create", create_slowly)


def test_pods_that_wait_for_a_request_slot_are_not_reported_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation()
    simulation.create_run(nodes={"min": 200, "max": 200})
    slow_down(simulation, monkeypatch, 4.0)
    num_passes = 0
    while len(simulation.pods()) < 200:
        before = len(simulation.pods())
        delay = virtual_time.run(simulation.reconciler.reconcile(KEY))
        simulation.deliver()
        num_passes += 1
        assert len(simulation.pods()) > before
        assert simulation.refused() == []
        assert simulation.status["reason"] == "Starting"
        assert len(simulation.pods()) == 200 or (delay is not None and delay <= 1.0)
        simulation.now += delay or 0.0
    assert num_passes > 1, "the first pass had no time for all"


def test_a_large_run_does_not_delay_the_requests_of_a_small_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation()
    simulation.create_run(nodes={"min": 200, "max": 200})
    simulation.create_run("small", nodes={"min": 1, "max": 1})
    slow_down(simulation, monkeypatch, 4.0)

    async def main() -> None:
        large = asyncio.create_task(simulation.reconciler.reconcile(KEY))
        await asyncio.sleep(10.0)
        await simulation.reconciler.reconcile((KEY[0], "small"))
        await large

    virtual_time.run(main())
    assert simulation.refused() == simulation.refused((KEY[0], "small")) == []
    assert "small-0-0" in simulation.pods()


def test_a_slow_api_server_leaves_time_to_write_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation()
    with simulation.by_others():
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared", "namespace": "ns"},
            "spec": {"accessModes": ["ReadWriteMany"]},
        }
        simulation.store.create("persistentvolumeclaims", claim)
    simulation.create_run(storage={"claimName": "shared"})
    cluster = simulation.cluster

    def slowed(act: Any, seconds: float) -> Any:
        async def act_slowly(*arguments: Any, **options: Any) -> Any:
            is_of_status = options.get("subresource") == "status"
            await asyncio.sleep(10.0 if is_of_status else seconds)
            return await act(*arguments, **options)

        return act_slowly

    for name in ("get", "list_all"):
        monkeypatch.setattr(cluster, name, slowed(getattr(cluster, name), 14.0))
    for name in ("create", "apply", "merge"):
        monkeypatch.setattr(cluster, name, slowed(getattr(cluster, name), 1000.0))
    virtual_time.run(simulation.reconciler.reconcile(KEY))
    status = simulation.status
    assert (status["phase"], status["reason"]) == ("Waiting", "ApiUnavailable")


def test_a_suspension_polls_the_coordinator_immediately_when_no_node_is_left(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    simulation.settle()
    running = simulation.coordinators.answers[KEY]
    nodes = {**running["nodes"], "ready": 0, "connected": 0}
    simulation.coordinators.unheard[KEY] = {**running, "nodes": nodes, "checkpointStep": 7}
    for name in simulation.pods():
        simulation.store.remove("pods", "ns", name)
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.pods("coordinator") == []
    status = simulation.status
    assert (status["phase"], status["checkpoint"]["step"]) == ("Suspended", 7)


@pytest.mark.parametrize(
    ("kind", "name"), [("configmaps", "run-config"), ("services", "run-coordinator")]
)
def test_objects_that_new_pods_need_are_restored_before_the_pods_are_created(
    simulation: Simulation, kind: str, name: str
) -> None:
    begin(simulation)
    simulation.store.remove(kind, "ns", name)
    simulation.reconcile()
    assert (kind, name) not in simulation.children()  # no event reports it
    before = len(simulation.store.writes)
    simulation.store.remove("pods", "ns", "run-0-0")
    simulation.settle()
    made = [
        (write[1], write[2])
        for write in writes(simulation, before)
        if write[1] != "trainingruns"
    ]
    assert made == [(kind, name), ("pods", "run-0-1")]


def test_an_operator_that_restarts_with_a_complete_run_writes_nothing(
    simulation: Simulation,
) -> None:
    begin(simulation)
    complete(simulation)
    before = len(simulation.store.writes)
    simulation.start_operator()
    simulation.settle()
    assert simulation.store.writes[before:] == []


@pytest.mark.parametrize("ahead", [0.0, 60.0, 240.0])
def test_pods_have_their_grace_period_although_the_clock_of_the_operator_is_ahead(
    simulation: Simulation, ahead: float
) -> None:
    begin(simulation)
    simulation.reconciler.clock = lambda: simulation.now + ahead
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    simulation.settle()
    metadata = {
        "deletionTimestamp": format_time(simulation.now + 30),
        "deletionGracePeriodSeconds": 30,
    }
    for name in ("run-0-0", "run-1-0"):
        simulation.store.change("pods", "ns", name, {"metadata": metadata})
    simulation.train(5, nodes=NONE_CONNECTED)
    for _ in range(3):
        simulation.settle()
        simulation.now += 10
    assert simulation.status["phase"] == "Suspending" and simulation.pods("coordinator")

    # After its grace period a pod is on a host that does not respond. This also holds for an operator that
    # has just started, if its clock is right.
    simulation.now += 11
    simulation.settle()
    assert simulation.store.get("pods", "ns", "run-coordinator-0")["metadata"].get(
        "deletionTimestamp"
    )
    simulation.store.remove("pods", "ns", "run-coordinator-0")
    simulation.settle()
    assert simulation.status["phase"] == "Suspended"
    simulation.now += 300
    simulation.start_operator()
    before = len(simulation.store.writes)
    simulation.settle()
    assert simulation.store.writes[before:] == []


def complete(simulation: Simulation) -> None:
    for name in simulation.pods():
        if simulation.store.get("pods", "ns", name)["status"]["phase"] == "Running":
            simulation.end_pod(name)
    simulation.settle()
    simulation.reap()
    simulation.settle()


def scenario_completes(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    complete(simulation)


def scenario_loses_a_pod(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    if "run-0-0" in simulation.pods():
        simulation.store.remove("pods", "ns", "run-0-0")
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    complete(simulation)


def scenario_is_suspended_and_resumed(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    for _ in range(4):
        simulation.settle()
        simulation.reap()
    assert simulation.pods() == []
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": False}})
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    complete(simulation)


def scenario_prepares_first(simulation: Simulation) -> None:
    simulation.create_run(preparation={"resources": {"requests": {"cpu": "2"}}})
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    assert simulation.pods() == simulation.pods("coordinator") == []
    simulation.end_pod("run-prepare-0", 137)
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    assert simulation.pods() == simulation.pods("coordinator") == []
    simulation.end_pod("run-prepare-1")
    begin(simulation)
    complete(simulation)


def end_with_message(simulation: Simulation, exit_code: int, **words: Any) -> None:
    """The coordinator sends its last messages, and all nodes end before it is polled again."""
    simulation.train(5, nodes=NONE_CONNECTED, **words)
    for name in simulation.pods():
        simulation.end_pod(name, exit_code)
    for _ in range(3):
        simulation.settle()
        simulation.reap()
        if not simulation.pods("coordinator"):
            simulation.coordinators.answers.clear()
    simulation.now += 60
    simulation.settle()


def scenario_stops_on_request(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    end_with_message(simulation, 75, phase="Stopped", reason="AfterStep", checkpointStep=5)


def scenario_stops_before_a_non_finite_step(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    end_with_message(simulation, 75, phase="Stopped", reason="NonFinite", checkpointStep=5)


def scenario_is_failed_by_its_coordinator(simulation: Simulation) -> None:
    simulation.create_run()
    begin(simulation)
    end_with_message(simulation, 70, phase="Failed", reason="TooManyFailures")


@pytest.mark.parametrize(
    ("exit_code", "phase", "reason"),
    [(75, "Stopped", "AfterStep"), (70, "Failed", "TooManyFailures")],
)
def test_a_run_whose_end_was_written_is_reconciled_again_a_second_later(
    exit_code: int, phase: str, reason: str
) -> None:
    simulation = Simulation()
    simulation.create_run()
    begin(simulation)
    simulation.train(5, phase=phase, reason=reason, nodes=NONE_CONNECTED)
    for name in simulation.pods():
        simulation.end_pod(name, exit_code)
    coordinators = simulation.pods("coordinator")
    # Nothing else is certain to cause a pass, because the write of the status may fail.
    assert simulation.reconcile() == 1.0
    assert simulation.pods("coordinator") == coordinators


def scenario_fails_and_is_cleaned_up_at_once(simulation: Simulation) -> None:
    simulation.create_run(nodes={"min": 1, "max": 1}, ttlSecondsAfterFinished=0)
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.end_pod("run-0-0", 64)
    simulation.settle()
    simulation.reap()
    simulation.settle()


SCENARIOS = [
    scenario_completes,
    scenario_loses_a_pod,
    scenario_is_suspended_and_resumed,
    scenario_prepares_first,
    scenario_stops_on_request,
    scenario_stops_before_a_non_finite_step,
    scenario_is_failed_by_its_coordinator,
    scenario_fails_and_is_cleaned_up_at_once,
]


def outcome(simulation: Simulation) -> Any:
    """Return the parts that must be the same at the end, for any course of events."""
    pods = [
        (raw["metadata"]["name"], raw["status"]["phase"])
        for raw in simulation.store.list("pods")
    ]
    conditions = [
        (one["type"], one["status"], one["reason"])
        for one in simulation.status["conditions"]
    ]
    others = [child for child in simulation.children() if child[0] != "pods"]
    return (
        pods,
        others,
        simulation.status["phase"],
        conditions,
        simulation.status["restarts"],
        simulation.status["nodes"],
    )


def run_scenario(scenario: Scenario, simulation: Simulation) -> None:
    """Run the events; each time the operator is killed, another one is started."""
    original = simulation.settle

    def settle(key: Any = KEY, *, most: int = 20) -> Any:
        while True:
            try:
                return original(key, most=most)
            except Crash:
                simulation.store.before = simulation.store.after = lambda write: None
                simulation.start_operator()

    simulation.settle = settle  # type: ignore[method-assign]
    scenario(simulation)


def with_crash(scenario: Scenario, number: int, *, is_before: bool) -> Simulation:
    simulation = Simulation()
    original = simulation.create_run

    def create_run(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        simulation.store.before, simulation.store.after = crash_at(
            number, is_before=is_before
        )

    simulation.create_run = create_run  # type: ignore[method-assign]
    run_scenario(scenario, simulation)
    return simulation


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("is_before", [True, False])
def test_an_operator_killed_before_or_after_any_of_its_writes_reaches_the_same_end(
    scenario: Scenario, is_before: bool
) -> None:
    plain = Simulation()
    scenario(plain)
    expected, count = outcome(plain), len(writes(plain))
    assert count > 8
    ends = [
        outcome(with_crash(scenario, number, is_before=is_before))
        for number in range(count)
    ]
    assert [number for number, end in enumerate(ends) if end != expected] == []


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("status", [500, 409])
def test_a_write_that_fails_once_at_any_point_reaches_the_same_end(
    scenario: Scenario, status: int
) -> None:
    plain = Simulation()
    scenario(plain)
    expected, count = outcome(plain), len(writes(plain))
    for number in range(count):
        simulation, seen = Simulation(), [-1]

        def fail(write: Write, number: int = number, seen: list[int] = seen) -> None:
            if write.verb == "delete" and status == 409:
                return  # this is how a delete reports a different object
            seen[0] += write.plural != "events"
            if seen[0] == number and write.plural != "events":
                seen[0] += 1
                raise RefusedError(status, "Planned")

        original = simulation.create_run

        def create_run(
            original: Any = original,
            simulation: Simulation = simulation,
            fail: Any = fail,
            **spec: Any,
        ) -> None:
            original(**spec)
            simulation.store.before = fail

        simulation.create_run = create_run  # type: ignore[method-assign]
        settle = simulation.settle
        simulation.settle = lambda *_, settle=settle, **__: [settle(), settle()][1]  # type: ignore[method-assign]
        scenario(simulation)
        assert outcome(simulation) == expected, number


def test_pods_are_listed_before_any_is_created_so_that_a_stale_cache_does_no_harm(
    simulation: Simulation,
) -> None:
    simulation.settle()
    simulation.start_operator()
    for name in ("run-0-0", "run-1-0", "run-coordinator-0"):
        raw = simulation.store.get("pods", "ns", name)
        simulation.cache.forget("pods", raw)
    before = len(simulation.store.writes)
    simulation.settle()
    assert [write for write in writes(simulation, before) if write[1] == "pods"] == []


def test_pods_whose_end_the_watch_missed_are_replaced_after_a_list(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.store.remove("pods", "ns", "run-0-0", is_silent=True)
    simulation.settle()
    assert simulation.pods() == ["run-1-0"]
    changed = simulation.cache.replace(
        "pods",
        simulation.store.list("pods"),
        version=simulation.store.version,
        covers=lambda namespace: True,
    )
    assert changed == {KEY}
    simulation.settle()
    assert simulation.pods() == ["run-0-1", "run-1-0"]


def test_a_pod_that_was_created_in_the_meantime_is_used_unchanged(
    simulation: Simulation,
) -> None:
    def occupy_the_name(write: Write) -> None:
        if write.plural == "pods" and write.name == "run-0-0":
            simulation.store.before = lambda write: None
            raise RefusedError(409, "AlreadyExists")

    simulation.store.before = occupy_the_name
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_pods_of_a_run_without_a_status_that_the_cache_never_saw_are_found(
    simulation: Simulation,
) -> None:
    simulation.settle()
    simulation.start_operator()
    simulation.store.change("trainingruns", *KEY, {"status": None})
    simulation.cache.replace(
        "trainingruns",
        simulation.store.list("trainingruns"),
        version=10**9,
        covers=lambda namespace: True,
    )
    for name in ("run-0-0", "run-1-0", "run-coordinator-0"):
        raw = simulation.store.get("pods", "ns", name)
        simulation.cache.forget("pods", raw)
    before = len(simulation.store.writes)
    simulation.settle()
    created = [
        write for write in writes(simulation, before) if write[:2] == ("create", "pods")
    ]
    assert simulation.pods() == ["run-0-0", "run-1-0"], created


def test_a_child_that_was_changed_is_applied_once_and_foreign_fields_stay(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.store.change(
        "configmaps",
        "ns",
        "run-config",
        {"data": {"trainingrun.json": "{}"}, "metadata": {"annotations": {"x": "y"}}},
    )
    before = len(simulation.store.writes)
    simulation.cache.replace(
        "children",
        [*simulation.store.list("configmaps"), *simulation.store.list("services")],
        version=simulation.store.version,
        covers=lambda namespace: True,
    )
    simulation.settle()
    assert writes(simulation, before) == [("patch", "configmaps", "run-config")]
    raw = simulation.store.get("configmaps", "ns", "run-config")
    assert raw["data"]["trainingrun.json"] != "{}"
    assert raw["metadata"]["annotations"]["x"] == "y"


def test_a_child_that_was_deleted_is_created_again(simulation: Simulation) -> None:
    begin(simulation)
    simulation.store.remove("services", "ns", "run-coordinator")
    simulation.cache.replace(
        "children",
        simulation.store.list("configmaps"),
        version=simulation.store.version,
        covers=lambda _: True,
    )
    simulation.settle()
    assert ("services", "run-coordinator") in simulation.children()


def test_progress_alone_is_written_every_ten_seconds_at_most(
    simulation: Simulation,
) -> None:
    begin(simulation)
    before = len(simulation.store.writes)
    for step in range(2, 42):
        simulation.now += 1.0
        simulation.train(step)
        simulation.reconcile()
    assert 3 <= len(writes(simulation, before)) <= 5


def test_a_quota_that_refuses_pods_is_reported_and_retried_slowly_until_the_run_continues(
    simulation: Simulation,
) -> None:
    def refuse(write: Write) -> None:
        if (
            write.plural == "pods"
            and write.verb == "create"
            and "coordinator" not in write.name
        ):
            tries.append(write.name)
            raise RefusedError(
                403, "Forbidden", 'pods "run-0-0" is forbidden: exceeded quota: small'
            )

    tries: list[str] = []
    simulation.store.before = refuse
    for _ in range(300):
        delay = simulation.reconcile()
        assert delay is None or delay >= 0
        simulation.now += 1.0
    assert simulation.status["reason"] == "QuotaExceeded"
    assert "exceeded quota: small" in simulation.status["message"]
    assert len(tries) <= 16
    assert len(simulation.store.list("events")) < 15
    simulation.store.before = lambda write: None
    simulation.now += 400
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["reason"] != "QuotaExceeded"


def test_a_run_with_the_name_of_a_deleted_run_inherits_no_refusals_or_progress(
    simulation: Simulation,
) -> None:
    def refuse(write: Write) -> None:
        if write.plural == "pods" and "coordinator" not in write.name:
            raise RefusedError(403, "Forbidden", "exceeded quota")

    simulation.store.before = refuse
    for _ in range(8):
        simulation.reconcile()
        simulation.start_pods()
    simulation.train(step=7)
    simulation.reconcile()
    assert simulation.status["progress"]["step"] == 7
    simulation.store.before = lambda write: None

    # No pass runs between the two, and no time passes that a refused step waits for.
    simulation.store.remove("trainingruns", *KEY)
    simulation.create_run()
    for _ in range(4):
        simulation.reconcile()
        assert "step" not in simulation.status.get("progress", {})
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_refused_run_is_not_reconciled_again_at_once(simulation: Simulation) -> None:
    def refuse(write: Write) -> None:
        if write.plural == "pods":
            raise RefusedError(403, "Forbidden", "exceeded quota")

    simulation.store.before = refuse
    simulation.reconcile()
    delay = simulation.reconcile()
    assert delay is not None and delay > 0.3


def test_a_malformed_spec_is_reported_once_in_the_status_and_by_one_event(
    simulation: Simulation,
) -> None:
    with simulation.by_others():
        simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": "many"}}})
    for _ in range(5):
        assert simulation.reconcile() is None
    assert writes(simulation) == [("patch", "trainingruns", "run")]
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Waiting",
        "InvalidSpec",
    )
    assert "spec.nodes.min" in simulation.status["message"]
    assert conditions(simulation)["Stalled"] == ("True", "InvalidSpec")
    assert conditions(simulation)["Ready"] == ("False", "InvalidSpec")
    (event,) = simulation.store.list("events")
    assert event["reason"] == "InvalidSpec" and "spec.nodes.min" in event["message"]


def test_quoted_numbers_of_an_earlier_version_are_reported_in_one_event_and_the_run_continues(
    simulation: Simulation,
) -> None:
    with simulation.by_others():
        simulation.store.change(
            "trainingruns", *KEY, {"spec": {"nodes": {"min": "2", "max": "2"}}}
        )
    begin(simulation)
    for _ in range(3):
        simulation.reconcile()
    assert len(simulation.store.list("pods")) >= 2
    assert simulation.status["reason"] != "InvalidSpec"
    [event] = [
        one for one in simulation.store.list("events") if one["reason"] == "OutdatedSpec"
    ]
    assert "spec.nodes.min" in event["message"] and "Write 2." in event["message"]
    assert (event["type"], event.get("count", 1)) == ("Warning", 1)


@pytest.mark.parametrize("end", ["complete", "deleted"])
def test_quoted_numbers_of_an_ended_run_are_not_reported(
    simulation: Simulation, end: str
) -> None:
    begin(simulation)
    if end == "complete":
        for name in simulation.pods():
            simulation.end_pod(name)
        simulation.settle()
        assert simulation.status["phase"] == "Complete"
    else:
        leaving = {"metadata": {"deletionTimestamp": format_time(simulation.now)}}
        with simulation.by_others():
            simulation.store.change("trainingruns", *KEY, leaving)
    # As an object of an earlier version: the operator first sees the quotes when it starts.
    with simulation.by_others():
        simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": "1"}}})
    simulation.start_operator()
    simulation.settle()
    assert "OutdatedSpec" not in {one["reason"] for one in simulation.store.list("events")}


def test_a_run_of_the_same_name_never_gets_the_status_of_its_predecessor(
    simulation: Simulation,
) -> None:
    original = simulation.cluster.apply

    async def replace_first(body: Any, **options: Any) -> Any:
        if options.get("subresource") == "status":
            simulation.cluster.apply = original  # type: ignore[method-assign]
            simulation.store.on_change = lambda *_: None
            simulation.store.remove("trainingruns", *KEY)
            simulation.create_run()
        return await original(body, **options)

    simulation.cluster.apply = replace_first  # type: ignore[method-assign]
    simulation.reconcile()
    assert simulation.status == {"observedGeneration": -1}, "as a new run has it"


def test_a_deleted_run_is_forgotten(simulation: Simulation) -> None:
    begin(simulation)
    simulation.store.remove("trainingruns", *KEY)
    assert simulation.reconcile() is None
    assert not simulation.coordinators._followed
    assert simulation.cache.store.known() <= {KEY}


def test_changed_bounds_are_posted_to_the_coordinator(simulation: Simulation) -> None:
    begin(simulation)
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"min": 2, "max": 3}}})
    simulation.settle()
    assert simulation.coordinators.bounds[-1] == NodeBounds(2, 3, 3)


def test_a_reconcile_that_hangs_ends_at_its_timeout(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(
        "evergrad_operator.edge.reconcile.reconciler.RECONCILE_SECONDS", 0.05
    )
    simulation.cluster.create = hang  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        simulation.reconcile()


def test_a_replaced_node_that_exits_with_64_does_not_disturb_the_training_group(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.end_pod("run-1-0", 137)
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.now += 1
    simulation.end_pod(
        "run-1-1", 64, message="hello.fingerprint.torch: 2.14; the group has 2.13"
    )
    simulation.settle()
    assert simulation.status["phase"] == "Running"
    for _ in range(3):
        simulation.now += 11
        simulation.settle()
    assert [
        raw
        for raw in simulation.store.list("pods")
        if raw["metadata"].get("deletionTimestamp")
    ] == []
    assert "run-1-2" in simulation.pods()


def share(simulation: Simulation, **annotations: str) -> None:
    """An existing claim, which a run may name."""
    metadata = {"name": "shared", "namespace": "ns", "annotations": annotations}
    with simulation.by_others():
        claim = {"metadata": metadata, "spec": {}, "status": {"phase": "Bound"}}
        simulation.store.create("persistentvolumeclaims", claim)


def test_no_pod_is_created_before_the_volume_has_the_record_of_the_run() -> None:
    simulation = Simulation()
    share(simulation)

    def refuse(write: Write) -> None:
        if write.plural == "persistentvolumeclaims":
            raise RefusedError(
                422,
                "Invalid",
                "metadata.annotations: Too long: may not be more than 262144 bytes",
            )

    simulation.create_run(storage={"claimName": "shared"})
    simulation.store.before = refuse
    for _ in range(3):
        simulation.settle()
        simulation.now += 61
    assert (simulation.pods(), simulation.pods("coordinator")) == ([], [])
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Waiting",
        "VolumeRecordRefused",
    )
    simulation.store.before = lambda write: None
    begin(simulation)
    assert simulation.status["phase"] == "Running"


def test_the_oldest_records_of_deleted_runs_are_dropped_from_a_full_shared_volume() -> None:
    simulation = Simulation()
    gone = [
        VolumeRecord(f"gone-{number}", f"gone-{number}", "r", 0, "u", float(number))
        for number in range(150)
    ]
    records = {f"run.evergrad.dev/{record.run}": build_record(record) for record in gone}
    living = {
        "run.evergrad.dev/old": build_record(VolumeRecord("old", "old", "r", 0, "u", 0.0)),
        "theirs": "stays",
    }
    share(simulation, **records, **living)
    simulation.create_run("old", storage={"claimName": "shared"})
    simulation.create_run(storage={"claimName": "shared"})
    begin(simulation)
    kept = simulation.store.get("persistentvolumeclaims", "ns", "shared")["metadata"][
        "annotations"
    ]
    newest = {f"run.evergrad.dev/gone-{number}" for number in range(50, 150)}
    # They were not complete: their checkpoints may still exist, and evergrad prune needs this information.
    count = "evergrad.dev/dropped-unfinished-runs"
    runs = {"run.evergrad.dev/old", "run.evergrad.dev/run"}
    assert set(kept) == {"theirs", *runs, *newest, count}
    assert kept[count] == "50"
    before = len(simulation.store.writes)
    simulation.settle()
    assert writes(simulation, before) == []


def test_a_claim_that_a_user_created_under_the_name_of_the_run_is_used_unchanged() -> None:
    simulation = Simulation()
    metadata = {"name": "run", "namespace": "ns", "labels": {"team": "x"}}
    spec = {"accessModes": ["ReadWriteMany"], "volumeName": "v"}
    claim = {"metadata": metadata, "spec": spec, "status": {"phase": "Bound"}}
    with simulation.by_others():
        simulation.store.create("persistentvolumeclaims", claim)
    simulation.create_run(storage={"size": "1Gi", "whenDeleted": "Delete"})
    begin(simulation)
    assert simulation.status["phase"] == "Running"
    kept = simulation.store.get("persistentvolumeclaims", "ns", "run")
    assert kept["spec"] == spec and kept["metadata"]["labels"] == {"team": "x"}
    assert list(kept["metadata"]["annotations"]) == ["run.evergrad.dev/run"]
    assert "ownerReferences" not in kept["metadata"]
    assert simulation.status["volume"] == {"goesWithRun": False}
    before = len(simulation.store.writes)
    simulation.settle()
    assert writes(simulation, before) == []


def inject(simulation: Simulation, name: str, ours: dict[str, Any]) -> None:
    """A pod with a mesh container, which the kubelet lists before ours and which continues to run after ours
    has ended."""
    raw = simulation.store.get("pods", "ns", name)
    sidecar = {
        "name": "istio-proxy",
        "state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}},
        "ready": True,
    }
    container = {
        "name": raw["spec"]["containers"][0]["name"],
        "state": ours,
        "ready": "running" in ours,
    }
    status = {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "containerStatuses": [sidecar, container],
        "conditions": [],
    }
    simulation.store.change("pods", "ns", name, {"status": status})


def test_a_pod_whose_trainer_has_ended_is_replaced_and_deleted_although_its_sidecar_runs(
    simulation: Simulation,
) -> None:
    begin(simulation)
    inject(simulation, "run-0-0", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    simulation.settle()
    assert "run-0-1" in simulation.pods()
    assert simulation.status["attempts"] == [
        {
            "pod": "run-0-0",
            "cause": "OutOfMemory",
            "exitCode": 137,
            "at": simulation.status["attempts"][0]["at"],
        }
    ]
    simulation.now += 1
    simulation.settle()
    assert simulation.store.get("pods", "ns", "run-0-0")["metadata"]["deletionTimestamp"]
    simulation.reap()
    simulation.settle()
    assert (simulation.pods(), simulation.status["restarts"]["total"]) == (
        ["run-0-1", "run-1-0"],
        1,
    )


def test_a_complete_run_leaves_no_pod_in_which_only_a_sidecar_runs(
    simulation: Simulation,
) -> None:
    begin(simulation)
    for name in simulation.pods():
        inject(simulation, name, {"terminated": {"exitCode": 0}})
    simulation.settle()
    simulation.now += 1
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert (simulation.status["phase"], simulation.pods()) == ("Complete", [])


def test_a_sidecar_that_is_listed_first_does_not_hide_the_trainer_or_the_coordinator(
    simulation: Simulation,
) -> None:
    begin(simulation)
    for name in (*simulation.pods(), *simulation.pods("coordinator")):
        inject(simulation, name, {"running": {}})
    before = set(simulation.store.objects)
    simulation.settle()
    assert (simulation.status["phase"], simulation.status["nodes"]["running"]) == (
        "Running",
        2,
    )
    inject(simulation, "run-coordinator-0", {"terminated": {"exitCode": 1}})
    simulation.settle()
    assert (set(simulation.store.objects), simulation.pods("coordinator")) == (
        before,
        ["run-coordinator-0"],
    )


@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_a_pod_without_an_owner_belongs_to_no_run_although_it_has_its_labels(
    simulation: Simulation, role: str
) -> None:
    begin(simulation)
    labels = {
        "evergrad.dev/run": "run",
        "evergrad.dev/role": role,
        "evergrad.dev/index": "0",
        "evergrad.dev/attempt": "7",
    }
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0}}}
    copied = {
        "metadata": {"name": "copy", "namespace": "ns", "labels": labels},
        "spec": {"containers": [{"name": "trainer", "image": "x"}]},
        "status": {"phase": "Succeeded", "containerStatuses": [ended]},
    }
    with simulation.by_others():
        simulation.store.create("pods", copied)
    before = simulation.status
    for _ in range(2):
        simulation.settle()
        simulation.now += 61
    assert {**simulation.status, "progress": {}} == {**before, "progress": {}}
    assert (
        simulation.store.get("pods", "ns", "copy")["metadata"].get("deletionTimestamp")
        is None
    )


def test_edited_settings_are_compared_with_the_config_map_before_it_is_applied_again(
    simulation: Simulation,
) -> None:
    begin(simulation)
    simulation.start_operator()
    simulation.settle()
    training = {**TRAINING, "skipSteps": [12]}
    simulation.store.change("trainingruns", *KEY, {"spec": {"training": training}})
    simulation.settle()
    told = [
        one for one in simulation.store.list("events") if one["reason"] == "SettingsChanged"
    ]
    assert [one["message"] for one in told] == ["spec.training.skipSteps: [] → [12]"]
    assert told[0]["count"] == 1
    config = simulation.store.get("configmaps", "ns", "run-config")
    assert json.loads(config["data"]["trainingrun.json"])["spec"]["training"][
        "skipSteps"
    ] == [12]


@pytest.mark.parametrize("is_edited_again", [False, True])
def test_an_edit_is_reported_although_the_first_status_after_it_could_not_be_written(
    simulation: Simulation, is_edited_again: bool
) -> None:
    begin(simulation)
    apply = simulation.cluster.apply

    async def refuse_status(body: Any, **options: Any) -> Any:
        if options.get("subresource") == "status":
            raise ApiError(500, "InternalError", "not now")
        return await apply(body, **options)

    simulation.cluster.apply = refuse_status  # type: ignore[method-assign]
    training = {**TRAINING, "skipSteps": [12]}
    simulation.store.change("trainingruns", *KEY, {"spec": {"training": training}})
    with pytest.raises(ApiError):
        simulation.reconcile()
    config = simulation.store.get("configmaps", "ns", "run-config")
    assert "[12]" in config["data"]["trainingrun.json"], "the pods' manifest is gone"

    simulation.cluster.apply = apply  # type: ignore[method-assign]
    steps = [12, 13] if is_edited_again else [12]
    if is_edited_again:
        training = {**TRAINING, "skipSteps": steps}
        simulation.store.change("trainingruns", *KEY, {"spec": {"training": training}})
    simulation.settle()
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"max": 3}}})
    simulation.settle()
    told = [
        one for one in simulation.store.list("events") if one["reason"] == "SettingsChanged"
    ]
    expected = {"spec.training.skipSteps: [] → [12]": 1}
    if is_edited_again:
        expected["spec.training.skipSteps: [12] → [12, 13]"] = 1
    assert {one["message"]: one["count"] for one in told} == expected


@pytest.mark.parametrize("is_suspended", [False, True])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("number", range(5))
def test_an_edit_is_one_event_at_whichever_point_the_operator_is_killed(
    simulation: Simulation, number: int, is_before: bool, is_suspended: bool
) -> None:
    begin(simulation)
    if is_suspended:
        simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
        for _ in range(4):
            simulation.settle()
            simulation.reap()

    # Events count as writes here: the operator may be killed between one of them and the next write.
    training, count = {**TRAINING, "skipSteps": [12]}, [-1]
    simulation.store.change("trainingruns", *KEY, {"spec": {"training": training}})

    def before(write: Write) -> None:
        count[0] += 1
        if is_before and count[0] == number:
            raise Crash

    def after(write: Write) -> None:
        if not is_before and count[0] == number:
            raise Crash

    simulation.store.before, simulation.store.after = before, after
    with contextlib.suppress(Crash):
        simulation.settle()
    simulation.store.before = simulation.store.after = lambda write: None
    simulation.start_operator()

    # A later edit of another field must not repeat the event, even if it is the first edit that a new
    # operator observes.
    simulation.store.change("trainingruns", *KEY, {"spec": {"nodes": {"max": 3}}})
    simulation.settle()
    told = [
        (one["message"], one["count"])
        for one in simulation.store.list("events")
        if one["reason"] == "SettingsChanged"
    ]
    assert told == [("spec.training.skipSteps: [] → [12]", 1)]


def test_without_the_manifest_of_the_pods_an_edit_is_not_applied(
    simulation: Simulation,
) -> None:
    begin(simulation)
    list_all = simulation.cluster.list_all

    async def refuse(kind: Any, namespace: Any, **options: Any) -> Any:
        if options.get("name") == "run-config":
            raise ApiError(500, "InternalError", "not now")
        return await list_all(kind, namespace, **options)

    simulation.cluster.list_all = refuse  # type: ignore[method-assign]
    training = {**TRAINING, "skipSteps": [12]}
    simulation.store.change("trainingruns", *KEY, {"spec": {"training": training}})
    writes = len(simulation.store.writes)
    with pytest.raises(ApiError):
        simulation.reconcile()
    assert len(simulation.store.writes) == writes
    simulation.cluster.list_all = list_all  # type: ignore[method-assign]
    simulation.settle()
    assert any(
        one["reason"] == "SettingsChanged" for one in simulation.store.list("events")
    )
