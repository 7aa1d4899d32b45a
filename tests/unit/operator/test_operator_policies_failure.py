"""Failures of pods: each cause with its budget, reason, message and pause."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from simulated_run import START, Simulation, make_progress, make_run

from evergrad_common.causes import PodCause
from evergrad_common.contract import ErrorKind, encode_termination
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.observe.memory import (
    REMEMBERED_SECONDS,
    FirstStatus,
    HostFaults,
    Memory,
    add_hosts,
    build_memory,
    parse_hosts,
    parse_memory,
)
from evergrad_operator.core.observe.observe import ApplyFailure
from evergrad_operator.core.policies.host_faults import forget_hosts
from evergrad_operator.edge.cache.host_index import HostIndex


def begun(**spec: Any) -> Simulation:
    """A run whose pods have started, each on a separate host, and whose group has not formed."""
    world = Simulation(make_run(**spec))
    world.reconcile()
    world.start()
    world.reconcile()
    return world


def test_a_user_error_ends_the_run_at_once_with_the_root_cause_and_a_remedy() -> None:
    world = begun()
    for name in ("docs-lm-1-0", "docs-lm-2-0"):
        world.end(
            name,
            64,
            message="error: spec.training.data.sources[0].path: docs.jsonl does not exist.",
        )
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.USER_ERROR)
    assert (
        "node 1 (pod docs-lm-1-0) ended with exit code 64: error: spec.training.data"
        in decision.message
    )
    assert "spec.restartNonce" in decision.message
    assert world.condition("Failed")["status"] == "True"
    assert world.condition("Failed")["reason"] == "UserError"
    assert world.condition("Stalled")["status"] == "True"
    assert "data.sources[0].path" in world.condition("Failed")["message"]
    assert world.status["lastFailure"]["exitCode"] == 64
    assert world.created == [
        "docs-lm-coordinator-0",
        "docs-lm-0-0",
        "docs-lm-1-0",
        "docs-lm-2-0",
    ]


def test_the_earliest_of_several_user_errors_is_reported() -> None:
    world = begun()
    world.age(10)
    world.end("docs-lm-2-0", 64, message="the cause")
    world.age(1)
    world.end("docs-lm-0-0", 64, message="a consequence")
    assert (
        "node 2 (pod docs-lm-2-0) ended with exit code 64: the cause"
        in world.reconcile().message
    )


def test_other_nodes_of_a_failed_run_have_ten_seconds_to_end_and_keep_their_logs() -> None:
    world = begun()
    world.end("docs-lm-1-0", 64)
    world.end("docs-lm-0-0", 64)
    assert world.reconcile().pods_to_delete == ()
    assert world.decision.requeue_after == pytest.approx(10)
    world.age(11)
    assert [pod.name for pod in world.reconcile().pods_to_delete] == ["docs-lm-2-0"]
    world.leave()
    assert [pod.name for pod in world.reconcile().pods_to_delete] == [
        "docs-lm-coordinator-0"
    ]
    world.leave()
    world.settle()
    assert sorted(world.pods) == ["docs-lm-0-0", "docs-lm-1-0"]


# ---- exit code 64 ------------------------------------------------------------------------------------------


def test_exit_code_64_of_one_node_never_ends_a_run_whose_group_trains() -> None:
    world = Simulation().run()
    for attempt in range(8):
        world.age(400)
        world.train(20 + attempt)
        world.start()
        world.reconcile()
        world.end(
            f"docs-lm-1-{attempt}",
            64,
            message="error: spec.training.data: the source cannot be opened",
        )
        decision = world.settle()
        assert (decision.phase, world.status["failures"]["withoutProgress"]) == (
            Phase.RUNNING,
            0,
        )
        assert world.condition("Stalled")["status"] == "False"
        world.age(300)
        world.reconcile()
    assert world.live() == ["docs-lm-0-0", "docs-lm-2-0", "docs-lm-1-8"]
    assert world.status["restarts"]["byCause"] == {"UserError": 8}


def test_exit_code_64_does_not_end_a_run_that_trained_under_an_older_operator() -> None:
    """Its nodes have no token: nodes that a new coordinator refuses end with 64."""
    world = Simulation().run()
    del world.raw["status"]["memory"]["formed"]
    world.vanish("docs-lm-coordinator-0")  # while the operator was upgraded
    world.progress = None
    for name in world.live():
        world.end(name, 64, message="the token is wrong")
    assert world.reconcile().phase != Phase.FAILED
    world.age(300)
    world.settle()
    assert sorted(world.live()) == ["docs-lm-0-1", "docs-lm-1-1", "docs-lm-2-1"]


def test_a_replaced_node_gets_no_token_until_its_older_coordinator_is_replaced() -> None:
    """An operator before tokens created it, and it refuses every client with a token."""
    world = Simulation().run()
    spec = world.pods["docs-lm-coordinator-0"]["spec"]
    spec["volumes"] = [one for one in spec["volumes"] if one["name"] != "evergrad-token"]

    def names_token(pod: str) -> bool:
        return "evergrad-token" in str(world.pods[pod]) or "--token-file" in str(
            world.pods[pod]
        )

    world.vanish("docs-lm-1-0")
    world.settle()
    assert not names_token("docs-lm-1-1") and names_token("docs-lm-2-0")
    world.start()
    world.train(20)
    world.vanish("docs-lm-coordinator-0")
    world.vanish("docs-lm-1-1")
    world.settle()
    assert names_token("docs-lm-coordinator-1") and names_token("docs-lm-1-2")


def test_nodes_that_exit_with_64_after_the_coordinator_outcome_count_no_restarts() -> None:
    world = Simulation().run()
    world.train(
        12, phase="Failed", reason="UserError", message="ValueError: the eighth sin"
    )
    for name in world.live():
        world.end(name, 64)
    assert world.reconcile().phase == Phase.FAILED
    assert world.status["restarts"] == {"total": 0}


def test_a_first_exit_code_64_waits_for_other_nodes_and_is_retried_on_another_host() -> (
    None
):
    world = begun()
    world.end("docs-lm-1-0", 64, message="error: bad data")
    decision = world.reconcile()
    assert (decision.nodes_to_create, decision.requeue_after) == ((), 15)
    assert (decision.phase, decision.reason) == (Phase.WAITING, Reason.HOST_FAULTS)
    assert "bad data" in decision.message and "host-1 (1)" in decision.message
    assert world.condition("Stalled")["status"] == "False"
    world.age(15)
    assert world.reconcile().nodes_to_create == ((1, 1),)
    wish = world.pods["docs-lm-1-1"]["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": ["host-1"]}]
    assert wish == [{"weight": 100, "preference": {"matchFields": fields}}]
    world.start()
    world.train(1)
    assert world.settle().phase == Phase.RUNNING


@pytest.mark.parametrize("has_formed_between", [True, False])
def test_an_exit_code_64_from_before_a_group_or_an_edit_is_not_counted_later(
    has_formed_between: bool,
) -> None:
    world = begun()
    world.end("docs-lm-0-0", 64, message="the mount of this host is missing")
    world.reconcile()
    if has_formed_between:
        world.age(15)
        world.reconcile()
        world.start()
        world.train(40)
        world.settle()
        assert "inputErrors" not in world.status["memory"]

    # Settings that all nodes share are edited: the pods are replaced, and no group has formed.
    recipe = world.raw["spec"]["training"]
    world.set_spec(training={**recipe, "checkpoint": {"every": {"steps": 7}}})
    for _ in range(3):
        world.reconcile()
        world.leave()
        world.progress = None
        world.age(20)
    world.settle()
    world.start()
    world.settle()
    assert len(world.live()) == 3 and "inputErrors" not in world.status["memory"]
    world.age(10)
    world.end("docs-lm-1-1", 64, message="the mount of another host is missing")
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.WAITING, Reason.HOST_FAULTS)


def two_tries(world: Simulation) -> None:
    world.end("docs-lm-1-0", 64, message="bad data")
    world.reconcile()
    world.age(15)
    world.reconcile()
    world.start()
    world.end("docs-lm-1-1", 64, message="bad data")


def two_hosts(world: Simulation) -> None:
    world.end("docs-lm-0-0", 64, message="bad data")
    world.reconcile()
    world.age(10)
    world.end("docs-lm-2-0", 64, message="bad data")


def one_host(world: Simulation) -> None:
    for pod in world.pods.values():
        pod["spec"]["nodeName"] = "the-only-one"
    world.end("docs-lm-1-0", 64, message="bad data")


def one_node(world: Simulation) -> None:
    world.set_spec(nodes={"min": 1, "max": 1})
    world.settle()
    world.leave()
    world.end("docs-lm-0-0", 64, message="bad data")


@pytest.mark.parametrize(
    "scenario",
    [two_tries, two_hosts, one_host, one_node],
    ids=lambda scenario: scenario.__name__,
)
def test_an_input_error_is_final_if_no_other_host_can_resolve_it(
    scenario: Callable[[Simulation], None],
) -> None:
    world = begun()
    scenario(world)
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.USER_ERROR)
    assert "bad data" in decision.message


def test_two_input_errors_on_one_host_count_as_one_while_other_hosts_exist() -> None:
    world = begun()
    for name in ("docs-lm-0-0", "docs-lm-1-0"):
        world.pods[name]["spec"]["nodeName"] = "broken"
        world.end(name, 64)
    assert world.settle().phase == Phase.WAITING
    assert world.status["phase"] != "Failed"


def test_a_restart_and_a_resumption_forget_that_the_input_was_valid() -> None:
    for change in ({"restartNonce": "again"}, {"suspend": True}):
        world = Simulation().run()
        world.set_spec(**change)
        for _ in range(4):
            world.reconcile()
            world.leave()
        world.progress = None
        world.set_spec(suspend=False)
        world.reconcile()
        world.start()
        for name in world.live()[:2]:
            world.end(name, 64, message="the data are gone")
        assert world.reconcile().phase == Phase.FAILED, change


# ---- hosts -------------------------------------------------------------------------------------------------


def host_fault(text: str = "error: /volume: [Errno 116] Stale file handle") -> str:
    return encode_termination(ErrorKind.ENVIRONMENT, text).decode()


def test_a_host_fault_counts_no_failure_and_its_node_is_replaced_at_once_on_another_host() -> (
    None
):
    world = Simulation().run()
    world.age(100)
    world.end("docs-lm-1-0", 70, message=host_fault())
    assert world.reconcile().nodes_to_create == ((1, 1),)
    assert world.status["restarts"]["byCause"] == {"HostFault": 1}
    assert world.status["failures"]["withoutProgress"] == 0
    assert (
        world.status["lastFailure"]["message"]
        == "error: /volume: [Errno 116] Stale file handle"
    )
    affinity = world.pods["docs-lm-1-1"]["spec"]["affinity"]["nodeAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"], (
        "a cluster of one host must do, too"
    )


def test_repeated_host_faults_of_one_node_back_off_and_delay_no_other_node() -> None:
    world = Simulation().run()
    pauses = []
    for attempt in range(5):
        world.age(1)
        world.start()
        world.end(f"docs-lm-1-{attempt}", 70, message=host_fault())
        decision = world.reconcile()
        if not decision.nodes_to_create:
            pauses.append(decision.requeue_after)
            assert (
                f"2 of 3 nodes train; host faults, {attempt + 1} in a row, of node 1; by host: host-1"
                in decision.message
            )
        world.age(pauses[-1] if pauses else 1)
        world.reconcile()
    assert pauses == [2, 4, 8, 16]
    world.start()
    world.end("docs-lm-1-5", 70, message=host_fault())
    world.reconcile()
    world.end("docs-lm-2-0", 137)
    world.vanish("docs-lm-coordinator-0")
    decision = world.reconcile()
    assert decision.nodes_to_create == ((2, 1),)
    assert decision.coordinator_attempt == 1


def test_many_hosts_that_fail_a_run_stall_it_and_never_end_it() -> None:
    world = begun(nodes={"min": 3, "max": 3})
    waits = []
    for attempt in range(14):
        world.age(1)
        for index in range(3):
            name = f"docs-lm-{index}-{attempt}"
            world.pods[name]["spec"]["nodeName"] = f"host-{attempt}"
            world.end(name, 70, message=host_fault())
        waits.append(world.reconcile().requeue_after)
        assert world.status["phase"] != "Failed"
        assert world.condition("Stalled")["status"] == str(attempt >= 5), (
            "six in a row need a person"
        )
        world.age(300)
        world.reconcile()
        world.start()
        world.reconcile()
    assert waits == [None, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300, 300], (
        "and never more than five minutes"
    )
    assert world.condition("Stalled")["reason"] == "HostFaults"
    assert len(world.status["memory"]["hostFaults"]) < 400, "few hosts are remembered"
    assert world.status["failures"]["withoutProgress"] == 0
    world.train(1)
    world.age(180)
    world.settle()
    assert (world.status["phase"], world.condition("Stalled")["status"]) == (
        "Running",
        "False",
    )
    world.end("docs-lm-0-14", 70, message=host_fault())
    assert world.reconcile().nodes_to_create == ((0, 15),), (
        "the next one is a first one again"
    )


def test_a_pod_that_a_device_plugin_refuses_counts_against_its_host() -> None:
    world = Simulation().run()
    world.age(100)
    world.pods["docs-lm-0-0"]["status"] = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "no GPU",
    }
    assert world.reconcile().nodes_to_create == ((0, 1),)
    assert "host-0" in json.dumps(world.pods["docs-lm-0-1"]["spec"]["affinity"])


def test_a_full_volume_is_not_a_host_fault() -> None:
    world = Simulation().run()
    world.age(100)
    world.end(
        "docs-lm-1-0",
        70,
        message=host_fault(
            "error: /volume/run: 9.5 MiB are free and one checkpoint takes 18 MiB"
        ),
    )
    world.reconcile()
    assert world.status["restarts"]["byCause"] == {"VolumeFull": 1}
    assert world.status["failures"]["withoutProgress"] == 1


CAUSES: list[tuple[str, dict[str, Any], PodCause]] = [
    ("end", {"code": 70}, PodCause.WORKER_CRASH),
    ("end", {"code": 1, "message": "Traceback"}, PodCause.WORKER_CRASH),
    ("end", {"code": 137}, PodCause.WORKER_CRASH),
    ("end", {"code": 137, "reason": "OOMKilled"}, PodCause.OUT_OF_MEMORY),
    (
        "end",
        {"code": 70, "message": "OSError: [Errno 28] No space left on device"},
        PodCause.VOLUME_FULL,
    ),
    (
        "end",
        {"code": 128, "reason": "StartError", "message": 'exec: "evergrad": not found'},
        PodCause.START_ERROR,
    ),
    ("end", {"code": 75}, PodCause.STOPPED),
    ("end", {"code": 76}, PodCause.STOPPED),
    ("end", {"code": 137, "reason": "ContainerStatusUnknown"}, PodCause.NODE_LOST),
]


@pytest.mark.parametrize(
    ("how", "fields", "cause"), CAUSES, ids=lambda value: str(value)[:40]
)
def test_an_ended_pod_is_replaced_at_once_and_its_cause_is_reported(
    how: str, fields: dict[str, Any], cause: PodCause
) -> None:
    world = Simulation().run()
    world.age(100)
    getattr(world, how)("docs-lm-1-0", **fields)
    decision = world.reconcile()
    assert decision.nodes_to_create == ((1, 1),)
    assert world.status["restarts"] == {"total": 1, "byCause": {cause: 1}}
    assert world.status["attempts"][-1] == {
        "pod": "docs-lm-1-0",
        "cause": cause,
        "exitCode": fields["code"],
        "at": world.status["attempts"][-1]["at"],
    }
    counts = cause in (
        PodCause.WORKER_CRASH,
        PodCause.OUT_OF_MEMORY,
        PodCause.VOLUME_FULL,
        PodCause.START_ERROR,
    )
    assert world.status["failures"]["withoutProgress"] == int(counts)
    assert [event.reason for event in world.events if event.type == "Warning"] == [cause]


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("PreemptionByScheduler", PodCause.PREEMPTED),
        ("DeletionByTaintManager", PodCause.NODE_LOST),
        ("DeletionByPodGC", PodCause.NODE_LOST),
        ("EvictionByEvictionAPI", PodCause.EVICTED),
        ("TerminationByKubelet", PodCause.EVICTED),
        ("SomethingNew", PodCause.EVICTED),
    ],
)
def test_a_disruption_counts_no_failure_and_is_reported_by_its_cause(
    reason: str, cause: PodCause
) -> None:
    world = Simulation().run()
    world.age(100)
    world.disrupt("docs-lm-0-0", reason)
    assert world.reconcile().nodes_to_create == ((0, 1),)
    assert world.status["restarts"]["byCause"] == {cause: 1}
    assert world.status["failures"]["withoutProgress"] == 0
    world.end("docs-lm-0-0", 75)
    world.reconcile()
    world.leave()
    world.reconcile()
    assert world.status["restarts"]["total"] == 1, "counted once, however often it is seen"


@pytest.mark.parametrize(
    "reason",
    [
        "Evicted",
        "OutOfcpu",
        "NodeAffinity",
        "UnexpectedAdmissionError",
        "NodeLost",
        "Terminated",
    ],
)
def test_a_pod_that_the_kubelet_ends_or_refuses_counts_no_failure(reason: str) -> None:
    world = Simulation().run()
    world.age(100)
    world.pods["docs-lm-0-0"]["status"] = {
        "phase": "Failed",
        "reason": reason,
        "message": "The node was low on resource: memory.",
    }
    assert world.reconcile().nodes_to_create == ((0, 1),)
    assert world.status["failures"]["withoutProgress"] == 0
    assert sum(world.status["restarts"]["byCause"].values()) == 1


def test_manual_deletion_counts_no_failure_although_no_watch_event_was_seen() -> None:
    world = Simulation().run()
    world.age(100)
    world.delete("docs-lm-0-0")
    assert world.reconcile().nodes_to_create == ((0, 1),)
    assert world.status["restarts"]["byCause"] == {"Deleted": 1}
    world.leave()
    world.start()
    world.vanish("docs-lm-1-0")
    assert world.reconcile().nodes_to_create == ((1, 1),)
    assert world.status["restarts"]["byCause"] == {"Deleted": 2}
    assert world.status["attempts"][-1]["pod"] == "docs-lm-1-0"


def test_the_last_node_with_the_state_saves_before_its_successor_is_created() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 1})).run()
    world.age(100)
    world.delete("docs-lm-0-0")
    assert world.reconcile().nodes_to_create == ()
    assert world.decision.requeue_after is not None
    world.end("docs-lm-0-0", 75)
    assert world.reconcile().nodes_to_create == ((0, 1),)


def test_a_terminating_pod_on_an_unreachable_host_is_waited_for_a_bounded_time() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 1})).run()
    world.delete("docs-lm-0-0")
    world.age(39)
    assert world.reconcile().nodes_to_create == ()
    world.age(2)
    assert world.reconcile().nodes_to_create == ((0, 1),)


def test_a_pod_on_a_lost_host_is_not_waited_for() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 1})).run()
    world.age(100)
    world.disrupt("docs-lm-0-0", "DeletionByTaintManager")
    assert world.reconcile().nodes_to_create == ((0, 1),)


def fail(world: Simulation, code: int = 70, **fields: Any) -> None:
    """The newest pod of node 1 fails and is replaced."""
    world.age(1)
    name = next(name for name in world.live() if name.startswith("docs-lm-1-"))
    world.end(name, code, **fields)
    world.reconcile()
    world.now = max(world.now + 1, world.decision.memory.budget.retry_at)
    world.reconcile()
    world.start()


def test_failures_without_progress_end_the_run_after_the_budget() -> None:
    world = Simulation().run()
    for _ in range(3):
        fail(world, message="CUDA error: device-side assert")
        assert world.status["phase"] != "Failed"
    fail(world, message="CUDA error: device-side assert")
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "WorkerCrash")
    message = world.condition("Failed")["message"]
    assert "pods failed 4 times without progress; 3 such failures are allowed" in message
    assert "WorkerCrash on node 1, exit code 70: CUDA error: device-side assert" in message
    assert "restartNonce" in message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"code": 137, "reason": "OOMKilled"}, "OutOfMemory"),
        ({"code": 70, "message": "No space left on device"}, "VolumeFull"),
        ({"code": 127, "reason": "ContainerCannotRun"}, "StartError"),
    ],
)
def test_the_reason_of_the_end_is_the_cause_of_the_last_failure(
    fields: dict[str, Any], reason: str
) -> None:
    world = Simulation().run()
    for _ in range(4):
        fail(world, **fields)
    assert world.status["reason"] == reason
    assert world.condition("Failed")["reason"] == reason


def test_a_newer_step_resets_the_failure_count() -> None:
    world = Simulation().run(step=10)
    for step in (10, 20, 30, 40, 50, 60):
        fail(world)
        assert world.status["failures"]["withoutProgress"] == 1
        # The first response after a failure may contain a step from before it.
        for newer, failures in ((step + 1, 1), (step + 2, 0)):
            world.train(newer)
            world.reconcile()
            assert world.status["failures"]["withoutProgress"] == failures
    assert world.status["restarts"]["byCause"] == {"WorkerCrash": 6}


@pytest.mark.parametrize("phase", ["Running", "Waiting"])
@pytest.mark.parametrize("last_polled", [20, 19, 12])
def test_a_step_from_before_a_failure_does_not_cancel_the_failure(
    last_polled: int, phase: str
) -> None:
    """A node runs out of memory after step 20 each time, independently of the step in the previous poll."""
    world = Simulation(make_run(nodes={"min": 1, "max": 1})).run(step=5)
    for number in range(1, 5):
        for step in (8, last_polled):
            world.train(step)
            world.age(5)
            world.settle()
        world.end(world.live()[0], 137, reason="OOMKilled")
        world.age(1)
        world.reconcile()
        assert world.status["failures"]["withoutProgress"] == number
        # The coordinator is still running. It received this step just before the end.
        world.train(20, phase=phase, nodes={"ready": 0, "connected": 0})
        world.age(5)
        world.settle()
        assert world.status["failures"]["withoutProgress"] == number
        world.now = max(world.now, world.decision.memory.budget.retry_at) + 1
        world.settle()
        world.start()
        world.settle()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "OutOfMemory")


def test_without_a_coordinator_status_after_a_failure_no_step_counts_as_progress() -> None:
    world = Simulation().run(step=10)
    fail(world)
    # The coordinator does not answer. Its last response is kept, and is the same after a restart.
    for _ in range(3):
        world.age(60)
        world.settle()
        assert parse_memory(world.status).budget.since is None
    world.train(12)
    world.settle()
    assert parse_memory(world.status).budget.since == FirstStatus(0, 13)  # steps 0 to 12
    assert world.status["failures"]["withoutProgress"] == 1
    world.train(13)
    world.settle()
    assert world.status["failures"]["withoutProgress"] == 0


def test_a_new_coordinator_makes_progress_only_beyond_the_step_of_its_predecessor() -> None:
    world = Simulation().run(step=10)
    fail(world)
    world.train(12)
    world.settle()
    (lost,) = world.live(role="coordinator")
    world.vanish(lost)
    world.settle()
    world.start()
    # It counts from its own start, and its nodes start from a checkpoint.
    for step, failures in ((5, 1), (12, 1), (13, 0)):
        world.train(step)
        world.settle()
        assert world.status["failures"]["withoutProgress"] == failures


def test_the_steps_of_a_coordinator_of_an_older_release_are_compared() -> None:
    world = Simulation().run(step=10)
    fail(world)
    for step, failures in ((12, 1), (12, 1), (13, 0)):
        world.progress = make_progress(step=step)
        world.settle()
        assert world.status["failures"]["withoutProgress"] == failures


def test_with_fresh_workers_only_a_newer_checkpoint_counts_as_progress() -> None:
    run = make_run(script={"command": ["train.py"]})
    del run["spec"]["training"]
    world = Simulation(run).run(step=10)
    fail(world)
    for step in (12, 13):
        world.train(step)
        world.reconcile()
        assert world.status["failures"]["withoutProgress"] == 1
    world.train(13, checkpointStep=11)
    world.reconcile()
    assert world.status["failures"]["withoutProgress"] == 0


def test_a_script_without_step_reports_makes_progress_by_running_long() -> None:
    run = make_run(script={"command": ["train.py"]})
    del run["spec"]["training"]
    world = Simulation(run).run(step=None)
    for _ in range(6):
        world.age(700)
        fail(world)
        assert world.status["failures"]["withoutProgress"] == 1
    for _ in range(3):
        assert world.status["phase"] != "Failed"
        world.age(300)
        fail(world)
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "WorkerCrash")


def test_pods_that_fail_together_are_one_failure() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 8})).run()
    world.age(100)
    for index in range(5):
        world.end(f"docs-lm-{index}-0", 137, reason="OOMKilled")
    world.reconcile()
    world.age(1)
    for index in range(5, 8):
        world.end(f"docs-lm-{index}-0", 137, reason="OOMKilled")
    world.reconcile()
    assert world.status["failures"]["withoutProgress"] == 1
    assert world.status["restarts"]["byCause"] == {"OutOfMemory": 8}


def test_the_pause_before_a_replacement_doubles_after_each_failure() -> None:
    run = make_run(failurePolicy={"maxFailuresWithoutProgress": 100})
    world = Simulation(run).run()
    waits = []
    for attempt in range(8):
        world.age(100)
        world.end(f"docs-lm-1-{attempt}", 1)
        world.reconcile()
        begun = world.now
        while f"docs-lm-1-{attempt + 1}" not in world.pods:
            assert world.decision.requeue_after is not None
            assert world.decision.nodes_to_create == ()
            world.age(world.decision.requeue_after)
            world.reconcile()
        waits.append(round(world.now - begun))
        world.start()
    assert waits == [0, 2, 4, 8, 16, 32, 60, 60]


def test_replacements_after_causes_that_count_no_failure_back_off_too() -> None:
    world = Simulation().run()
    replaced = 0
    for _ in range(120):  # a minute with two passes per second
        for name in world.live():
            if name.startswith("docs-lm-1-"):
                world.pods[name]["status"] = {"phase": "Failed", "reason": "OutOfcpu"}
        world.age(0.5)
        replaced += len(world.reconcile().nodes_to_create)
    assert 5 <= replaced <= 12


def test_replacements_of_a_coordinator_that_crashes_quickly_back_off_too() -> None:
    world = Simulation().run()
    for _ in range(120):
        for name in world.live(role="coordinator"):
            world.pods[name]["status"] = {"phase": "Failed", "reason": "OutOfcpu"}
        world.age(0.5)
        world.reconcile()
    assert world.decision.memory.coordinator.attempt <= 12


def test_a_lost_coordinator_is_replaced_with_the_next_epoch_and_counted_separately() -> (
    None
):
    world = Simulation().run()
    world.age(100)
    world.disrupt("docs-lm-coordinator-0", "EvictionByEvictionAPI")
    decision = world.reconcile()
    assert decision.coordinator_attempt == 1
    assert (decision.phase, decision.reason) == (Phase.RUNNING, Reason.COORDINATOR_LOST)
    assert decision.nodes_to_create == ()
    (pod,) = world.plan.create
    arguments = pod["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--epoch") + 1] == "1"
    service = next(child for child in world.plan.apply if child["kind"] == "Service")
    assert service["spec"]["selector"]["evergrad.dev/attempt"] == "1"
    assert world.status["restarts"]["byCause"] == {"CoordinatorLost": 1}
    assert world.status["failures"]["withoutProgress"] == 0
    world.leave()
    world.settle()
    assert world.status["restarts"]["total"] == 1


def test_epochs_increase_although_status_and_pods_are_lost() -> None:
    world = Simulation().run()
    for _ in range(3):
        world.vanish(next(iter(world.live(role="coordinator"))))
        world.reconcile()
    world.vanish("docs-lm-coordinator-3")
    world.raw.pop("status")
    assert world.reconcile().coordinator_attempt == 4, "the claim remembers"
    world.pods.clear()
    world.raw.pop("status")
    world.raw["metadata"]["uid"] = "restored"
    assert world.reconcile().coordinator_attempt == 5


def test_the_outcome_of_the_coordinator_ends_the_run_with_its_message() -> None:
    world = Simulation().run()
    failure = {
        "cause": "worker_crash",
        "node": "2",
        "rank": 2,
        "step": 10,
        "exitCode": 1,
        "message": "ValueError: x",
        "secondsAgo": 3,
    }
    world.progress = make_progress(
        0,
        phase="Failed",
        reason="FailuresWithoutProgress",
        message=(
            "workers failed 4 times without progress; 3 such failures are allowed. Last: "
            "worker_crash on rank 2 (node 2)"
        ),
        lastFailure=failure,
    )
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.WORKER_CRASH)
    assert "Last: worker_crash on rank 2 (node 2)" in decision.message
    shown = {
        key: value for key, value in world.status["lastFailure"].items() if key != "at"
    }
    assert shown == {
        "cause": "WorkerCrash",
        "node": 2,
        "rank": 2,
        "step": 10,
        "exitCode": 1,
        "message": "ValueError: x",
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reason": "UserError", "message": "bad shape"}, "UserError"),
        (
            {
                "reason": "FailuresWithoutProgress",
                "lastFailure": {"cause": "out_of_memory"},
            },
            "OutOfMemory",
        ),
        ({"reason": "InternalError", "message": "No space left on device"}, "VolumeFull"),
        ({"reason": "InternalError"}, "WorkerCrash"),
    ],
)
def test_each_outcome_has_its_reason(fields: dict[str, Any], reason: str) -> None:
    world = Simulation().run()
    world.progress = make_progress(0, phase="Failed", **fields)
    assert world.reconcile().reason == reason
    assert world.condition("Failed")["reason"] == reason


def test_in_pod_restarts_are_counted_once_across_coordinator_replacements() -> None:
    world = Simulation().run()
    world.train(
        11, restarts={"worker_crash": 2, "scale_up": 5}, lostSeconds={"worker_crash": 3.7}
    )
    world.settle()
    world.train(
        12,
        restarts={"worker_crash": 3, "out_of_memory": 1, "environment": 2},
        lostSeconds={"worker_crash": 5.2},
    )
    world.settle()
    world.age(100)
    world.vanish("docs-lm-coordinator-0")
    world.settle()
    world.start()
    world.train(13, restarts={"worker_crash": 1}, lostSeconds={"worker_crash": 1.0})
    world.settle()
    world.settle()
    assert world.status["restarts"]["byCause"] == {
        "CoordinatorLost": 1,
        "HostFault": 2,
        "OutOfMemory": 1,
        "WorkerCrash": 4,
    }
    assert world.status["lostSeconds"] == {"worker_crash": 6}


def test_a_failure_that_is_reported_repeatedly_is_written_once() -> None:
    world = Simulation().run()
    failure = {
        "cause": "worker_crash",
        "node": "0",
        "rank": 0,
        "exitCode": 1,
        "message": "x",
    }
    world.train(11, lastFailure={**failure, "secondsAgo": 1})
    world.settle()
    written = world.writes
    for seconds in range(2, 30):
        world.age(1)
        world.train(11, lastFailure={**failure, "secondsAgo": seconds + 0.4})
        world.reconcile()
    assert world.writes == written


REFUSALS = [
    (
        403,
        'pods "x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2',
        "QuotaExceeded",
    ),
    (403, "failed quota: q: must specify limits.cpu for: trainer", "AdmissionRefused"),
    (
        403,
        'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false',
        "AdmissionRefused",
    ),
    (
        403,
        "maximum memory usage per Container is 1Gi, but limit is 4Gi",
        "AdmissionRefused",
    ),
    (403, 'no PriorityClass with name "high" was found', "AdmissionRefused"),
    (
        422,
        "Pod is invalid: spec.containers[0].resources.requests: must be less than or equal to cpu limit",
        "InvalidObject",
    ),
    (413, "Request entity too large", "CreateFailed"),
]


@pytest.mark.parametrize(
    ("status", "message", "reason"), REFUSALS, ids=[row[1][:30] for row in REFUSALS]
)
def test_a_refusal_by_the_api_server_is_reported_and_clears_by_itself(
    status: int, message: str, reason: str
) -> None:
    world = Simulation()
    world.reconcile(
        refuse=ApplyFailure("Pod", "docs-lm-0-0", status, "Forbidden", message, START)
    )
    decision = world.reconcile(
        refuse=ApplyFailure("Pod", "docs-lm-0-0", status, "Forbidden", message, START)
    )
    assert (decision.phase, decision.reason) == (Phase.WAITING, reason)
    assert message in decision.message
    is_for_a_person = reason in ("AdmissionRefused", "InvalidObject")
    assert world.condition("Stalled")["status"] == str(is_for_a_person)
    expected = ("False", "UpToDate") if is_for_a_person else ("True", reason)
    assert (
        world.condition("Reconciling")["status"],
        world.condition("Reconciling")["reason"],
    ) == expected
    assert world.condition("Ready")["status"] == "False"
    assert len(world.plan.create) == 4, "it is tried again; the edge sees to the pace"
    world.reconcile()
    world.start()
    world.train()
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.condition("Stalled")["status"] == "False"


def test_a_refusal_of_an_object_that_is_no_longer_needed_is_not_reported() -> None:
    world = Simulation().run()
    world.failures = [
        ApplyFailure("Pod", "docs-lm-7-0", 403, "Forbidden", "exceeded quota", START)
    ]
    seen = world.look()
    assert seen.failures
    assert "quota" not in world.reconcile().message


def test_a_quota_for_some_of_the_pods_leaves_a_smaller_run_that_trains() -> None:
    world = Simulation().run()
    world.age(100)
    world.delete("docs-lm-2-0")
    refusal = ApplyFailure(
        "Pod", "docs-lm-2-1", 403, "Forbidden", "exceeded quota: q", START
    )
    world.reconcile(refuse=refusal)
    world.failures = [refusal]
    world.train(20)
    decision = world.reconcile(refuse=refusal)
    assert (decision.phase, decision.is_blocked) == (Phase.RUNNING, False)
    assert (
        "2 of 3 nodes train; the API server refuses Pod docs-lm-2-1: exceeded quota"
        in decision.message
    )
    assert world.condition("PodsReady") | {"lastTransitionTime": ""} == {
        "type": "PodsReady",
        "status": "False",
        "reason": "SomeReady",
        "message": decision.message[:256],
        "observedGeneration": 1,
        "lastTransitionTime": "",
    }


WAITING = [
    ("wait_for", ("ErrImagePull", "manifest unknown"), "ImagePullFailed"),
    ("wait_for", ("ImagePullBackOff", "Back-off pulling image"), "ImagePullFailed"),
    ("wait_for", ("InvalidImageName", ""), "ImagePullFailed"),
    ("wait_for", ("CreateContainerConfigError", 'secret "tokens" not found'), "StartError"),
    ("unschedulable", ("0/2 nodes are available: 2 Insufficient cpu.",), "Unschedulable"),
    ("unschedulable", ('persistentvolumeclaim "docs" not found',), "VolumeMissing"),
    (
        "unschedulable",
        ("pod has unbound immediate PersistentVolumeClaims",),
        "VolumePending",
    ),
    ("unschedulable", ("waiting", "SchedulingGated"), "Queued"),
]


@pytest.mark.parametrize(
    ("how", "arguments", "reason"),
    WAITING,
    ids=[f"{row[2]} {row[1][0]}" for row in WAITING],
)
def test_the_reason_that_keeps_pods_from_starting_is_reported_while_the_run_waits(
    how: str, arguments: tuple[str, ...], reason: str
) -> None:
    world = Simulation()
    world.reconcile()
    world.start("docs-lm-coordinator-0")
    for index in range(3):
        getattr(world, how)(f"docs-lm-{index}-0", *arguments)
    world.progress = make_progress(0, phase="Waiting", nodes={"ready": 0})
    decision = world.settle()
    assert (decision.phase, decision.reason, decision.is_blocked) == (
        Phase.WAITING,
        reason,
        False,
    )
    assert "node 0 (pod docs-lm-0-0)" in decision.message
    assert arguments[0] in decision.message or arguments[-1] in decision.message
    assert (
        world.condition("Reconciling")["status"],
        world.condition("Reconciling")["reason"],
    ) == (
        "True",
        reason,
    )
    assert world.condition("Stalled")["status"] == "False"
    assert world.created[1:] == ["docs-lm-0-0", "docs-lm-1-0", "docs-lm-2-0"], (
        "nothing is tried again by new pods"
    )
    assert world.writes <= 3
    world.start()
    world.train()
    assert world.settle().phase == Phase.RUNNING


@pytest.mark.parametrize(
    ("how", "arguments", "reason"),
    WAITING,
    ids=[f"{row[2]} {row[1][0]}" for row in WAITING],
)
def test_a_run_is_stalled_only_if_waiting_cannot_help(
    how: str, arguments: tuple[str, ...], reason: str
) -> None:
    world = Simulation()
    world.reconcile()
    world.start("docs-lm-coordinator-0")
    for index in range(3):
        getattr(world, how)(f"docs-lm-{index}-0", *arguments)
    world.progress = make_progress(0, phase="Waiting", nodes={"ready": 0})
    decision = world.settle()
    heals = reason in ("Queued", "Unschedulable")
    assert decision.requeue_after == (None if heals else 300.0)
    world.age(300)
    world.settle()
    expected = {"Stalled": str(not heals), "Reconciling": str(heals)}
    assert {kind: world.condition(kind)["status"] for kind in expected} == expected
    assert world.condition("Reconciling" if heals else "Stalled")["reason"] == reason


def test_an_unbound_claim_stalls_the_run_only_after_minutes() -> None:
    world = Simulation(make_run(storage={"claimName": "shared"}))
    world.reconcile()
    assert (
        world.condition("Stalled")["status"],
        world.condition("Reconciling")["reason"],
    ) == (
        "False",
        "VolumeMissing",
    )
    world.age(300)
    world.reconcile()
    assert (
        world.condition("Stalled")["status"],
        world.condition("Reconciling")["status"],
    ) == (
        "True",
        "False",
    )


RECORDS = [
    (
        422,
        "metadata.annotations: Too long: may not be more than 262144 bytes",
        "Delete TrainingRuns that are over",
    ),
    (
        403,
        'admission webhook "x" denied the request',
        "Allow the operator to patch the claim",
    ),
    (400, "admission webhook denied the request", "Check why the API server"),
]


@pytest.mark.parametrize(
    ("status", "message", "remedy"), RECORDS, ids=[str(row[0]) for row in RECORDS]
)
def test_a_record_that_an_existing_claim_refuses_has_a_reason_and_a_remedy(
    status: int, message: str, remedy: str
) -> None:
    world = Simulation(make_run(storage={"claimName": "shared"}))
    claim = {"metadata": {"name": "shared"}, "status": {"phase": "Bound"}}
    world.children["PersistentVolumeClaim", "shared"] = claim
    world.failures = [
        ApplyFailure(
            "PersistentVolumeClaim", "shared", status, "Invalid", message, START, "apply"
        )
    ]
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (
        Phase.WAITING,
        Reason.VOLUME_RECORD_REFUSED,
    )
    assert message in decision.message and remedy in decision.message
    assert world.condition("Stalled")["reason"] == "VolumeRecordRefused"


def test_a_coordinator_image_that_cannot_be_pulled_is_reported_too() -> None:
    world = Simulation()
    world.reconcile()
    world.wait_for("docs-lm-coordinator-0", "ErrImageNeverPull")
    assert "the coordinator (pod docs-lm-coordinator-0)" in world.reconcile().message
    assert world.decision.reason == Reason.IMAGE_PULL_FAILED


def test_the_message_for_pods_that_hang_in_creation_names_where_to_look() -> None:
    world = Simulation()
    world.reconcile()
    for name in list(world.pods):
        world.wait_for(name, "ContainerCreating")
    world.age(100)
    assert world.reconcile().reason == Reason.STARTING
    world.age(100)
    decision = world.reconcile()
    assert (decision.phase, decision.is_blocked) == (Phase.STARTING, False)
    assert "kubectl describe pod" in decision.message


def test_a_run_waits_without_pods_for_a_missing_existing_claim() -> None:
    world = Simulation(make_run(storage={"claimName": "shared"}))
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.WAITING, Reason.VOLUME_MISSING)
    assert (
        "PersistentVolumeClaim shared does not exist in namespace team" in decision.message
    )
    assert world.plan.is_empty
    assert decision.requeue_after is not None
    world.children["PersistentVolumeClaim", "shared"] = {
        "metadata": {"name": "shared"},
        "status": {"phase": "Bound"},
    }
    assert world.reconcile().nodes_to_create == ((0, 0), (1, 0), (2, 0))


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"metadata": {"name": "shared"}, "status": {"phase": "Lost"}}, Reason.VOLUME_LOST),
        (
            {"metadata": {"name": "shared", "deletionTimestamp": "2030-01-01T00:00:00Z"}},
            Reason.VOLUME_MISSING,
        ),
    ],
)
def test_a_claim_that_cannot_be_used_is_reported(
    claim: dict[str, Any], reason: str
) -> None:
    world = Simulation(make_run(storage={"claimName": "shared"}))
    world.children["PersistentVolumeClaim", "shared"] = claim
    assert world.reconcile().reason == reason
    assert world.plan.is_empty


def test_young_pods_that_have_not_joined_are_starting_and_only_old_pods_are_waited_for() -> (
    None
):
    world = Simulation().run(10)
    world.age(1000)
    for name in world.live():
        world.vanish(name)
    world.reconcile()
    world.start()
    world.progress = make_progress(
        0,
        phase="Waiting",
        reason="WaitingForNodes",
        message="0 nodes connected",
        nodes={"ready": 0},
    )
    assert (world.reconcile().phase, world.decision.reason) == (
        Phase.STARTING,
        Reason.STARTING,
    )
    world.age(200)
    assert (world.reconcile().phase, world.decision.reason) == (
        Phase.WAITING,
        Reason.WAITING_FOR_NODES,
    )
    assert world.decision.message == "0 nodes connected"


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_node_that_ends_by_itself_does_not_hide_the_rank_that_failed(
    is_told_first: bool,
) -> None:
    world = Simulation().run()
    failure = {
        "cause": "user_error",
        "node": "1",
        "rank": 1,
        "step": 3,
        "exitCode": 1,
        "message": "ValueError: x",
        "secondsAgo": 1,
    }
    if is_told_first:
        world.train(11, lastFailure={**failure, "secondsAgo": 1})
        world.reconcile()
    world.end("docs-lm-1-0", 70, message="node 1, rank 1: ended with exit code 1")
    world.reconcile()
    world.train(11, lastFailure={**failure, "secondsAgo": 4})
    world.reconcile()
    assert (
        world.status["lastFailure"]["rank"],
        world.status["lastFailure"]["message"],
    ) == (
        1,
        "ValueError: x",
    )


# ---- hosts over time, and over runs ------------------------------------------------------------------------


def avoided_hosts(pod: dict[str, Any]) -> list[str]:
    """Return the hosts that a pod must avoid."""
    nodes = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return [
        field["values"][0]
        for wish in nodes.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        for field in wish["preference"]["matchFields"]
    ]


def test_a_host_is_forgotten_a_day_after_its_last_fault() -> None:
    world = Simulation().run()
    world.age(100)
    world.pods["docs-lm-1-0"]["spec"]["nodeName"] = "broken"
    world.end("docs-lm-1-0", 70, message=host_fault())
    world.reconcile()
    assert avoided_hosts(world.pods["docs-lm-1-1"]) == ["broken"]
    said = [one.message for one in world.events if one.reason == "HostAvoided"]
    assert said == ["broken: new pods avoid them for 24 hours, if there are other hosts"]

    world.start()
    world.age(REMEMBERED_SECONDS - 60)
    world.vanish("docs-lm-1-1")
    world.reconcile()
    assert avoided_hosts(world.pods["docs-lm-1-2"]) == ["broken"], (
        "a minute before its time"
    )
    world.start()
    world.age(600)
    world.vanish("docs-lm-1-2")
    world.reconcile()
    assert avoided_hosts(world.pods["docs-lm-1-3"]) == []
    assert "broken" not in str(world.status["memory"])


def test_a_host_in_a_status_of_an_older_release_is_forgotten_like_any_other() -> None:
    known = HostFaults(hosts=(("broken", 2),), at=START)
    assert forget_hosts(known, START + REMEMBERED_SECONDS - 1) == known
    assert forget_hosts(known, START + REMEMBERED_SECONDS).hosts == ()


def test_hosts_and_their_times_survive_the_status() -> None:
    faults = HostFaults(
        hosts=(("a", 1), ("b", 2)), seen=(("a", START), ("b", START + 5)), at=START
    )
    status = build_memory(Memory(faults=faults))
    assert parse_memory(status).faults.seen == faults.seen
    text = status["memory"]["hostFaults"]
    assert parse_hosts(text) == {"a": START, "b": START + 5}


def with_faults(*hosts: str, at: float = START) -> dict[str, Any]:
    faults = HostFaults(
        hosts=tuple((host, 1) for host in hosts),
        seen=tuple((host, at) for host in hosts),
        at=at,
    )
    return {"status": build_memory(Memory(faults=faults))}


def test_a_host_that_failed_two_runs_is_avoided_by_all_runs_for_a_day() -> None:
    index = HostIndex()
    index.update(("team", "one"), with_faults("broken", "odd"))
    assert index.find_troubled(START) == ()
    index.update(("team", "two"), with_faults("broken", at=START + 10))
    assert index.find_troubled(START + 10) == ("broken",)
    assert index.find_troubled(START + REMEMBERED_SECONDS + 5) == (), "one run's is old"

    # The index follows the statuses, and is empty without them.
    index.update(("team", "two"), with_faults("odd"))
    assert index.find_troubled(START) == ("odd",)
    for name in ("one", "two"):
        index.update(("team", name), None)
    assert index.find_troubled(START) == () and not index._failed and not index._texts


def test_new_pods_avoid_hosts_on_which_other_runs_failed() -> None:
    world = Simulation()
    world.troubled = ("broken",)
    world.reconcile()
    nodes = [pod for name, pod in world.pods.items() if "coordinator" not in name]
    assert nodes and all(avoided_hosts(pod) == ["broken"] for pod in nodes)
    assert "broken" not in str(world.status), "it is no fault of this run"


def test_hosts_on_which_the_run_itself_failed_have_more_weight_than_hosts_of_other_runs() -> (
    None
):
    own = HostFaults(hosts=tuple((f"own-{number}", 1) for number in range(7)))
    both = add_hosts(Memory(faults=own), ["far-0", "own-3", "far-1"]).faults.avoided
    assert both == ("far-1", *own.avoided)
