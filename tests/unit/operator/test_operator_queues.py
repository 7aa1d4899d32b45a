"""A run in a queue: a model of Kueue admits, evicts and finishes its pods, and counts their quota."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import simulated_run
from fake_kubernetes.kueue import FINALIZER, GROUP, QUEUE, Kueue
from fake_kubernetes.simulation import KEY, Crash, Simulation
from fake_kubernetes.store import Write

from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.kueue import parse_place
from evergrad_operator.core.observe.observe import ApplyFailure

PATIENCE_SECONDS = simulated_run.CONFIG.give_back_seconds
LABELS = {QUEUE: "gpus", "kueue.x-k8s.io/priority-class": "normal"}


class Queued:
    """One run of two nodes with a third above its minimum, the operator, Kueue, and kubelets."""

    def __init__(self, *, quota: int = 3, manages_all: bool = False, **spec: Any) -> None:
        self.simulation = Simulation()
        self.kueue = Kueue(self.simulation, quota, manages_all=manages_all)
        self.labels: dict[str, str] | None = LABELS
        self.spec = {"nodes": {"min": 2, "max": 3}, **spec}

    def create(self) -> "Queued":
        """Apply the run as a user does."""
        self.simulation.create_run(**self.spec)
        self.label(self.labels)
        return self

    def label(self, labels: dict[str, str] | None) -> None:
        """Set labels of the run as a user does."""
        self.simulation.store.change("trainingruns", *KEY, {"metadata": {"labels": labels}})

    def advance(self, rounds: int = 6, *, is_reaped: bool = True) -> "Queued":
        """Let all components act repeatedly; some seconds pass each time."""
        for _ in range(rounds):
            self.simulation.settle()
            self.kueue.work()
            self.simulation.start_pods()
            if is_reaped:
                self.simulation.reap()
                self.kueue.work()
            self.simulation.now += 4
        self.simulation.settle()
        return self

    def train(self) -> "Queued":
        """Continue until all nodes train."""
        self.advance().simulation.train()
        self.simulation.settle()
        return self

    def suspend(self, suspend: bool) -> None:
        """Suspend or resume the run as a user does; its nodes have reported their last save."""
        none = {"min": 2, "max": 3, "ready": 0, "connected": 0}
        self.simulation.train(phase="Waiting", nodes=none)
        self.simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": suspend}})

    def preempt(self, *, left: int) -> None:
        """Admit a workload of higher priority in place of the gang. ``left``: the remaining quota."""
        group = next(name for name in self.kueue.admitted if not name.startswith("pod-"))
        self.simulation.now += 100
        self.kueue.quota = left
        self.kueue.preempt(group)
        self.simulation.train(phase="Waiting", nodes={"min": 2, "max": 3, "ready": 0})

    def running(self) -> list[str]:
        """Return the names of running node pods."""
        return [
            name
            for name in self.simulation.pods()
            if self.pod(name)["status"]["phase"] == "Running"
            and "deletionTimestamp" not in self.pod(name)["metadata"]
        ]

    def pod(self, name: str) -> dict[str, Any]:
        return self.simulation.store.get("pods", "ns", name)

    def groups(self) -> dict[str, str]:
        """Return the group of each node's pod; empty for pods that are admitted alone."""
        return {
            name: self.pod(name)["metadata"]["labels"].get(GROUP, "")
            for name in self.simulation.pods()
        }

    @property
    def status(self) -> dict[str, Any]:
        return self.simulation.status

    def condition(self, kind: str) -> str:
        return next(
            one["status"] for one in self.status["conditions"] if one["type"] == kind
        )


def test_nodes_above_the_minimum_are_created_once_all_nodes_below_it_have_a_host() -> None:
    world = Queued().create()
    world.simulation.settle()
    assert world.simulation.pods() == ["run-0-0", "run-1-0"]
    world.kueue.work()
    world.simulation.settle()
    assert world.simulation.pods() == ["run-0-0", "run-1-0"], "admitted, and on no host yet"
    world.simulation.start_pods()
    world.simulation.settle()
    assert world.simulation.pods() == ["run-0-0", "run-1-0", "run-2-0"]
    uid = world.simulation.store.get("trainingruns", *KEY)["metadata"]["uid"]
    group = f"run-{uid[:5]}-0"
    assert world.groups() == {"run-0-0": group, "run-1-0": group, "run-2-0": ""}


def test_a_node_above_the_minimum_is_created_at_least_a_second_after_the_others_are_scheduled() -> (
    None
):
    world = Queued().create()
    world.simulation.settle()
    world.kueue.work()
    world.simulation.start_pods()
    for name in world.simulation.pods():
        pod = world.pod(name)
        scheduled = {
            "type": "PodScheduled",
            "status": "True",
            "lastTransitionTime": "2027-01-15T08:00:00Z",
        }
        conditions = [*pod["status"]["conditions"], scheduled]
        world.simulation.store.change(
            "pods", "ns", name, {"status": {"conditions": conditions}}
        )
    place = parse_place(world.pod("run-0-0"))
    assert place.scheduled_at is not None
    world.simulation.now = place.scheduled_at + 0.5
    delay = world.simulation.settle()
    assert (world.simulation.pods(), delay) == (["run-0-0", "run-1-0"], 1.0)
    world.simulation.now = place.scheduled_at + 1.5
    world.simulation.settle()
    assert world.simulation.pods() == ["run-0-0", "run-1-0", "run-2-0"]


@pytest.mark.parametrize("is_watch_late", [False, True])
def test_a_queued_run_names_its_queue_and_needs_no_person(
    is_watch_late: bool,
) -> None:
    world = Queued(quota=1)
    world.simulation.is_watch_late = is_watch_late
    world.create().advance(2)
    status = world.status
    assert (status["phase"], status["reason"]) == ("Waiting", "Queued")
    assert status["message"] == (
        "node 0 (pod run-0-0) and 1 more wait to be admitted by the queue gpus"
    )
    assert (world.condition("Stalled"), world.condition("Reconciling")) == ("False", "True")
    events = world.simulation.store.list("events")
    assert [one["message"] for one in events if one["reason"] == "Queued"] == [
        status["message"]
    ]


def test_a_lost_pod_of_a_group_is_replaced_once_and_only_after_it_has_ended() -> None:
    world = Queued().create().train()
    world.simulation.now += 100
    world.simulation.store.delete("pods", "ns", "run-0-0")
    world.advance(2, is_reaped=False)
    assert world.simulation.pods() == ["run-0-0", "run-1-0", "run-2-0"], (
        "its container saves, and Kueue would delete a successor as one too many"
    )
    world.advance()
    assert world.running() == ["run-0-1", "run-1-0", "run-2-0"]
    assert world.kueue.excess == []
    assert world.groups()["run-0-1"] == world.groups()["run-1-0"]
    assert world.status["restarts"] == {"total": 1, "byCause": {"Deleted": 1}}


def test_a_pod_whose_container_was_killed_is_replaced_after_its_phase_has_ended() -> None:
    world = Queued().create().train()
    world.simulation.now += 100
    pod = world.pod("run-1-0")
    terminated = {"exitCode": 137, "reason": "Error", "finishedAt": None}
    container = {
        **pod["status"]["containerStatuses"][0],
        "state": {"terminated": terminated},
    }
    world.simulation.store.change(
        "pods", "ns", "run-1-0", {"status": {"containerStatuses": [container]}}
    )
    world.advance(3)
    assert "run-1-1" not in world.simulation.pods(), "the pod's phase is still Running"
    world.simulation.end_pod("run-1-0", 137)
    world.advance()
    assert world.running() == ["run-0-0", "run-1-1", "run-2-0"]
    assert (world.kueue.excess, world.status["restarts"]["total"]) == ([], 1)


def test_a_replacement_that_avoids_a_host_has_the_role_of_the_replaced_pod() -> None:
    world = Queued().create().train()
    world.simulation.now += 100
    world.simulation.end_pod("run-0-0", 70)
    world.advance()
    # The model asserts that all pods of a group have one role.
    assert world.running() == ["run-0-1", "run-1-0", "run-2-0"]


def test_a_group_without_live_pods_is_followed_by_a_new_group() -> None:
    world = Queued().create().train()
    old = world.groups()["run-0-0"]
    world.simulation.now += 100
    for name in ("run-0-0", "run-1-0"):
        world.simulation.end_pod(name, 137)
    world.kueue.work()
    world.advance(10)
    assert world.running() == ["run-0-1", "run-1-1", "run-2-0"]
    groups = world.groups()
    assert groups["run-0-1"] == groups["run-1-1"] == f"{old[:-1]}1"
    assert (world.kueue.excess, world.kueue.used) == ([], 3)


def test_a_replacement_that_joined_a_group_too_late_is_deleted_and_created_in_a_new_group() -> (
    None
):
    world = Queued().create().train()
    old = world.groups()["run-0-0"]
    world.simulation.now += 100
    world.simulation.end_pod("run-0-0", 137)
    world.simulation.settle()
    world.simulation.end_pod("run-1-0", 137)
    # Kueue has finished the group just before it sees the replacement.
    world.kueue.finished.add(old)
    world.advance(14)
    assert [name[:5] for name in world.running()] == ["run-0", "run-1", "run-2"]
    groups = world.groups()
    assert groups["run-0-2"] == f"{old[:-1]}1" == max(groups.values()), groups
    assert world.status["restarts"]["total"] == 2, "what never ran is no loss"


def test_a_suspended_run_releases_its_quota_and_resumes_with_a_quota_for_one_gang() -> None:
    world = Queued(quota=3).create().train()
    world.suspend(True)
    world.advance()
    assert (world.status["phase"], world.kueue.used) == ("Suspended", 0)
    world.suspend(False)
    world.advance(8)
    assert len(world.running()) == 3
    numbers = {group.rpartition("-")[2] for group in world.groups().values() if group}
    assert numbers == {"1"}, "a group of its own, also across a suspension"


def test_a_run_that_is_suspended_while_it_is_queued_reaches_suspended() -> None:
    world = Queued(quota=1).create().advance(2)
    world.suspend(True)
    # A new coordinator has time for its first response.
    world.advance(20)
    assert (world.status["phase"], world.simulation.pods()) == ("Suspended", [])


@pytest.mark.parametrize("has_operator", [True, False])
def test_a_deleted_run_releases_its_quota_with_and_without_an_operator(
    has_operator: bool,
) -> None:
    world = Queued().create().train()
    assert world.kueue.used == 3
    world.simulation.store.remove("trainingruns", *KEY)
    if has_operator:
        world.simulation.settle()
    for _ in range(3):
        world.simulation.reap()
        world.kueue.work()
    assert (world.simulation.pods(), world.kueue.used) == ([], 0)


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_an_ended_run_releases_its_quota(phase: str) -> None:
    world = Queued().create().train()
    if phase == "Failed":
        failure = {
            "cause": "user_error",
            "node": "1",
            "rank": 1,
            "exitCode": 1,
            "message": "x",
        }
        world.simulation.train(
            phase="Failed", reason="FailuresWithoutProgress", lastFailure=failure
        )
    for name in world.running():
        world.simulation.end_pod(name, 70 if phase == "Failed" else 0)
    world.advance()
    assert (world.status["phase"], world.kueue.used) == (phase, 0)
    assert not any(FINALIZER in str(world.pod(name)) for name in world.simulation.pods())


def test_a_preempted_gang_takes_its_elastic_nodes_along_and_returns() -> None:
    world = Queued().create().train()
    world.preempt(left=1)
    world.advance(12)
    assert world.running() == [], (
        "one node is below the minimum, and would hold quota for nothing"
    )
    assert world.kueue.used == 0
    status = world.status
    assert (status["phase"], status["reason"]) == ("Waiting", "Queued")
    assert status["message"].endswith("the queue gpus, because they were preempted")
    assert status["restarts"] == {"total": 2, "byCause": {"Preempted": 2}}
    world.kueue.quota = 3
    world.advance(8)
    assert [name[:5] for name in world.running()] == ["run-0", "run-1", "run-2"]
    assert (world.kueue.excess, world.status["restarts"]["total"]) == ([], 2)


def test_enough_elastic_nodes_continue_to_train_while_the_gang_waits() -> None:
    world = Queued(quota=4, nodes={"min": 2, "max": 4}).create().train()
    world.preempt(left=2)
    world.advance(12)
    assert world.running() == ["run-2-0", "run-3-0"]


def test_a_preempted_elastic_node_returns_when_quota_is_available() -> None:
    world = Queued().create().train()
    world.simulation.now += 100
    world.kueue.quota = 2
    world.kueue.preempt("pod-run-2-0")
    world.advance()
    assert world.running() == ["run-0-0", "run-1-0"]
    assert world.status["phase"] == "Running"
    assert "wait" in world.status["message"] and "the queue gpus" in world.status["message"]
    world.kueue.quota = 3
    world.advance()
    assert world.running() == ["run-0-0", "run-1-0", "run-2-1"]
    assert world.status["restarts"]["byCause"] == {"Preempted": 1}


def test_a_lost_host_costs_the_gang_one_node_that_is_admitted_alone() -> None:
    world = Queued(quota=4).create().train()
    world.simulation.now += 100
    mark = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
    }
    pod = world.pod("run-1-0")
    world.simulation.store.change(
        "pods",
        "ns",
        "run-1-0",
        {"status": {"conditions": [*pod["status"]["conditions"], mark]}},
    )
    world.simulation.store.delete("pods", "ns", "run-1-0")
    world.advance(12, is_reaped=False)
    # Kueue counts the pod as long as it exists, which may be forever.
    assert world.running() == ["run-0-0", "run-1-1", "run-2-0"]
    assert (world.groups()["run-1-1"], world.kueue.excess) == ("", [])


def test_elastic_nodes_have_their_own_priority_if_the_run_sets_one() -> None:
    world = Queued().create()
    annotations = {"evergrad.dev/elastic-priority-class": "low"}
    world.simulation.store.change(
        "trainingruns", *KEY, {"metadata": {"annotations": annotations}}
    )
    world.train()
    key = "kueue.x-k8s.io/priority-class"
    classes = [
        world.pod(name)["metadata"]["labels"][key] for name in world.simulation.pods()
    ]
    assert classes == ["normal", "normal", "low"]


def test_a_preparation_that_waits_without_a_queue_is_created_again_in_the_named_queue() -> (
    None
):
    preparation = {"resources": {"requests": {"cpu": "1"}}}
    world = Queued(quota=4, manages_all=True, preparation=preparation)
    world.labels = None
    world.create().advance(3)
    assert world.status["reason"] == "Queued" and world.condition("Stalled") == "True"
    assert (
        "the preparation (pod run-prepare-0) waits for a queue" in world.status["message"]
    )
    world.label(LABELS)
    world.advance()
    (name,) = world.simulation.pods("preparation")
    assert world.pod(name)["status"]["phase"] == "Running"
    assert world.pod(name)["metadata"]["labels"][QUEUE] == "gpus"


def test_a_coordinator_that_kueue_holds_is_created_again_in_the_queue_of_the_run() -> None:
    world = Queued(quota=4, manages_all=True).create()
    world.advance(8)
    (name,) = world.simulation.pods("coordinator")
    assert name == "run-coordinator-1"
    labels = world.pod(name)["metadata"]["labels"]
    assert labels[QUEUE] == "gpus" and GROUP not in labels
    assert world.pod(name)["status"]["phase"] == "Running"
    assert world.status["restarts"] == {"total": 0}
    assert len(world.running()) == 3
    # Its successors are queued from the beginning.
    world.simulation.train()
    world.simulation.store.delete("pods", "ns", name)
    world.advance()
    assert world.simulation.pods("coordinator") == ["run-coordinator-2"]
    assert world.status["restarts"]["byCause"] == {"CoordinatorLost": 1}


def test_a_coordinator_is_in_no_queue_if_kueue_does_not_manage_it() -> None:
    world = Queued().create().advance()
    (name,) = world.simulation.pods("coordinator")
    assert QUEUE not in world.pod(name)["metadata"]["labels"]


def test_a_run_without_a_queue_that_kueue_holds_names_the_label_to_set_and_then_continues() -> (
    None
):
    world = Queued(quota=4, manages_all=True)
    world.labels = None
    world.create().advance(3)
    status = world.status
    assert (status["phase"], status["reason"]) == ("Waiting", "Queued")
    assert status["message"].endswith(
        "Set the label kueue.x-k8s.io/queue-name on the TrainingRun"
    )
    assert world.condition("Stalled") == "True"
    world.label(LABELS)
    world.advance(12)
    assert len(world.running()) == 3 and world.condition("Stalled") == "False"
    assert world.status["restarts"] == {"total": 0}


def test_a_run_whose_queue_changes_waits_in_the_new_queue() -> None:
    world = Queued(quota=1).create().advance(2)
    world.label({**LABELS, QUEUE: "others"})
    world.kueue.quota = 0
    world.advance(8)
    queues = {
        world.pod(name)["metadata"]["labels"][QUEUE] for name in world.simulation.pods()
    }
    assert queues == {"others"}
    assert world.status["message"].endswith("the queue others")


def test_a_waiting_coordinator_leaves_the_former_queue_of_the_run() -> None:
    world = Queued(quota=0, manages_all=True).create().advance(8)
    (name,) = world.simulation.pods("coordinator")
    assert (name, world.pod(name)["metadata"]["labels"][QUEUE]) == (
        "run-coordinator-1",
        "gpus",
    )
    world.label({**LABELS, QUEUE: "others"})
    world.advance(8)
    (name,) = world.simulation.pods("coordinator")
    assert name == "run-coordinator-2", "and is made no further time"
    assert world.pod(name)["metadata"]["labels"][QUEUE] == "others"
    assert world.status["restarts"] == {"total": 0}
    # If there is room, it continues from there.
    world.label(LABELS)
    world.kueue.quota = 4
    world.advance(12)
    assert len(world.running()) == 3 and world.status["restarts"] == {"total": 0}


def test_a_coordinator_leaves_its_queue_only_after_the_status_records_that_it_is_no_loss() -> (
    None
):
    world = Queued(quota=0, manages_all=True).create()
    simulation = world.simulation

    # An operator exits before it has recorded which coordinator it has just created.
    def die(write: Write) -> None:
        if (write.verb, write.name) == ("create", "run-coordinator-1"):
            raise Crash

    simulation.store.after = die
    with pytest.raises(Crash):
        world.advance()
    simulation.store.after = lambda write: None
    simulation.start_operator()
    world.label({**LABELS, QUEUE: "others"})
    simulation.reconcile()
    assert "deletionTimestamp" not in world.pod("run-coordinator-1")["metadata"]
    world.advance()

    # A recorded coordinator has not ended, according to the status.
    assert simulation.pods("coordinator") == ["run-coordinator-2"]
    world.label({**LABELS, QUEUE: "third"})
    simulation.reconcile()
    assert "deletionTimestamp" not in world.pod("run-coordinator-2")["metadata"]
    world.advance()
    assert simulation.pods("coordinator") == ["run-coordinator-3"]
    assert world.status["restarts"] == {"total": 0}


def test_a_run_whose_queue_label_is_removed_stays_in_its_queue_until_it_is_admitted() -> (
    None
):
    world = Queued(quota=0, manages_all=True, nodes={"min": 2, "max": 2}).create()
    world.advance(8)
    world.simulation.store.change(
        "trainingruns", *KEY, {"metadata": {"labels": {QUEUE: None}}}
    )
    world.advance(8)
    assert world.simulation.pods("coordinator") == ["run-coordinator-1"]
    assert world.status["message"].endswith("to be admitted by the queue gpus")
    assert world.condition("Stalled") == "False"
    world.kueue.quota = 3
    world.advance()
    assert world.running() == ["run-0-0", "run-1-0"]
    assert world.status["restarts"] == {"total": 0}


def default_queue(world: Queued) -> Queued:
    """The namespace has a LocalQueue ``default``, into which Kueue puts each pod without a queue."""
    world.labels, gate = None, world.simulation.store.mutate

    def mutate(plural: str, raw: dict[str, Any]) -> None:
        if plural == "pods":
            raw["metadata"].setdefault("labels", {}).setdefault(QUEUE, "default")
        gate(plural, raw)

    world.simulation.store.mutate = mutate
    return world


@pytest.mark.parametrize(
    "spec", [{}, {"preparation": {}}], ids=["coordinator", "preparation"]
)
def test_pods_that_kueue_has_put_into_the_default_queue_wait_there(
    spec: dict[str, Any],
) -> None:
    world = default_queue(Queued(quota=0, **spec)).create()
    role = "preparation" if spec else "coordinator"
    names = world.advance(2).simulation.pods(role)
    assert len(names) == 1
    world.advance(8)
    assert world.simulation.pods(role) == names
    status = world.status
    assert (status["reason"], world.condition("Stalled")) == ("Queued", "False")
    assert status["message"].endswith("to be admitted by the queue default")
    # Waiting pods leave it for a queue that the run names.
    world.label(LABELS)
    world.kueue.quota = 4
    world.advance(12)
    made = [*world.simulation.pods(), *world.simulation.pods(role)]
    assert {world.pod(name)["metadata"]["labels"][QUEUE] for name in made} == {"gpus"}
    assert not any(world.pod(name)["spec"].get("schedulingGates") for name in made)


def scenario(world: Queued) -> tuple[Any, ...]:
    """The whole cycle: queued, admitted, preempted, returned, suspended, resumed."""
    world.create().advance(4).simulation.train()
    world.preempt(left=1)
    world.advance(5)
    world.kueue.quota = 3
    world.advance(4)
    world.suspend(True)
    world.advance(4)
    assert world.kueue.used == 0
    world.suspend(False)
    world.advance(4)
    status = world.status
    return (
        sorted(name[:5] for name in world.running()),
        world.kueue.used,
        status["phase"],
        status.get("restarts"),
        world.kueue.excess,
    )


def killing(number: int, *, is_before: bool) -> Callable[[Queued], None]:
    from fake_kubernetes.simulation import crash_at

    def prepare(world: Queued) -> None:
        simulation = world.simulation
        hooks = crash_at(number, is_before=is_before)
        original, create_run = simulation.settle, simulation.create_run

        def settle(key: Any = KEY, *, most: int = 20) -> Any:
            while True:
                try:
                    return original(key, most=most)
                except Crash:
                    simulation.store.before = simulation.store.after = lambda write: None
                    simulation.start_operator()

        def create(*arguments: Any, **options: Any) -> None:
            create_run(*arguments, **options)
            simulation.store.before, simulation.store.after = hooks

        simulation.settle = settle  # type: ignore[method-assign]
        simulation.create_run = create  # type: ignore[method-assign]

    return prepare


@pytest.mark.long
@pytest.mark.parametrize("is_before", [True, False])
def test_an_operator_killed_at_any_write_of_a_queued_run_reaches_the_same_end(
    is_before: bool,
) -> None:
    plain = Queued()
    expected = scenario(plain)
    count = len([one for one in plain.simulation.store.writes if one.plural != "events"])
    assert expected[:2] == (["run-0", "run-1", "run-2"], 3)
    assert expected[3:] == ({"total": 2, "byCause": {"Preempted": 2}}, [])
    other = {}
    for number in range(count):
        world = Queued()
        killing(number, is_before=is_before)(world)
        end = scenario(world)
        if end != expected:
            other[number] = copy.copy(end)
    assert other == {}, expected


def contend(
    uid: str = "", *, config: Config = simulated_run.CONFIG
) -> simulated_run.Simulation:
    """A run of which one node has a host, and the other finds none."""
    world = simulated_run.Simulation(config=config)
    world.raw["metadata"]["uid"] = uid or world.raw["metadata"]["uid"]
    world.set_spec(nodes={"min": 2, "max": 2})
    world.reconcile()
    world.start("docs-lm-coordinator-0", "docs-lm-0-0")
    world.unschedulable("docs-lm-1-0", "0/2 nodes are available: 2 Insufficient cpu.")
    world.progress = simulated_run.make_progress(0, phase="Waiting", nodes={"ready": 0})
    return world


def test_the_installation_sets_how_long_pods_wait_for_a_host() -> None:
    config = dataclasses.replace(simulated_run.CONFIG, give_back_seconds=90.0)
    world = contend(config=config)
    assert world.settle().requeue_after == 90
    world.age(90)
    world.settle()
    world.leave()
    assert "fewer than 2 nodes found a host within 1m30s" in world.settle().message


def test_a_run_that_stays_below_its_minimum_releases_its_pods_and_retries_later() -> None:
    world = contend()
    decision = world.settle()
    assert decision.reason == "Unschedulable"
    assert decision.requeue_after == PATIENCE_SECONDS, "a host that comes ends the wait"
    world.age(PATIENCE_SECONDS)
    world.settle()
    world.leave()
    decision = world.settle()
    assert world.live() == [] and len(world.live(role="coordinator")) == 1
    assert (decision.phase, decision.reason) == ("Waiting", "PodsGivenBack")
    assert "fewer than 2 nodes found a host within 20m" in decision.message
    assert (world.condition("Stalled")["status"], world.status["restarts"]) == (
        "False",
        {"total": 0},
    )
    # They are created again after the pause, and not earlier.
    assert decision.requeue_after is not None
    world.age(decision.requeue_after - 1)
    world.settle()
    assert world.live() == []
    world.age(1)
    world.reconcile()
    assert world.live() == ["docs-lm-0-1", "docs-lm-1-1"]
    # The next pause is longer; a group that forms resets it.
    first = decision.requeue_after
    world.start("docs-lm-0-1")
    world.unschedulable("docs-lm-1-1", "0/2 nodes are available: 2 Insufficient cpu.")
    world.age(PATIENCE_SECONDS)
    world.settle()
    world.leave()
    second = world.settle().requeue_after
    assert second is not None and first * 2 / 3 < second
    world.age(second)
    world.reconcile()
    world.start()
    world.train()
    world.settle()
    assert "givenBack" not in world.status["memory"]


def test_two_runs_that_waited_for_each_other_retry_at_different_times() -> None:
    pauses = set()
    for uid in ("one", "other"):
        world = contend(uid)
        world.settle()
        world.age(PATIENCE_SECONDS)
        world.settle()
        world.leave()
        pauses.add(world.settle().requeue_after)
    assert len(pauses) == 2


def test_a_run_whose_quota_admits_too_few_pods_releases_them_and_retries_later() -> None:
    world = simulated_run.Simulation()
    world.set_spec(nodes={"min": 2, "max": 2})
    world.reconcile()
    world.start("docs-lm-coordinator-0", "docs-lm-0-0")
    del world.pods["docs-lm-1-0"]
    world.progress = simulated_run.make_progress(0, phase="Waiting", nodes={"ready": 0})
    text = "exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2"
    refusal = ApplyFailure("Pod", "docs-lm-1-1", 403, "Forbidden", text)
    # The refusal is known from the second pass on; each pass retries.
    for _ in range(3):
        decision = world.reconcile(refuse=refusal)
    assert decision.reason == "QuotaExceeded" and world.live() == ["docs-lm-0-0"]
    world.age(PATIENCE_SECONDS)
    for _ in range(2):
        world.reconcile(refuse=refusal)
    world.leave()
    decision = world.settle()
    assert (decision.reason, world.live()) == ("PodsGivenBack", [])
    assert decision.requeue_after is not None
    world.age(decision.requeue_after)
    world.reconcile()
    assert len(world.live()) == 2


def test_a_run_without_any_host_or_with_enough_hosts_releases_nothing() -> None:
    world = contend()
    world.unschedulable("docs-lm-0-0", "0/2 nodes are available: 2 Insufficient cpu.")
    del world.pods["docs-lm-0-0"]["spec"]["nodeName"]
    world.settle()
    world.age(PATIENCE_SECONDS)
    assert world.settle().reason == "Unschedulable" and len(world.live()) == 2
    world.set_spec(nodes={"min": 1, "max": 2})
    world.start("docs-lm-0-0")
    world.age(PATIENCE_SECONDS)
    world.settle()
    assert len(world.live()) == 2


def test_a_raised_minimum_removes_no_pod_of_the_training_group() -> None:
    world = simulated_run.Simulation(simulated_run.make_run(nodes={"min": 2, "max": 4}))
    world.reconcile()
    world.start("docs-lm-coordinator-0", "docs-lm-0-0", "docs-lm-1-0")
    for name in ("docs-lm-2-0", "docs-lm-3-0"):
        world.unschedulable(name, "0/2 nodes are available: 2 Insufficient cpu.")
    two = {"ready": 2, "connected": 2}
    world.train(10, nodes={"min": 2, "max": 4, **two})
    world.settle()
    world.age(3 * PATIENCE_SECONDS)
    world.train(100, nodes={"min": 2, "max": 4, **two})
    world.settle()
    world.set_spec(nodes={"min": 3, "max": 4})
    for phase in ("Running", "Draining", "Starting"):
        world.progress = simulated_run.make_progress(
            phase=phase, nodes={"min": 3, "max": 4, **two}
        )
        world.settle()
        assert len(world.live()) == 4

    # Once the group is lost, its pods have as long to find hosts as any others.
    world.progress = simulated_run.make_progress(
        phase="Waiting", nodes={"min": 3, "max": 4, **two}
    )
    left = world.settle().requeue_after
    assert left == PATIENCE_SECONDS and len(world.live()) == 4
    world.age(left)
    world.settle()
    assert world.live() == []

    # While the nodes save, the coordinator's responses are about the group, so they end no pause.
    world.progress = simulated_run.make_progress(
        phase="Draining", nodes={"min": 3, "max": 4, **two}
    )
    world.settle()
    world.leave()
    world.progress = simulated_run.make_progress(phase="Waiting", nodes={"ready": 0})
    decision = world.settle()
    assert (decision.reason, world.live()) == ("PodsGivenBack", [])


def test_a_lower_minimum_ends_a_pause_and_a_higher_one_does_not() -> None:
    world = contend()
    world.age(PATIENCE_SECONDS)
    world.settle()
    world.leave()
    world.set_spec(nodes={"min": 3, "max": 3})
    assert (world.settle().reason, world.live()) == ("PodsGivenBack", [])
    world.set_spec(nodes={"min": 2, "max": 3})
    decision = world.settle()
    assert decision.reason != "PodsGivenBack" and len(world.live()) == 3
    assert "givenBack" not in world.status["memory"]


TWO = {"max": 4, "ready": 2, "connected": 2}
"""Two of four nodes, as a coordinator counts them."""


def raise_minimum(*, step: int | None = None, phase: str = "Running") -> Any:
    """A group of two that has been in this phase for hours, and two pods that find no host; then
    ``nodes.min`` is set to 3.

    ``step``: its newest step, 21 minutes old; None for a recipe that reports no steps.
    """
    world = simulated_run.Simulation(simulated_run.make_run(nodes={"min": 2, "max": 4}))
    world.reconcile()
    world.start("docs-lm-coordinator-0", "docs-lm-0-0", "docs-lm-1-0")
    for name in ("docs-lm-2-0", "docs-lm-3-0"):
        world.unschedulable(name, "0/2 nodes are available: 2 Insufficient cpu.")
    nodes = {"min": 2, **TWO}
    if step is None:
        world.progress = simulated_run.make_progress(phase=phase, nodes=nodes)
    for _ in range(6):
        if step is not None:
            world.train(step, nodes=nodes)
        world.settle()
        world.age(PATIENCE_SECONDS + 60)
    world.set_spec(nodes={"min": 3, "max": 4})
    return world


@pytest.mark.parametrize("step", [20, None])
def test_a_restarted_operator_removes_no_pod_of_the_training_group(
    step: int | None,
) -> None:
    world = raise_minimum(step=step)
    known, world.progress = world.progress, None
    world.reconcile()
    assert "givenBack" not in world.status["memory"]
    world.progress = known
    world.settle()
    assert len(world.live()) == 4


def test_a_group_with_a_replaced_coordinator_has_the_full_time_to_find_hosts() -> None:
    world = raise_minimum()
    world.settle()
    world.end("docs-lm-coordinator-0", 137)
    for _ in range(3):
        world.progress = None
        world.reconcile()
    assert world.live(role="coordinator") == ["docs-lm-coordinator-1"]
    world.start("docs-lm-coordinator-1")
    world.reconcile()
    assert "givenBack" not in world.status["memory"] and len(world.live()) == 4

    # The nodes have not reconnected at its first response.
    world.progress = simulated_run.make_progress(
        1, phase="Waiting", nodes={"min": 3, "max": 4, "ready": 0}
    )
    assert world.settle().requeue_after is not None and len(world.live()) == 4
    world.age(PATIENCE_SECONDS - 1)
    world.settle()
    assert len(world.live()) == 4
    world.age(1)
    world.settle()
    assert world.live() == []


def test_a_minimum_that_is_raised_while_a_group_starts_removes_no_pod_of_it() -> None:
    world = raise_minimum(phase="Starting")
    world.settle()
    assert len(world.live()) == 4
    world.age(PATIENCE_SECONDS)
    world.settle()
    assert len(world.live()) == 4
    # An operator that has not observed it yet does not do so either.
    known, world.progress = world.progress, None
    world.reconcile()
    world.progress = known
    world.settle()
    assert len(world.live()) == 4


def test_a_pause_ends_if_its_pods_exist_and_form_a_group() -> None:
    world = contend()
    world.settle()
    world.age(PATIENCE_SECONDS)
    world.reconcile()
    assert "givenBack" in world.status["memory"] and len(world.live()) == 2
    # The last host has become available, and ``nodes.min`` was raised, before any pod is deleted.
    world.start("docs-lm-1-0")
    world.set_spec(nodes={"min": 3, "max": 3})
    nodes = {"min": 3, "max": 3, "ready": 2, "connected": 2}
    world.progress = simulated_run.make_progress(nodes=nodes)
    world.settle()
    assert {"docs-lm-0-0", "docs-lm-1-0"} < set(world.live())
    assert "givenBack" not in world.status["memory"]
    # The end of a pod that stays counts like any other.
    world.end("docs-lm-1-0", 1)
    world.settle()
    assert world.status["restarts"]["total"] == 1


@pytest.mark.parametrize(
    "edit",
    [
        {"template": {"nodeSelector": {"bad key!": "x"}}},
        {"suspend": True},
    ],
    ids=["mistake", "suspension"],
)
def test_a_lower_minimum_ends_a_pause_although_the_run_is_held_or_stopped_first(
    edit: dict[str, Any],
) -> None:
    world = contend()
    world.age(PATIENCE_SECONDS)
    world.settle()
    world.leave()
    assert world.settle().reason == "PodsGivenBack"
    world.set_spec(nodes={"min": 1, "max": 2}, **edit)
    world.progress = None
    world.settle()
    assert world.live() == []
    world.set_spec(template={}, suspend=False)
    decision = world.settle()
    assert decision.reason != "PodsGivenBack" and len(world.live()) == 2
