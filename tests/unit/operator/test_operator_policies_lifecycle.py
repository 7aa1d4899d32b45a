"""The life of a run: start, bounds, suspension, restart, deadline, completion, conflicts, cleanup."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes.recipe import TRAINING
from simulated_run import CONFIG, START, Simulation, make_progress, make_run

from evergrad_manifest.errors import Problem
from evergrad_operator.core.decision import Action, NodeBounds
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.problems import list_problems


def kinds(world: Simulation) -> list[str]:
    return [f"{child['kind']}/{child['metadata']['name']}" for child in world.plan.apply]


def record_of(
    world: Simulation, claim: str = "docs-lm", run: str = "docs-lm"
) -> dict[str, Any]:
    annotations = world.children["PersistentVolumeClaim", claim]["metadata"]["annotations"]
    found: dict[str, Any] = json.loads(annotations[names.claim_annotation(run)])
    return found


# ---- start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_other_done", [False, True])
def test_a_successful_end_of_a_pod_from_before_a_restart_completes_nothing(
    is_other_done: bool,
) -> None:
    world = Simulation(make_run(nodes={"min": 2, "max": 2})).run(step=10)
    first, second = world.live()
    world.train(10, phase="Failed", reason="UserError", message="ValueError")
    world.reconcile()
    # A script ends with 0 in its grace period, because its peers have exited.
    world.end(first, 0, reason="Completed")
    world.end(second, 0 if is_other_done else 70)
    for seconds in (2, 60):
        world.age(seconds)
        world.settle()
    assert (world.status["phase"], first in world.pods) == ("Failed", True)
    world.progress = None
    world.set_spec(restartNonce="again")
    world.settle()
    assert world.status["phase"] == "Starting"
    assert {name.rsplit("-", 1)[0] for name in world.live()} == {"docs-lm-0", "docs-lm-1"}


def test_a_new_run_creates_all_its_children_in_one_pass_and_nothing_in_the_next() -> None:
    world = Simulation()
    decision = world.reconcile()
    assert (decision.action, decision.phase) == (Action.RUN, Phase.STARTING)
    assert (
        world.plan.claim is not None and world.plan.claim["metadata"]["name"] == "docs-lm"
    )
    assert kinds(world) == [
        "ConfigMap/docs-lm-config",
        "Service/docs-lm-coordinator",
        "NetworkPolicy/docs-lm",
    ]
    assert world.created == [
        "docs-lm-coordinator-0",
        "docs-lm-0-0",
        "docs-lm-1-0",
        "docs-lm-2-0",
    ]
    # The second pass counts the pods that the first pass has created, and there is nothing else to write.
    for _ in range(3):
        world.reconcile()
        assert world.plan.is_empty
    assert world.writes == 2


def test_an_unchanged_run_needs_no_write_and_no_scheduled_pass() -> None:
    world = Simulation().run()
    written = world.writes
    for _ in range(5):
        world.age(60)
        assert world.reconcile().requeue_after is None
        assert world.plan.is_empty
    assert world.writes == written


def test_a_restarted_operator_without_a_coordinator_status_writes_nothing() -> None:
    world = Simulation().run()
    written = world.writes
    world.progress = None
    world.age(5)
    world.reconcile()
    assert world.plan.is_empty
    assert world.writes == written


def test_a_run_that_lost_its_status_continues_with_the_same_images() -> None:
    world = Simulation().run()
    world.set_spec(restartNonce="given before")
    world.raw.pop("status")
    world.settle()
    assert world.status["attempt"] == 0
    assert len(world.created) == 4, "nothing is started anew"


def test_an_upgrade_of_the_operator_never_mixes_images() -> None:
    world = Simulation().run()
    world.config = type(CONFIG)(
        trainer_image="registry.example/trainer:2",
        operator_image="registry.example/operator:2",
    )
    world.settle()
    assert len(world.created) == 4, "no pod restarts"
    world.age(100)
    world.vanish("docs-lm-0-0")
    world.vanish("docs-lm-coordinator-0")
    world.reconcile()
    images = [pod["spec"]["containers"][0]["image"] for pod in world.plan.create]
    assert images == ["registry.example/operator:1", "registry.example/trainer:1"]
    world.set_spec(restartNonce="now")
    world.start()
    for _ in range(6):
        world.reconcile()
        world.leave()
    assert world.status["image"] == "registry.example/trainer:2"
    world.reconcile()
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()} == {
        "registry.example/operator:2",
        "registry.example/trainer:2",
    }


def test_a_run_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = Simulation().run()
    world.raw["metadata"]["deletionTimestamp"] = "2030-03-17T17:46:40Z"
    world.vanish("docs-lm-0-0")
    decision = world.reconcile()
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.DELETING)
    assert world.plan.is_empty


def test_an_ended_run_keeps_its_phase_while_it_is_deleted() -> None:
    world = Simulation(make_run(activeDeadlineSeconds=10)).run()
    world.age(11)
    world.settle()
    world.raw["metadata"]["deletionTimestamp"] = "2030-03-17T17:46:40Z"
    decision = world.reconcile()
    assert (decision.action, decision.phase, decision.reason) == (
        Action.HOLD,
        Phase.FAILED,
        Reason.DEADLINE_EXCEEDED,
    )


def test_a_run_that_is_deleted_without_its_children_reports_that_and_no_end() -> None:
    world = Simulation().run()
    world.events.clear()
    world.raw["metadata"] |= {
        "deletionTimestamp": "2030-03-17T17:46:40Z",
        "finalizers": ["orphan"],
    }
    # The garbage collector removes the owner from one child after the other.
    for pod in world.pods.values():
        del pod["metadata"]["ownerReferences"]
        world.reconcile()
    assert "is being deleted without its children" in world.status["message"]
    assert "its pods keep running" in world.status["message"]
    assert [one.reason for one in world.events] == ["Deleting"]
    assert world.status["restarts"]["total"] == 0 and "attempts" not in world.status


def test_leftover_pods_of_an_earlier_run_are_reported_together_before_any_pod_is_created() -> (
    None
):
    old = Simulation().run()
    for pod in old.pods.values():
        del pod["metadata"]["ownerReferences"]
    raw = make_run()
    raw["metadata"]["uid"] = "another"
    world = Simulation(raw)
    world.pods = old.pods
    decision = world.settle()
    assert world.created == [] and world.children == {}
    assert decision.reason == Reason.NAME_TAKEN
    for name in ("docs-lm-0-0", "docs-lm-1-0", "docs-lm-2-0", "docs-lm-coordinator-0"):
        assert f"Pod {name}" in decision.message
    assert (
        "Remove all of them with: kubectl delete pods,services,configmaps,secrets,networkpolicies "
        "-n team -l app.kubernetes.io/managed-by=evergrad,evergrad.dev/run=docs-lm"
    ) in decision.message
    assert world.condition("Stalled")["status"] == "True"
    assert not world.condition("Ready")["message"].startswith("pod")

    world.pods.clear()
    world.settle()
    assert len(world.created) == 4


def test_pods_of_an_older_namesake_are_not_taken_over() -> None:
    world = Simulation()
    world.reconcile()
    for pod in world.pods.values():
        pod["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert world.look().nodes == ()


# ---- bounds ------------------------------------------------------------------------------------------------


def test_more_nodes_are_created_and_the_coordinator_gets_the_new_bounds() -> None:
    world = Simulation().run()
    world.set_spec(nodes={"min": 2, "max": 5})
    decision = world.reconcile()
    assert decision.nodes_to_create == ((3, 0), (4, 0))
    assert world.plan.bounds == NodeBounds(2, 5, 3)
    world.train(20)
    world.start()
    assert world.reconcile().bounds is None
    assert world.status["nodes"]["max"] == 5
    assert [event.message for event in world.events if event.reason == "NodesChanged"] == [
        "nodes: min 2, max 5"
    ]


def test_a_new_failure_budget_is_posted_to_a_coordinator_that_supports_it() -> None:
    world = Simulation().run()
    world.set_spec(failurePolicy={"maxFailuresWithoutProgress": 7})
    assert world.reconcile().bounds is None  # one of an older release
    world.train(20, maxFailures=3)
    assert world.reconcile().bounds == NodeBounds(2, 3, 7)
    world.train(21, maxFailures=7)
    assert world.reconcile().bounds is None


def test_a_smaller_run_removes_the_highest_indexes_first_and_counts_no_restart() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 5})).run()
    world.age(100)
    world.set_spec(nodes={"min": 1, "max": 2})
    decision = world.reconcile()
    assert [pod.name for pod in decision.pods_to_delete] == [
        "docs-lm-4-0",
        "docs-lm-3-0",
        "docs-lm-2-0",
    ]
    assert {pod.grace_seconds for pod in decision.pods_to_delete} == {None}
    assert world.plan.bounds == NodeBounds(1, 2, 3)
    world.reconcile()
    world.leave()
    world.train(20)
    world.settle()
    assert world.status["restarts"]["total"] == 0
    world.set_spec(nodes={"min": 1, "max": 3})
    assert world.reconcile().nodes_to_create == ((2, 1),)


def test_the_newer_of_two_live_pods_of_one_index_stays() -> None:
    world = Simulation().run()
    twin = json.loads(
        json.dumps(world.pods["docs-lm-1-0"]).replace("docs-lm-1-0", "docs-lm-1-1")
    )
    twin["metadata"]["labels"]["evergrad.dev/attempt"] = "1"
    world.pods["docs-lm-1-1"] = twin
    assert [pod.name for pod in world.reconcile().pods_to_delete] == ["docs-lm-1-0"]


def test_older_ended_pods_are_removed_and_the_newest_is_kept_for_its_logs() -> None:
    world = Simulation().run()
    for attempt in (0, 1):
        world.age(100)
        world.end(f"docs-lm-1-{attempt}", 75)
        world.reconcile()
        world.start()
    assert [pod.name for pod in world.reconcile().pods_to_delete] == []
    assert "docs-lm-1-0" not in world.pods
    assert world.pods["docs-lm-1-1"]["status"]["phase"] == "Failed"


def test_priority_and_template_apply_to_pods_created_later() -> None:
    world = Simulation().run()
    world.set_spec(
        template={"priorityClassName": "high"}, resources={"limits": {"memory": "2Gi"}}
    )
    world.settle()
    assert len(world.created) == 4
    world.age(100)
    world.vanish("docs-lm-0-0")
    world.reconcile()
    (pod,) = world.plan.create
    assert pod["spec"]["priorityClassName"] == "high"
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"memory": "2Gi"}}


# ---- suspension --------------------------------------------------------------------------------------------


def test_suspension_lets_the_nodes_save_before_the_coordinator_is_deleted() -> None:
    world = Simulation().run()
    world.train(40, checkpointStep=40)
    world.settle()
    world.set_spec(suspend=True)
    decision = world.reconcile()
    assert (decision.action, decision.phase) == (Action.STOP, Phase.SUSPENDING)
    assert [pod.name for pod in decision.pods_to_delete] == [
        "docs-lm-2-0",
        "docs-lm-1-0",
        "docs-lm-0-0",
    ]
    assert world.reconcile().pods_to_delete == ()
    assert "docs-lm-coordinator-0" in world.live(role="coordinator")
    world.leave()
    assert [pod.name for pod in world.reconcile().pods_to_delete] == [
        "docs-lm-coordinator-0"
    ]
    world.leave()
    decision = world.settle()
    assert (decision.phase, decision.reason) == (Phase.SUSPENDED, Reason.SUSPENDED)
    assert "newest checkpoint is of step 40" in decision.message
    assert world.pods == {}
    assert world.condition("Suspended")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Reconciling")["status"] == "False"
    assert world.status["restarts"]["total"] == 0
    assert world.status["nodes"]["summary"] == "0/3"
    assert "startTime" not in world.status


def test_resuming_creates_new_pods_with_a_new_epoch() -> None:
    world = Simulation().run()
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.set_spec(suspend=False)
    decision = world.reconcile()
    assert decision.nodes_to_create == ((0, 1), (1, 1), (2, 1))
    assert decision.coordinator_attempt == 1
    world.start()
    world.train(50)
    world.settle()
    assert world.condition("Suspended")["status"] == "False"
    assert world.status["restarts"]["total"] == 0


def test_resuming_while_pods_terminate_waits_for_the_last_save() -> None:
    world = Simulation().run()
    world.set_spec(suspend=True)
    world.reconcile()
    world.set_spec(suspend=False)
    decision = world.reconcile()
    assert decision.nodes_to_create == ()
    world.leave()
    assert world.reconcile().nodes_to_create == ((0, 1), (1, 1), (2, 1))
    assert decision.coordinator_attempt is None, "the coordinator is still there"


def test_a_run_that_is_created_suspended_creates_nothing() -> None:
    world = Simulation(make_run(suspend=True))
    assert world.settle().phase == Phase.SUSPENDED
    assert world.children == {}
    assert world.created == []


def test_an_unreachable_pod_on_a_lost_host_does_not_delay_a_suspension() -> None:
    world = Simulation().run()
    world.set_spec(suspend=True)
    world.reconcile()
    world.vanish("docs-lm-0-0")
    world.vanish("docs-lm-1-0")
    assert world.reconcile().phase == Phase.SUSPENDING
    world.age(world.decision.requeue_after or 0)
    assert [pod.name for pod in world.reconcile().pods_to_delete] == [
        "docs-lm-coordinator-0"
    ]
    world.vanish("docs-lm-coordinator-0")
    assert world.reconcile().phase == Phase.SUSPENDED


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_run_suspended_before_the_first_reported_step_waits_for_the_coordinator_status(
    is_heard: bool,
) -> None:
    world = Simulation()
    world.reconcile()
    world.start()
    if is_heard:
        world.train(None, nodes={"min": 1, "max": 2, "ready": 0, "connected": 0})
    world.reconcile()
    world.set_spec(suspend=True)
    world.reconcile()
    world.leave()
    world.reconcile()
    assert world.status["phase"] == "Suspending"
    assert world.live(role=names.ROLE_COORDINATOR), "its only witness was let go"
    world.train(7, checkpointStep=7, nodes={"min": 1, "max": 2, "ready": 0, "connected": 0})
    world.reconcile()
    world.leave()
    world.settle()
    assert (world.status["phase"], world.status["checkpoint"]["step"]) == ("Suspended", 7)


def test_a_restarted_operator_waits_for_the_last_coordinator_status_of_a_suspended_run() -> (
    None
):
    world = Simulation().run()
    world.train(340, checkpointStep=320)
    world.settle()
    world.set_spec(suspend=True)
    world.reconcile()
    world.leave()
    # The operator has started again and has polled no coordinator yet.
    world.progress = None
    world.reconcile()
    assert world.live(role=names.ROLE_COORDINATOR), "its only witness was let go"
    world.train(354, checkpointStep=354, nodes={"ready": 0, "connected": 0})
    world.reconcile()
    world.leave()
    decision = world.settle()
    assert decision.phase == Phase.SUSPENDED
    assert "the newest checkpoint is of step 354" in decision.message


def test_a_stop_that_the_recipe_requests_parks_the_run() -> None:
    world = Simulation().run()
    world.train(50, phase="Stopped", reason="AfterStep", checkpointStep=50)
    for name in world.live():
        world.end(name, 75)
    world.reconcile()
    world.progress = None
    world.leave()
    world.settle()
    assert (world.status["phase"], world.status["reason"]) == (
        "Suspended",
        "StoppedOnRequest",
    )
    assert "restartNonce" in world.status["message"]
    assert len(world.created) == 4
    world.set_spec(restartNonce="go on")
    world.reconcile()
    assert world.decision.action == Action.RUN
    assert world.status["attempt"] == 1


def test_a_run_stopped_by_a_non_finite_loss_waits_for_a_person_and_can_continue_past_it() -> (
    None
):
    world = Simulation().run()
    world.train(812, phase="Stopped", reason="NonFinite", checkpointStep=812)
    for name in world.live():
        world.end(name, 75)
    world.reconcile()
    world.progress = None
    world.leave()
    world.settle()
    assert (world.status["phase"], world.status["reason"]) == ("Suspended", "NonFinite")
    for words in (
        "step 813 is not finite",
        "of step 812, is saved",
        "skipSteps",
        "onNonFinite",
        "evergrad resume docs-lm",
    ):
        assert words in world.status["message"]
    assert (world.condition("Stalled")["status"], world.condition("Stalled")["reason"]) == (
        "True",
        "NonFinite",
    )
    assert (
        world.condition("Failed")["status"]
        == world.condition("Reconciling")["status"]
        == "False"
    )
    assert world.status["failures"]["withoutProgress"] == 0
    world.set_spec(
        restartNonce="go on", training={**world.raw["spec"]["training"], "skipSteps": [813]}
    )
    assert world.reconcile().action == Action.RUN
    assert "813" in json.dumps(world.children["ConfigMap", "docs-lm-config"])
    assert world.condition("Stalled")["status"] == "False"


def test_a_stop_that_an_older_operator_recorded_still_counts() -> None:
    world = Simulation().run()
    world.train(50, phase="Stopped", reason="StopFile", checkpointStep=50)
    world.reconcile()
    world.progress = None
    world.raw["status"]["memory"]["stopped"] = "true"
    assert world.reconcile().action == Action.STOP
    assert world.status["memory"]["stopped"] == "StoppedOnRequest"


@pytest.mark.parametrize("reason", ["StopFile", "NonFinite"])
def test_suspending_and_resuming_clears_a_stop_too(reason: str) -> None:
    world = Simulation().run()
    world.train(50, phase="Stopped", reason=reason)
    for _ in range(4):
        world.reconcile()
        world.leave()
        world.progress = None
    world.set_spec(suspend=True)
    world.settle()
    world.set_spec(suspend=False)
    assert world.reconcile().action == Action.RUN


def test_a_run_whose_nodes_all_drained_is_not_stopped() -> None:
    world = Simulation().run()
    world.age(100)
    for name in world.live():
        world.end(name, 75)
    world.progress = make_progress(0, phase="Stopped", reason="AllNodesLeft")
    assert world.reconcile().nodes_to_create == ((0, 1), (1, 1), (2, 1))


# ---- restart -----------------------------------------------------------------------------------------------


def test_a_new_nonce_restarts_all_pods_gracefully_with_fresh_budgets() -> None:
    world = Simulation().run()
    world.age(100)
    world.end("docs-lm-1-0", 1)
    world.reconcile()
    world.start()
    world.set_spec(restartNonce="2")
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.RESTARTING, Reason.RESTARTING)
    assert [pod.name for pod in decision.pods_to_delete] == [
        "docs-lm-2-0",
        "docs-lm-1-1",
        "docs-lm-0-0",
    ]
    assert world.status["attempt"] == 1
    assert world.status["restartNonce"] == "2"
    world.reconcile()
    world.leave()
    assert [pod.name for pod in world.reconcile().pods_to_delete] == [
        "docs-lm-1-0",
        "docs-lm-coordinator-0",
    ]
    world.leave()
    decision = world.reconcile()
    assert decision.nodes_to_create == ((0, 1), (1, 2), (2, 1))
    assert decision.coordinator_attempt == 1
    world.start()
    world.train(30)
    world.settle()
    assert world.status["failures"]["withoutProgress"] == 0
    assert world.status["restarts"]["byCause"] == {"WorkerCrash": 1}
    world.settle()
    assert len(world.created) == 4 + 1 + 4


def test_a_failed_run_starts_again_after_a_new_nonce() -> None:
    world = Simulation()
    world.reconcile()
    world.start()
    for name in ("docs-lm-0-0", "docs-lm-1-0"):
        world.end(name, 64, message="no such file")
    world.settle()
    world.age(60)
    for _ in range(4):
        world.reconcile()
        world.leave()
    assert world.status["phase"] == "Failed"
    world.set_spec(restartNonce="mended")
    for _ in range(3):
        world.reconcile()
        world.leave()
    assert world.decision.action == Action.RUN
    assert world.condition("Failed")["status"] == "False"
    assert "completionTime" not in world.status
    world.start()
    world.train(10)
    assert world.settle().phase == Phase.RUNNING


def test_a_complete_run_never_trains_again_after_any_change() -> None:
    world = completed()
    message = world.status["message"]
    for spec in (
        {"restartNonce": "again"},
        {"nodes": {"min": 1, "max": 9}},
        {"suspend": True},
        {"suspend": False},
        {"activeDeadlineSeconds": 1},
    ):
        world.set_spec(**spec)
        world.age(1000)
        decision = world.settle()
        assert (decision.phase, decision.nodes_to_create, decision.coordinator_attempt) == (
            Phase.COMPLETE,
            (),
            None,
        )
    assert world.status["message"].startswith(message)
    assert "spec.restartNonce has no effect on a complete run" in world.status["message"]
    assert world.condition("Complete")["status"] == "True"
    assert len(world.created) == 4


# ---- completion --------------------------------------------------------------------------------------------


def completed(run: dict[str, Any] | None = None) -> Simulation:
    world = Simulation(run).run()
    world.train(100, phase="Complete", reason="Complete")
    for name in world.live():
        world.end(name, 0)
    world.settle()
    world.leave()
    world.settle()
    return world


def recreated(world: Simulation, **spec: Any) -> Simulation:
    """Return another run of the same name on the same claim."""
    run = make_run(**spec)
    run["metadata"]["uid"] = "another"
    again, key = Simulation(run), ("PersistentVolumeClaim", "docs-lm")
    again.children[key] = world.children[key]
    return again


def test_a_run_is_complete_if_its_nodes_have_ended_successfully() -> None:
    world = completed()
    assert (world.status["phase"], world.status["reason"]) == ("Complete", "Complete")
    assert world.status["message"] == "all 100 steps are done"
    assert world.status["checkpoint"] == {"step": 100}, "the last step is always saved"
    assert "summary" not in world.status["nodes"], "no node is missing"
    assert world.condition("Complete")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"
    assert world.live(role="coordinator") == []
    assert record_of(world)["complete"] == {
        "at": world.status["completionTime"],
        "step": 100,
    }
    assert world.status["restarts"]["total"] == 0
    assert sorted(world.pods) == ["docs-lm-0-0", "docs-lm-1-0", "docs-lm-2-0"], (
        "kept for their logs"
    )


def test_completion_waits_for_a_node_that_still_writes_the_report() -> None:
    world = Simulation().run()
    world.end("docs-lm-2-0", 0)
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.RUNNING, Reason.FINISHING)
    assert decision.nodes_to_create == ()
    world.age(5)
    world.reconcile()
    world.end("docs-lm-0-0", 0)
    world.end("docs-lm-1-0", 0)
    assert world.reconcile().phase == Phase.COMPLETE


def test_a_node_that_never_ends_delays_completion_for_a_bounded_time() -> None:
    world = Simulation().run()
    world.end("docs-lm-2-0", 0)
    world.reconcile()
    world.age(world.decision.requeue_after or 0)
    decision = world.reconcile()
    assert decision.phase == Phase.COMPLETE
    assert {pod.name for pod in decision.pods_to_delete} == {"docs-lm-0-0", "docs-lm-1-0"}


def test_a_run_completes_although_another_node_fails_late() -> None:
    world = Simulation().run()
    world.end("docs-lm-0-0", 0)
    world.end("docs-lm-1-0", 64)
    world.end("docs-lm-2-0", 70)
    assert world.reconcile().phase == Phase.COMPLETE


def test_a_complete_status_of_the_coordinator_suffices_if_no_pod_is_left() -> None:
    world = Simulation().run()
    world.progress = make_progress(0, phase="Complete", step=100, totalSteps=100)
    for name in world.live():
        world.vanish(name)
    assert world.reconcile().phase == Phase.COMPLETE


def test_a_complete_run_restored_without_its_status_is_complete_again_without_a_pod() -> (
    None
):
    world = completed()
    restored = recreated(world)
    decision = restored.settle()
    assert (decision.phase, decision.reason) == (Phase.COMPLETE, Reason.ALREADY_COMPLETE)
    assert "complete after step 100" in decision.message
    assert restored.created == []
    assert restored.condition("Complete")["status"] == "True"
    assert restored.status["completionTime"] == world.status["completionTime"]


def test_a_complete_run_recreated_with_more_steps_is_refused_and_not_complete() -> None:
    longer = recreated(completed(), training={**TRAINING, "horizon": {"steps": 101}})
    decision = longer.settle()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.OUTPUT_CONFLICT)
    assert (
        "an earlier run docs-lm, which is complete after step 100, and this run asks for 101 steps"
        in decision.message
    )
    assert "spec.training.initFrom" in decision.message
    assert longer.created == []


def test_a_complete_run_recreated_with_fewer_steps_is_complete() -> None:
    horizon = {"steps": 99}
    decision = recreated(completed(), training={**TRAINING, "horizon": horizon}).settle()
    assert (decision.phase, decision.reason) == (Phase.COMPLETE, Reason.ALREADY_COMPLETE)
    assert "epochs" not in decision.message


def test_a_recreated_complete_run_reports_that_its_horizon_in_epochs_was_not_compared() -> (
    None
):
    horizon = {"epochs": 9}
    decision = recreated(completed(), training={**TRAINING, "horizon": horizon}).settle()
    assert (decision.phase, decision.reason) == (Phase.COMPLETE, Reason.ALREADY_COMPLETE)
    assert "Its horizon in epochs was not compared" in decision.message


def test_a_run_completes_if_the_operator_exits_between_claim_record_and_status() -> None:
    world = Simulation().run()
    world.train(100, phase="Complete")
    for name in world.live():
        world.end(name, 0)
    world.reconcile(is_status_lost=True)
    world.pods.clear()
    world.progress = None
    decision = world.settle()
    assert (decision.phase, decision.reason) == (Phase.COMPLETE, Reason.COMPLETE)
    assert len(world.created) == 4


# ---- conflicts ---------------------------------------------------------------------------------------------


def shared(
    name: str, *, path: str | None = None, uid: str | None = None, **spec: Any
) -> dict[str, Any]:
    storage = {"claimName": "shared", **({"path": path} if path else {})}
    run = make_run(name, storage=storage, **spec)
    run["metadata"]["uid"] = uid or f"uid-{name}"
    return run


def with_claim(run: dict[str, Any], *others: Simulation) -> Simulation:
    world = Simulation(run)
    claim: dict[str, Any] = {
        "metadata": {"name": "shared", "annotations": {}},
        "status": {"phase": "Bound"},
    }
    for other in others:
        found = other.children["PersistentVolumeClaim", "shared"]["metadata"]["annotations"]
        claim["metadata"]["annotations"] |= found
    world.children["PersistentVolumeClaim", "shared"] = claim
    return world


def test_a_folder_that_another_run_uses_is_refused() -> None:
    first = with_claim(shared("first", path="runs/one")).run()
    second = with_claim(shared("second", path="runs/one"), first)
    decision = second.settle()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.OUTPUT_CONFLICT)
    assert (
        "runs/one on PersistentVolumeClaim shared holds the data of run first"
        in decision.message
    )
    assert second.created == []
    assert (
        "run.evergrad.dev/second"
        not in second.children["PersistentVolumeClaim", "shared"]["metadata"]["annotations"]
    )
    assert first.settle().phase == Phase.RUNNING


@pytest.mark.parametrize(("one", "other"), [("runs", "runs/one"), ("runs/one", "runs")])
def test_nested_folders_are_a_conflict_too(one: str, other: str) -> None:
    first = with_claim(shared("first", path=one)).run()
    assert (
        with_claim(shared("second", path=other), first).settle().reason
        == Reason.OUTPUT_CONFLICT
    )


def test_two_folders_of_one_volume_are_not_a_conflict() -> None:
    first = with_claim(shared("first")).run()
    second = with_claim(shared("second"), first).run()
    assert second.decision.phase == Phase.RUNNING
    annotations = second.children["PersistentVolumeClaim", "shared"]["metadata"][
        "annotations"
    ]
    assert {"run.evergrad.dev/first", "run.evergrad.dev/second"} <= set(annotations)


def test_the_older_of_two_runs_that_start_together_gets_the_folder() -> None:
    older, younger = shared("older", path="x"), shared("younger", path="x")
    older["metadata"]["creationTimestamp"] = "2030-03-17T17:40:00Z"
    world = with_claim(younger)
    world.others = [older]
    assert world.settle().reason == Reason.OUTPUT_CONFLICT
    world = with_claim(older)
    world.others = [younger]
    assert world.reconcile().action == Action.RUN


def test_the_older_of_two_runs_with_records_in_the_same_folder_continues() -> None:
    older, younger = shared("older", path="x"), shared("younger", path="x")
    older["metadata"]["creationTimestamp"] = "2030-03-17T17:40:00Z"
    first, second = with_claim(older).run(), with_claim(younger).run()
    both = first.children["PersistentVolumeClaim", "shared"]["metadata"]["annotations"]
    both |= second.children["PersistentVolumeClaim", "shared"]["metadata"]["annotations"]
    for world in (first, second):
        world.children["PersistentVolumeClaim", "shared"]["metadata"]["annotations"] = both
    assert first.settle().phase == Phase.RUNNING
    assert second.settle().reason == Reason.OUTPUT_CONFLICT


def test_a_training_run_is_not_ended_by_an_older_run_that_resumes() -> None:
    older, younger = shared("older", path="x", suspend=True), shared("younger", path="x")
    older["metadata"]["creationTimestamp"] = "2030-03-17T17:40:00Z"
    world = with_claim(younger).run()
    world.others = [older]
    assert world.settle().phase == Phase.RUNNING


def test_a_refused_run_blocks_no_other_run() -> None:
    refused = shared("refused", path="x")
    refused["metadata"]["creationTimestamp"] = "2030-03-17T17:40:00Z"
    refused["status"] = {
        "conditions": [{"type": "Failed", "status": "True", "reason": "OutputConflict"}]
    }
    world = with_claim(shared("other", path="x"))
    world.others = [refused]
    assert world.reconcile().action == Action.RUN


def test_the_same_name_is_a_conflict_with_another_recipe_and_continues_with_the_same_recipe() -> (
    None
):
    first = with_claim(shared("docs-lm")).run()
    other = {**TRAINING, "batching": {"globalBatchSize": 8192, "microBatchSize": 1}}
    again = with_claim(shared("docs-lm", uid="later", training=other), first)
    decision = again.settle()
    assert decision.reason == Reason.OUTPUT_CONFLICT
    assert "an earlier run docs-lm with another recipe" in decision.message
    same = with_claim(shared("docs-lm", uid="later"), first)
    assert same.reconcile().coordinator_attempt == 1


def test_a_run_that_was_extended_in_place_has_the_same_recipe_after_it_is_recreated() -> (
    None
):
    first = with_claim(shared("docs-lm")).run()
    longer = {**first.raw["spec"]["training"], "horizon": {"steps": 200_000}}
    first.set_spec(training=longer)
    first.settle()
    first.leave()
    first.run()
    again = with_claim(shared("docs-lm", uid="later", training=longer), first)
    assert again.reconcile().action == Action.RUN
    # An unreadable record contains no information about the recipe.
    known = first.status["recipeHash"]
    first.set_spec(training={**longer, "horizon": {"steps": "many"}})
    first.settle()
    assert first.status["recipeHash"] == known


def test_sections_that_do_not_affect_the_result_may_differ() -> None:
    first = with_claim(shared("docs-lm")).run()
    training = {
        **first.raw["spec"]["training"],
        "checkpoint": {"keep": 9},
        "stop": {"afterStep": 3},
    }
    again = with_claim(shared("docs-lm", uid="later", training=training), first)
    assert again.reconcile().action == Action.RUN


# ---- deadline, cleanup
# --------------------------------------------------------------------------------------


def test_a_deadline_ends_the_run_after_its_state_is_saved() -> None:
    world = Simulation(make_run(activeDeadlineSeconds=3600)).run()
    assert world.reconcile().requeue_after == pytest.approx(3600)
    world.age(3600)
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.DEADLINE_EXCEEDED)
    assert {pod.name for pod in decision.pods_to_delete} == {
        "docs-lm-0-0",
        "docs-lm-1-0",
        "docs-lm-2-0",
    }
    assert "1h after its start" in decision.message
    world.leave()
    assert [pod.name for pod in world.reconcile().pods_to_delete] == [
        "docs-lm-coordinator-0"
    ]


def test_a_deadline_includes_the_time_that_a_volume_is_waited_for() -> None:
    world = Simulation(
        make_run(activeDeadlineSeconds=3600, storage={"claimName": "missing"})
    )
    assert world.reconcile().reason == Reason.VOLUME_MISSING
    world.age(3601)
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == (Phase.FAILED, Reason.DEADLINE_EXCEEDED)


def test_a_deadline_excludes_the_time_that_the_run_is_suspended() -> None:
    world = Simulation(make_run(activeDeadlineSeconds=3600)).run()
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.age(10_000)
    assert world.reconcile().phase == Phase.SUSPENDED
    world.set_spec(suspend=False)
    assert world.reconcile().action == Action.RUN


def test_after_its_time_to_live_only_the_run_and_its_volume_remain() -> None:
    world = completed(make_run(ttlSecondsAfterFinished=600))
    assert world.decision.requeue_after == pytest.approx(600)
    world.age(600)
    assert world.reconcile().action == Action.CLEAN
    assert {deletion.kind for deletion in world.plan.delete} == {
        *("Pod", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy")
    }
    world.settle()
    assert world.pods == {}
    assert list(world.children) == [("PersistentVolumeClaim", "docs-lm")]
    assert world.status["phase"] == "Complete"


# ---- what the operator does not allow ----------------------------------------------------------------------

ABUSES: list[dict[str, Any]] = [
    {"template": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}},
    {"template": {"volumes": [{"name": "a", "csi": {"driver": "x"}}]}},
    {"template": {"volumes": [{"name": "a", "emptyDir": {}, "hostPath": {"path": "/"}}]}},
    {"template": {"volumes": [{"name": "evergrad-volume", "emptyDir": {}}]}},
    {
        "template": {
            "volumes": [
                {
                    "name": "a",
                    "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]},
                }
            ]
        }
    },
    {"template": {"volumeMounts": [{"name": "a", "mountPath": "/volume/x"}]}},
    {"template": {"volumeMounts": [{"name": "a", "mountPath": "/"}]}},
    {
        "template": {
            "volumes": [{"name": "a", "emptyDir": {}}],
            "volumeMounts": [
                {"name": "a", "mountPath": "/x", "mountPropagation": "Bidirectional"}
            ],
        }
    },
    {
        "template": {
            "volumes": [{"name": "a", "emptyDir": {}}],
            "volumeMounts": [{"name": "a", "mountPath": "/x/../volume"}],
        }
    },
    {"template": {"volumeMounts": [{"name": "evergrad-config", "mountPath": "/x"}]}},
    {"template": {"env": [{"name": "RANK", "value": "0"}]}},
    {"template": {"env": [{"name": "EVERGRAD_POD_IP", "value": "0"}]}},
    {"template": {"labels": {"evergrad.dev/run": "other"}}},
    {"template": {"annotations": {"evergrad.dev/restart": "9"}}},
    {"storage": {"path": "../other"}},
    {"storage": {"path": "/other"}},
    {"script": {"command": ["x" * 800_000]}, "training": None},
]


@pytest.mark.parametrize("spec", ABUSES, ids=lambda spec: json.dumps(spec)[:60])
def test_an_invalid_spec_is_reported_and_creates_no_pod(spec: dict[str, Any]) -> None:
    world = Simulation(make_run(**spec))
    decision = world.settle()
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.INVALID_SPEC)
    assert decision.is_blocked
    assert decision.message.startswith(("spec.", "spec:"))
    assert world.created == []


def test_a_manifest_that_is_corrected_before_the_first_pod_starts_with_all_its_settings() -> (
    None
):
    wrong = {**TRAINING, "schedule": {"type": "wsd", "warmup": "150%"}}
    world = Simulation(
        make_run(
            training=wrong, nodes={"min": 3, "max": 2}, image="registry.example/wrong:1"
        )
    )
    world.settle()
    status = world.raw["status"]
    assert (status["phase"], status["reason"]) == ("Waiting", "InvalidSpec")
    for path in ("spec.training.schedule.warmup", "spec.nodes.max"):
        assert path in status["message"]
    stalled = next(one for one in status["conditions"] if one["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert world.created == []
    assert not {"recipeHash", "image", "startTime"} & set(status), (
        "nothing is settled of a run that was refused"
    )
    world.set_spec(
        training=TRAINING, nodes={"min": 2, "max": 2}, image="registry.example/right:1"
    )
    world.settle()
    assert world.created
    assert world.raw["status"]["image"] == "registry.example/right:1"
    assert world.raw["status"]["recipeHash"]


def test_an_invalid_edit_of_a_training_run_creates_and_ends_no_pod() -> None:
    world = Simulation().run()
    before = world.live()
    world.set_spec(nodes={"min": 3, "max": 2})
    assert world.settle().reason == Reason.INVALID_SPEC
    assert world.live() == before
    world.set_spec(nodes={"min": 2, "max": 3})
    assert world.settle().phase == Phase.RUNNING


def test_changed_settings_restart_all_pods_with_their_state_and_keep_image_and_budgets() -> (
    None
):
    world = Simulation().run()
    image, created = world.status["image"], len(world.created)
    world.config = replace(world.config, trainer_image="registry.example/trainer:2")
    world.set_spec(training={**TRAINING, "checkpoint": {"every": {"steps": 7}}})
    decision = world.reconcile()
    assert (decision.action, decision.phase) == (Action.STOP, Phase.RESTARTING)
    assert "a setting has changed" in decision.message
    world.leave()
    world.settle()
    assert len(world.created) == 2 * created
    assert (world.status["image"], world.status["attempt"]) == (image, 1)
    manifest = json.loads(
        world.children["ConfigMap", "docs-lm-config"]["data"]["trainingrun.json"]
    )
    assert manifest["spec"]["training"]["checkpoint"] == {"every": {"steps": 7}}
    world.set_spec(training={**TRAINING, "checkpoint": {"every": {"steps": "7"}}})
    assert world.settle().phase != Phase.RESTARTING, "the same setting, written otherwise"


def test_another_hash_of_the_same_settings_restarts_no_run() -> None:
    world = Simulation().run()
    world.raw["status"]["memory"]["settings"] = "of another release"
    assert world.settle().phase == Phase.RUNNING
    assert world.status["memory"]["settings"] != "of another release"


def test_a_run_of_a_release_without_settings_hash_restarts_only_for_an_edit_of_settings() -> (
    None
):
    world = Simulation().run()
    del world.raw["status"]["memory"]["settings"]
    world.set_spec(nodes={"min": 1, "max": 3})
    assert world.settle().phase == Phase.RUNNING, "settings are as the pods have them"

    del world.raw["status"]["memory"]["settings"]
    config = world.children["ConfigMap", "docs-lm-config"]
    world.set_spec(training={**TRAINING, "checkpoint": {"every": {"steps": 7}}})
    assert world.reconcile().phase == Phase.RESTARTING
    assert world.children["ConfigMap", "docs-lm-config"] == config, "pods still read it"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "null",
        "3",
        "[]",
        json.dumps({"spec": 3}),
        json.dumps(
            {
                "metadata": {"name": "docs-lm"},
                "spec": {"nodes": {"min": 1, "max": 2}, "script": {"command": ["true"]}},
            }
        ),
    ],
)
def test_settings_that_cannot_be_compared_restart_all_pods(text: str) -> None:
    world = Simulation().run()
    del world.raw["status"]["memory"]["settings"]
    world.children["ConfigMap", "docs-lm-config"]["data"]["trainingrun.json"] = text
    world.set_spec(training={**TRAINING, "checkpoint": {"every": {"steps": 7}}})
    assert world.reconcile().phase == Phase.RESTARTING


def test_an_edit_of_live_settings_is_an_event_that_names_each_field_once() -> None:
    world = Simulation().run()
    told = len(world.events)
    logging = {"every": {"steps": 50}}
    world.set_spec(
        training={**TRAINING, "checkpoint": {"every": {"steps": 7}}, "logging": logging}
    )
    world.settle()
    world.leave()
    world.settle()
    (event,) = [event for event in world.events[told:] if event.reason == "SettingsChanged"]
    assert event.type == "Normal"
    assert "spec.training.checkpoint.every.steps: 100 → 7" in event.message
    assert "spec.training.logging.every.steps: 10 → 50" in event.message
    world.set_spec(nodes={"min": 1, "max": 3})
    world.settle()
    assert [one for one in world.events[told:] if one.reason == "SettingsChanged"] == [
        event
    ]


def test_an_edit_of_a_run_without_pods_is_not_reported_again_by_later_edits() -> None:
    world = Simulation().run()
    world.set_spec(suspend=True)
    world.settle()
    world.leave()
    world.settle()

    def told() -> list[str]:
        return [one.message for one in world.events if one.reason == "SettingsChanged"]

    world.set_spec(training={**TRAINING, "skipSteps": [12]})
    world.settle()
    world.set_spec(nodes={"min": 1, "max": 3})
    world.settle()
    assert told() == ["spec.training.skipSteps: [] → [12]"]

    # Another change is another event, even if it reverts the first change and repeats it.
    world.set_spec(training=TRAINING)
    world.settle()
    world.set_spec(training={**TRAINING, "skipSteps": [12]})
    world.settle()
    world.set_spec(suspend=False)
    world.settle()
    assert told() == ["spec.training.skipSteps: [] → [12]"] * 2


def test_an_edit_that_adds_changes_or_removes_evaluation_pods_is_reported() -> None:
    sets = {key: value for key, value in TRAINING["evaluation"].items() if key != "every"}
    world = Simulation(make_run(training={**TRAINING, "evaluation": sets})).run()
    for evaluation in ({}, {"keepWaiting": 9}, None):
        world.set_spec(evaluation=evaluation)
        world.settle()
        world.leave()
        world.settle()
    assert [one.message for one in world.events if one.reason == "SettingsChanged"] == [
        'spec.evaluation: nothing → {"keepWaiting": 4}',
        "spec.evaluation.keepWaiting: 4 → 9",
        'spec.evaluation: {"keepWaiting": 9} → nothing',
    ]


def test_a_setting_that_needs_no_restart_is_reported_by_an_event_too() -> None:
    world = Simulation().run()
    world.set_spec(training={**TRAINING, "skipSteps": [12]})
    assert world.settle().phase == Phase.RUNNING
    (event,) = [event for event in world.events if event.reason == "SettingsChanged"]
    assert event.message == "spec.training.skipSteps: [] → [12]"


def test_a_recipe_that_differs_only_in_spelling_continues_in_the_same_folder() -> None:
    first = with_claim(shared("docs-lm")).run()
    spelled = {**TRAINING, "batching": {"globalBatchSize": "4096", "microBatchSize": 1}}
    again = with_claim(shared("docs-lm", uid="later", training=spelled), first)
    assert again.reconcile().coordinator_attempt == 1


def test_a_record_of_an_older_release_hashes_the_recipe_by_its_spelling() -> None:
    first = with_claim(shared("docs-lm")).run()
    annotations = first.children["PersistentVolumeClaim", "shared"]["metadata"][
        "annotations"
    ]
    (name,) = annotations
    record = json.loads(annotations[name])
    record["recipe"] = first.look().run.parsed.spelling_hash
    annotations[name] = json.dumps(record)
    again = with_claim(shared("docs-lm", uid="later"), first)
    assert again.reconcile().coordinator_attempt == 1
    other = {**TRAINING, "batching": {"globalBatchSize": 8192, "microBatchSize": 1}}
    another = with_claim(shared("docs-lm", uid="later", training=other), first)
    assert another.settle().reason == Reason.OUTPUT_CONFLICT


def test_a_longer_horizon_of_a_complete_run_is_reported_with_a_remedy() -> None:
    world = Simulation().run()
    for name in world.live():
        world.end(name, 0)
    assert "horizon" not in world.settle().message
    world.set_spec(training={**TRAINING, "horizon": {"steps": 200_000}})
    message = world.settle().message
    assert "the horizon of 200000 steps has no effect on a complete run" in message
    assert "evergrad run --extend" in message


def test_an_invalid_setting_restarts_nothing_before_or_after_its_correction() -> None:
    world = Simulation().run()
    before = world.live()
    world.set_spec(training={**TRAINING, "checkpoint": {"every": {"steps": 0}}})
    assert world.settle().reason == Reason.INVALID_SPEC
    world.set_spec(training=TRAINING)
    assert world.settle().phase == Phase.RUNNING
    assert world.live() == before


def test_a_run_that_is_refused_can_still_be_suspended() -> None:
    world = Simulation().run()
    world.set_spec(nodes={"min": 3, "max": 2}, suspend=True)
    assert world.reconcile().action == Action.STOP


def test_problems_beyond_the_space_of_a_status_are_counted() -> None:
    many = [{"name": f"EVERGRAD_{number}", "value": "x"} for number in range(90)]
    world = Simulation(make_run(template={"env": many}))
    message = world.settle().message
    assert len(message.encode()) <= 4000
    assert message.startswith("spec.template.env[0].name: 'EVERGRAD_0' is reserved")
    told = message.count("is reserved")
    assert message.endswith(
        f" {90 - told} more: `evergrad validate` of the file lists them."
    )
    assert world.raw["status"]["message"] == message


def test_one_problem_that_is_too_long_is_cut() -> None:
    text = list_problems(
        [Problem("spec", "é" * 4000, remedy="Shorten it"), Problem("spec.image", "wrong")]
    )
    assert len(text.encode()) <= 4000
    assert text.endswith("… 1 more: `evergrad validate` of the file lists them.")


def test_time_is_an_argument() -> None:
    assert Simulation().reconcile() == Simulation().reconcile()
    assert Simulation(now=START + 1).reconcile().memory.start_time == START + 1
