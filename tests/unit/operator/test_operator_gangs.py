"""PodGroups of gang schedulers: their members, their creation and changes, and the status of a run without
one."""

import asyncio
import dataclasses
from typing import Any

import pytest
import simulated_run
from fake_kubernetes.simulation import CONFIG, KEY, Simulation
from fake_kubernetes.store import RefusedError, Write

from evergrad_operator.core.decision import EvaluationPod
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.errors import ApiError, OperatorError
from evergrad_operator.core.objects.kinds import POD_GROUPS, Kind, kind_of
from evergrad_operator.core.objects.slim import slim_pod
from evergrad_operator.core.plan.evaluation_pod import build_evaluation_pod
from evergrad_operator.edge.cache.store import CHILDREN
from evergrad_operator.edge.reconcile.gang_api import (
    FOUND_SECONDS,
    MISSING_SECONDS,
    GangApi,
)

LABEL = "scheduling.x-k8s.io/pod-group"
(COSCHEDULING,) = POD_GROUPS["coscheduling"]
BETA, ALPHA_3, ALPHA_2 = POD_GROUPS["podGroup"]


def in_gangs(gang: str, kind: Kind | None, **spec: Any) -> simulated_run.Simulation:
    """A run of two nodes with a third above its minimum, in an installation that places runs by ``gang``."""
    config = dataclasses.replace(simulated_run.CONFIG, gang=gang)
    world = simulated_run.Simulation(simulated_run.make_run(**spec), config=config)
    world.group_kind = kind
    return world


def group_of(world: simulated_run.Simulation) -> dict[str, Any]:
    """The PodGroup of the run."""
    return world.children["PodGroup", "docs-lm"]


def created_pods(world: simulated_run.Simulation) -> dict[str, dict[str, Any]]:
    """Return the pods that the last pass has created, by name."""
    return {pod["metadata"]["name"]: dict(pod) for pod in world.plan.create}


def test_the_coscheduling_group_contains_all_nodes_and_no_other_pod() -> None:
    world = in_gangs("coscheduling", COSCHEDULING)
    world.reconcile()
    group = group_of(world)
    assert (group["apiVersion"], group["spec"]) == (
        "scheduling.x-k8s.io/v1alpha1",
        {"minMember": 2},
    )
    (owner,) = group["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("TrainingRun", "uid-docs-lm")
    labels = {
        name: pod["metadata"]["labels"].get(LABEL)
        for name, pod in created_pods(world).items()
    }
    assert labels == {
        "docs-lm-coordinator-0": None,
        "docs-lm-0-0": "docs-lm",
        "docs-lm-1-0": "docs-lm",
        "docs-lm-2-0": "docs-lm",
    }
    assert not any("schedulingGroup" in pod["spec"] for pod in created_pods(world).values())


@pytest.mark.parametrize("kind", [BETA, ALPHA_3, ALPHA_2])
def test_the_kubernetes_pod_group_contains_all_nodes_and_no_other_pod(kind: Kind) -> None:
    world = in_gangs("podGroup", kind)
    world.reconcile()
    group = group_of(world)
    assert (group["apiVersion"], group["spec"]) == (
        kind.version,
        {"schedulingPolicy": {"gang": {"minCount": 2}}},
    )
    groups = {
        name: pod["spec"].get("schedulingGroup")
        for name, pod in created_pods(world).items()
    }
    ours = {"podGroupName": "docs-lm"}
    assert groups == {
        "docs-lm-coordinator-0": None,
        "docs-lm-0-0": ours,
        "docs-lm-1-0": ours,
        "docs-lm-2-0": ours,
    }
    assert not any(
        LABEL in pod["metadata"]["labels"] for pod in created_pods(world).values()
    )


@pytest.mark.parametrize(
    ("gang", "kind"), [("coscheduling", COSCHEDULING), ("podGroup", BETA)]
)
def test_preparation_and_evaluation_pods_join_no_group(gang: str, kind: Kind) -> None:
    annotated = {"labels": {LABEL: "of-the-user"}}
    world = in_gangs(gang, kind, preparation={}, template=annotated)
    world.reconcile()
    (pod,) = created_pods(world).values()
    assert pod["metadata"]["name"] == "docs-lm-prepare-0"
    assert LABEL not in pod["metadata"]["labels"] and "schedulingGroup" not in pod["spec"]
    assert ("PodGroup", "docs-lm") not in world.children, "no node is asked for yet"
    evaluating = build_evaluation_pod(
        world.look().run, world.decision.memory, world.config, EvaluationPod(4, 0)
    )
    assert LABEL not in evaluating["metadata"]["labels"]
    assert "schedulingGroup" not in evaluating["spec"]


@pytest.mark.parametrize(
    ("gang", "kind"), [("coscheduling", COSCHEDULING), ("podGroup", BETA)]
)
def test_a_replacement_and_a_node_above_the_minimum_join_the_same_group(
    gang: str, kind: Kind
) -> None:
    world = in_gangs(gang, kind).run(40)
    world.age(100)
    world.end("docs-lm-1-0", 137)
    world.reconcile()
    (replacement,) = created_pods(world).values()
    world.start()
    world.settle()
    world.set_spec(nodes={"min": 2, "max": 4})
    world.reconcile()
    (further,) = created_pods(world).values()
    assert further["metadata"]["name"] == "docs-lm-3-0"
    for pod in (replacement, further):
        found = pod["metadata"]["labels"].get(LABEL) or pod["spec"]["schedulingGroup"]
        assert found in ("docs-lm", {"podGroupName": "docs-lm"})
    assert group_of(world)["spec"] in (
        {"minMember": 2},
        {"schedulingPolicy": {"gang": {"minCount": 2}}},
    )


def test_the_group_follows_the_minimum_if_its_api_version_allows_a_change() -> None:
    for kind, gang, expected in (
        (COSCHEDULING, "coscheduling", {"minMember": 1}),
        (BETA, "podGroup", {"schedulingPolicy": {"gang": {"minCount": 1}}}),
        (ALPHA_2, "podGroup", {"schedulingPolicy": {"gang": {"minCount": 2}}}),
    ):
        world = in_gangs(gang, kind).run(40)
        world.set_spec(nodes={"min": 1, "max": 3})
        world.settle()
        assert group_of(world)["spec"] == expected, kind


def classes(world: simulated_run.Simulation) -> dict[str, str]:
    """Return the priority class of each node that the last pass has created."""
    return {
        name: pod["spec"].get("priorityClassName", "")
        for name, pod in created_pods(world).items()
        if "coordinator" not in name
    }


def test_the_kubernetes_pod_group_has_the_priority_class_of_its_pods() -> None:
    # Its scheduler places no pod whose priority differs from the group's.
    for gang, kind, expected in (
        ("podGroup", BETA, "high"),
        ("podGroup", ALPHA_3, "high"),
        ("podGroup", ALPHA_2, "high"),
        ("coscheduling", COSCHEDULING, None),
    ):
        world = in_gangs(gang, kind, template={"priorityClassName": "high"})
        world.reconcile()
        assert group_of(world)["spec"].get("priorityClassName") == expected
        assert set(classes(world).values()) == {"high"}


def test_a_group_keeps_its_immutable_priority_class_until_the_run_has_no_pods() -> None:
    world = in_gangs("podGroup", BETA, template={"priorityClassName": "low"}).run(40)
    world.set_spec(template={"priorityClassName": "high"}, nodes={"min": 3, "max": 3})
    world.age(100)
    world.end("docs-lm-1-0", 137)
    world.reconcile()
    assert classes(world) == {"docs-lm-1-1": "low"}
    assert group_of(world)["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "priorityClassName": "low",
    }

    # A suspended run deletes its group after its last pod, and has another one afterwards.
    world.set_spec(suspend=True)
    world.reconcile()
    assert world.live() == [] and ("PodGroup", "docs-lm") in world.children
    for _ in range(4):
        world.leave()
        world.reconcile()
    assert ("PodGroup", "docs-lm") not in world.children
    world.set_spec(suspend=False)
    world.reconcile()
    assert set(classes(world).values()) == {"high"} and len(classes(world)) == 3
    assert group_of(world)["spec"]["priorityClassName"] == "high"


def test_the_message_of_a_scheduler_that_refuses_a_pod_of_a_group_is_quoted() -> None:
    world = in_gangs("podGroup", BETA)
    world.reconcile()
    said = "all pods in a single pod group should have the same .spec.schedulerName set"
    for name in world.live():
        world.unschedulable(name, said, reason="SchedulerError")
    decision = world.reconcile()
    assert (decision.phase, decision.reason) == ("Waiting", "Unschedulable")
    assert said in decision.message and "spec.restartNonce" in decision.message


def test_a_restart_of_all_pods_gives_the_group_their_new_priority_class() -> None:
    world = in_gangs("podGroup", BETA, template={"priorityClassName": "low"}).run(40)
    world.set_spec(template={"priorityClassName": "high"}, restartNonce="again")
    for _ in range(6):
        world.reconcile()
        world.leave()
    pods = [pod for name, pod in world.pods.items() if name in world.live()]
    assert [pod["spec"]["priorityClassName"] for pod in pods] == ["high"] * 3
    assert group_of(world)["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize("kind", [BETA, ALPHA_2])
def test_a_failed_run_that_is_restarted_gets_a_new_group_before_its_pods(
    kind: Kind,
) -> None:
    world = in_gangs("podGroup", kind, template={"priorityClassName": "low"}).run(40)
    world.train(100, phase="Failed", reason="UserError", message="bad data")
    for name in world.live():
        world.end(name, 64)
    for _ in range(6):
        world.reconcile()
        world.leave()
        world.age(20)
    assert world.status["phase"] == "Failed" and ("PodGroup", "docs-lm") in world.children
    world.set_spec(
        restartNonce="again",
        template={"priorityClassName": "high"},
        nodes={"min": 3, "max": 3},
    )
    decision = world.reconcile()
    assert (decision.phase, decision.requeue_after) == ("Restarting", 1.0)
    assert ("PodGroup", "docs-lm") not in world.children and created_pods(world) == {}
    world.reconcile()
    nodes = [
        pod["spec"]
        for name, pod in created_pods(world).items()
        if "coordinator" not in name
    ]
    assert [one["priorityClassName"] for one in nodes] == ["high"] * 3
    assert group_of(world)["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "priorityClassName": "high",
    }
    # It is created once for each restart.
    world.run(40)
    assert world.live() and ("PodGroup", "docs-lm") in world.children


def test_the_group_exists_for_the_new_pods_if_all_pods_are_lost_together() -> None:
    world = in_gangs("podGroup", BETA).run(40)
    for name in world.live():
        world.end(name, 137)
    world.reconcile()
    assert ("PodGroup", "docs-lm") in world.children


def test_a_suspended_run_keeps_its_coscheduling_group() -> None:
    world = in_gangs("coscheduling", COSCHEDULING).run(40)
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    assert ("PodGroup", "docs-lm") in world.children


def test_a_run_that_can_train_on_one_node_needs_no_group() -> None:
    world = in_gangs("coscheduling", None, nodes={"min": 1, "max": 3})
    decision = world.reconcile()
    assert decision.reason == "Starting"
    assert ("PodGroup", "docs-lm") not in world.children
    assert not any(
        LABEL in pod["metadata"]["labels"] for pod in created_pods(world).values()
    )


@pytest.mark.parametrize(
    ("gang", "group", "remedy"),
    [
        ("coscheduling", "scheduling.x-k8s.io", "Install the PodGroup and the scheduler"),
        ("podGroup", "scheduling.k8s.io", "Enable the feature gate GenericWorkload"),
    ],
)
def test_a_run_whose_required_group_is_missing_creates_no_pod_and_names_the_remedy(
    gang: str, group: str, remedy: str
) -> None:
    world = in_gangs(gang, None, preparation={})
    decision = world.settle()
    assert (decision.phase, decision.reason) == ("Waiting", "GangUnavailable")
    assert world.pods == {}
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "GangUnavailable")
    assert f"no PodGroup of {group}" in decision.message
    assert (
        remedy in decision.message and "runs.gang of the chart to none" in decision.message
    )
    assert decision.requeue_after is not None, "nothing tells of an API group that appears"
    # When it exists, the run starts by itself.
    world.group_kind = POD_GROUPS[gang][0]
    world.reconcile()
    assert list(created_pods(world)) == ["docs-lm-prepare-0"]
    assert world.condition("Stalled")["status"] == "False"


def test_enabling_gangs_leaves_existing_runs_unchanged_until_they_restart() -> None:
    world = in_gangs("none", None).run(40)
    world.config = dataclasses.replace(world.config, gang="coscheduling")
    world.group_kind = COSCHEDULING
    world.age(100)
    world.end("docs-lm-1-0", 137)
    world.reconcile()
    # A group with only this pod would wait forever for a second member.
    (pod,) = created_pods(world).values()
    assert LABEL not in pod["metadata"]["labels"]
    assert ("PodGroup", "docs-lm") not in world.children
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.set_spec(suspend=False)
    world.reconcile()
    labels = [pod["metadata"]["labels"] for pod in created_pods(world).values()]
    nodes = [one for one in labels if one["evergrad.dev/role"] == "node"]
    assert [one.get(LABEL) for one in nodes] == ["docs-lm"] * 3
    assert group_of(world)["spec"] == {"minMember": 2}


def test_the_scheduler_of_the_installation_applies_to_nodes_that_set_none() -> None:
    for template, expected in (({}, "gangs"), ({"schedulerName": "mine"}, "mine")):
        world = in_gangs("coscheduling", COSCHEDULING, template=template)
        world.config = dataclasses.replace(world.config, scheduler_name="gangs")
        world.reconcile()
        coordinator, *nodes = created_pods(world).values()
        assert "schedulerName" not in coordinator["spec"]
        assert {pod["spec"]["schedulerName"] for pod in nodes} == {expected}


def test_a_pod_records_its_kind_of_gang_and_the_cache_keeps_it() -> None:
    for gang, kind in (("coscheduling", COSCHEDULING), ("podGroup", BETA), ("none", None)):
        world = in_gangs(gang, kind)
        world.reconcile()
        world.pods = {name: dict(slim_pod(pod)) for name, pod in world.pods.items()}
        assert {pod.gang for pod in world.look().nodes} == {"" if gang == "none" else gang}


# ---- with an API server that may refuse --------------------------------------------------------------------


def clustered(gang: str, *served: Kind) -> Simulation:
    """A cluster that has these PodGroups, with a run that needs two nodes."""
    simulation = Simulation(config=dataclasses.replace(CONFIG, gang=gang))
    simulation.cluster.served = {kind.version for kind in served}
    simulation.create_run(nodes={"min": 2, "max": 2})
    return simulation


def test_the_newest_api_version_that_the_api_server_serves_is_used() -> None:
    simulation = clustered("podGroup", ALPHA_2, ALPHA_3)
    simulation.settle()
    assert simulation.store.get("podgroups", "ns", "run")["apiVersion"] == ALPHA_3.version
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_no_pod_is_created_while_the_group_is_refused() -> None:
    simulation = clustered("coscheduling", COSCHEDULING)

    def refuse(write: Write) -> None:
        if write.plural == "podgroups":
            raise RefusedError(403, "Forbidden", "podgroups is forbidden")

    simulation.store.before = refuse
    simulation.reconcile()
    assert simulation.pods() == simulation.pods("coordinator") == []
    assert simulation.status["reason"] == "AdmissionRefused"
    assert "PodGroup run" in simulation.status["message"]
    simulation.store.before = lambda write: None
    simulation.now += 60
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]


def test_a_removed_type_that_the_operator_has_cached_is_detected_at_the_next_attempt() -> (
    None
):
    simulation = clustered("coscheduling", COSCHEDULING)
    simulation.reconcile()
    simulation.cluster.served = set()
    with simulation.by_others():
        simulation.store.delete("trainingruns", *KEY)
        simulation.settle()

    def refuse(write: Write) -> None:
        if write.plural == "podgroups":
            raise RefusedError(404, "NotFound", "404 page not found")

    simulation.store.before = refuse
    simulation.create_run(nodes={"min": 2, "max": 2})
    simulation.reconcile()
    assert simulation.status["reason"] == "CreateFailed"
    simulation.now += 10
    simulation.settle()
    assert simulation.status["reason"] == "GangUnavailable"
    assert simulation.pods() == []


def list_or_fail(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, status: int = 404
) -> None:
    """Let lists of PodGroups in a version that the API server does not serve fail with this status."""
    real = simulation.cluster.list_all

    async def list_all(kind: Kind, namespace: str | None, **more: Any) -> Any:
        if kind.kind == "PodGroup" and kind.version not in simulation.cluster.served:
            raise ApiError(status, "NotFound", "404 page not found")
        return await real(kind, namespace, **more)

    monkeypatch.setattr(simulation.cluster, "list_all", list_all)


def test_a_lost_node_is_replaced_at_once_after_an_upgrade_has_removed_the_group_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = clustered("podGroup", ALPHA_3)
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.cluster.served = {BETA.version}
    list_or_fail(simulation, monkeypatch)
    simulation.now += 100
    simulation.end_pod("run-1-0", 75)
    simulation.reconcile()
    assert simulation.pods() == ["run-0-0", "run-1-0", "run-1-1"]
    assert simulation.refused() == []


def test_groups_that_cannot_be_listed_are_reported_and_listed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = clustered("podGroup", BETA)
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    served, simulation.cluster.served = simulation.cluster.served, set()
    list_or_fail(simulation, monkeypatch, 403)
    simulation.now += 100
    simulation.end_pod("run-1-0", 75)
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.refused() == [("list", "run", "NotFound")]
    assert "PodGroup run" in simulation.status["message"]
    simulation.cluster.served = served
    simulation.now += 60
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0", "run-1-1"]
    assert simulation.refused() == []


def test_failed_discovery_holds_only_a_new_run_and_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = clustered("coscheduling", COSCHEDULING)

    async def serves(kind: Kind) -> bool:
        raise ApiError(503, "ServiceUnavailable", "the discovery is away")

    with monkeypatch.context() as patch:
        patch.setattr(simulation.cluster, "serves", serves)
        delay = simulation.reconcile()
        assert delay is not None and delay <= 10
        assert simulation.status["reason"] == "ApiUnavailable"
        assert "the discovery is away" in simulation.status["message"]
        assert simulation.pods() == []
    simulation.now += 60
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"] and simulation.refused() == []

    # Running runs continue with the group version that was found before.
    simulation.start_pods()
    simulation.settle()
    simulation.now += 2 * FOUND_SECONDS
    monkeypatch.setattr(simulation.cluster, "serves", serves)
    simulation.end_pod("run-1-0", 75)
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0", "run-1-1"]


def test_a_group_of_another_owner_is_never_taken_over() -> None:
    simulation = clustered("coscheduling", COSCHEDULING)
    body = {"metadata": {"name": "run", "namespace": "ns"}, "spec": {"minMember": 9}}
    with simulation.by_others():
        simulation.store.create("podgroups", body)
    simulation.reconcile()
    assert simulation.pods() == [] and simulation.status["reason"] == "NameTaken"
    assert simulation.store.get("podgroups", "ns", "run")["spec"] == {"minMember": 9}


def test_a_deleted_group_is_created_again_before_the_next_pod() -> None:
    simulation = clustered("coscheduling", COSCHEDULING)
    simulation.settle()
    with simulation.by_others():
        simulation.store.delete("podgroups", "ns", "run")
        simulation.store.delete("pods", "ns", "run-1-0")
    simulation.now += 100
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-1"]
    assert ("podgroups", "run") in simulation.children()


def test_no_pod_is_created_in_a_group_that_is_being_deleted() -> None:
    simulation = clustered("podGroup", BETA)
    simulation.settle()
    body = simulation.store.get("podgroups", "ns", "run")
    with simulation.by_others():
        # Its finalizer stays for a while.
        simulation.store.change(
            "podgroups",
            "ns",
            "run",
            {"metadata": {"deletionTimestamp": "2027-01-15T08:00:00Z"}},
        )
        simulation.store.remove("pods", "ns", "run-1-0")
    simulation.cache.forget(CHILDREN, {**body, "kind": "PodGroup"})
    simulation.now += 100
    simulation.reconcile()
    assert simulation.pods() == ["run-0-0"]
    assert simulation.refused() == [("apply", "run", "NameLeaving")]
    with simulation.by_others():
        simulation.store.remove("podgroups", "ns", "run")
    simulation.now += 10
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-1"]
    assert ("podgroups", "run") in simulation.children()


def test_a_run_deletes_its_group_when_its_time_to_live_is_over() -> None:
    simulation = clustered("coscheduling", COSCHEDULING)
    spec = {"spec": {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 10}}
    simulation.store.change("trainingruns", *KEY, spec)
    simulation.settle()
    assert ("podgroups", "run") in simulation.children()
    for _ in range(4):
        simulation.now += 100
        simulation.settle()
        simulation.reap()
    assert simulation.status["reason"] == "DeadlineExceeded"
    assert ("podgroups", "run") not in simulation.children()


def test_a_run_is_cleaned_up_if_the_type_of_its_group_no_longer_exists() -> None:
    simulation = clustered("coscheduling", COSCHEDULING)
    spec = {"spec": {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 10}}
    simulation.store.change("trainingruns", *KEY, spec)
    simulation.settle()
    simulation.cluster.served = set()
    for _ in range(4):
        simulation.now += 700
        simulation.settle()
        simulation.reap()
    assert simulation.status["reason"] == "DeadlineExceeded"
    assert ("configmaps", "run-config") not in simulation.children()
    assert simulation.refused() == []


def test_the_message_names_an_object_of_an_unknown_version() -> None:
    body = {"kind": "PodGroup", "apiVersion": "x/v9", "metadata": {"name": "run"}}
    with pytest.raises(OperatorError, match=r"PodGroup run: .* API version x/v9"):
        kind_of(body)


class Served:
    """An API server that serves these versions and counts the requests."""

    def __init__(self, *versions: str) -> None:
        self.versions = versions
        self.asked: list[str] = []

    async def serves(self, kind: Kind) -> bool:
        self.asked.append(kind.version)
        return kind.version in self.versions


def test_discovery_is_requested_once_for_all_runs_and_again_after_a_bounded_time() -> None:
    server, now = Served(), [0.0]
    api = GangApi(server, "podGroup", clock=lambda: now[0])
    assert [asyncio.run(api.find()) for _ in range(3)] == [None] * 3
    assert server.asked == [BETA.version, ALPHA_3.version, ALPHA_2.version]
    server.versions = (ALPHA_2.version,)
    now[0] += MISSING_SECONDS
    assert asyncio.run(api.find()) == ALPHA_2
    # An upgrade of the cluster brings a newer one.
    server.versions = (BETA.version,)
    now[0] += FOUND_SECONDS - 1
    assert asyncio.run(api.find()) == ALPHA_2
    now[0] += 1
    assert asyncio.run(api.find()) == BETA
    assert len(server.asked) == 7


def test_an_installation_without_gangs_requests_no_discovery() -> None:
    server = Served()
    assert asyncio.run(GangApi(server, Config("t", "o").gang).find()) is None
    assert server.asked == []
