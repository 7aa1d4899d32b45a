"""Runs in a queue of Kueue v0.19.2, which runs next to the bed.

The tests check that quota is released, that preempted runs resume, that a lost pod has a single replacement,
and that the status contains the queue.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cluster_runs import (
    ENDLESS,
    GROUP,
    RESOURCE,
    Run,
    Runs,
    make_manifest,
    merged,
    wait_for,
)

from bed.kueue import NAMESPACES, QUEUES, Kueue
from evergrad_operator.core.objects.times import parse_time

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(3600)]
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
FINALIZER = "kueue.x-k8s.io/managed"
WORKLOADS = "workloads.kueue.x-k8s.io"
QUOTA_SECONDS = 10.0
"""Maximum time in seconds between the end of a quota holder and the release, by the cluster's times."""
NODE = 100
"""CPU request of a node in millicores. The queue's quota counts CPU."""
PLACE = "example.com/place"
"""A fake device. A host has one device for each node that it has room for."""
RACK = "example.com/rack"
"""Host label that is a level of the topology."""
RACKS = {"n1": 1, "n2": 2}
"""Host → number of nodes that it has room for. Each host is alone in a rack of the same name."""


@dataclass
class Queue:
    """A queue of one test, in the test's namespace."""

    runs: Runs
    manager: Kueue

    @property
    def name(self) -> str:
        """The name of the LocalQueue and the ClusterQueue."""
        return self.runs.namespace

    def create(self, *, nodes: int, levels: tuple[str, ...] = ()) -> None:
        """Create a queue with room for ``nodes`` nodes.

        ``levels``: host labels of a topology, in which each node uses a PLACE.
        """
        self.runs.kubectl(
            "label", "--overwrite", "namespace", self.runs.namespace, f"{NAMESPACES}=true"
        )
        resources = [
            {"name": "cpu", "nominalQuota": f"{nodes * NODE}m"},
            {"name": "memory", "nominalQuota": "64Gi"},
        ]
        flavor, spec = "default", {}
        if levels:
            resources.append({"name": PLACE, "nominalQuota": str(nodes)})
            flavor = self.name
            # Kueue requires a host label with a topology. All hosts have this label.
            spec = {
                "spec": {
                    "nodeLabels": {"kubernetes.io/os": "linux"},
                    "topologyName": self.name,
                }
            }
            topology = {"spec": {"levels": [{"nodeLabel": level} for level in levels]}}
            self._apply("Topology", self.name, topology)
        group = {
            "coveredResources": [one["name"] for one in resources],
            "flavors": [{"name": flavor, "resources": resources}],
        }
        self._apply("ResourceFlavor", flavor, spec)
        self._apply(
            "ClusterQueue",
            self.name,
            {
                "spec": {
                    "namespaceSelector": {},
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                    "resourceGroups": [group],
                }
            },
        )
        self._apply("LocalQueue", self.name, {"spec": {"clusterQueue": self.name}})
        for name, value in (("low", 10), ("normal", 100), ("high", 1000)):
            self._apply("WorkloadPriorityClass", name, {"value": value})

    def _apply(self, kind: str, name: str, body: dict[str, Any]) -> None:
        whole = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": kind,
            "metadata": {"name": name},
            **body,
        }
        text = json.dumps(whole)
        self.runs.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", text=text
        )

    def start(
        self,
        name: str,
        *,
        nodes: tuple[int, int] = (2, 3),
        steps: int = ENDLESS,
        priority: str = "",
        is_queued: bool = True,
        **changes: Any,
    ) -> Run:
        """Start a run in this queue. ``nodes``: minimum and maximum."""
        spec = {
            "nodes": {"min": nodes[0], "max": nodes[1]},
            "resources": {"requests": {"cpu": f"{NODE}m"}},
        }
        manifest = make_manifest(name, steps=steps, changes=merged(spec, changes))
        labels = {QUEUE: self.name} if is_queued else {}
        if priority:
            labels[PRIORITY] = priority
        manifest["metadata"]["labels"] = labels
        return self.runs.apply(manifest)

    def used(self) -> int:
        """Return the reserved CPU in millicores."""
        found = self.runs.cluster.api.get(f"{QUEUES}/clusterqueues/{self.name}")
        total = 0
        for flavor in found.get("status", {}).get("flavorsReservation", []):
            for resource in flavor["resources"]:
                if resource["name"] == "cpu":
                    total += parse_cpu(resource.get("total", "0"))
        return total

    def wait_for_use(self, nodes: int) -> None:
        """Wait until CPU for exactly ``nodes`` nodes is reserved."""
        wait_for(lambda: self.used() == nodes * NODE, f"a use of {nodes} nodes")

    def workloads(self) -> list[dict[str, Any]]:
        """Return Kueue's Workload objects."""
        found: list[dict[str, Any]] = self.runs.cluster.api.get(
            f"{QUEUES}/namespaces/{self.runs.namespace}/workloads"
        )["items"]
        return found

    def remove(self) -> None:
        """Release all pods that Kueue holds, then delete the queue while Kueue still runs."""
        kubectl = self.runs.kubectl
        kubectl("delete", RESOURCE, "--all", "--wait=false", check=False)
        kubectl("delete", "pods", "--all", "--now", "--wait=false", check=False)
        kubectl(
            *("annotate", "pods", "--all", "--overwrite"),
            "kueue.x-k8s.io/retriable-in-group=false",
            check=False,
        )

        # Delete it while Kueue still runs: a namespace whose Workloads have finalizers is never removed.
        try:
            wait_for(lambda: not self.runs.list("pods"), "pods that Kueue lets go")
            wait_for(lambda: not self.workloads(), "the end of Kueue's records")
        finally:
            for kind in ("localqueue", "clusterqueue"):
                kubectl("delete", kind, self.name, "--wait=false", check=False)


def parse_cpu(text: str) -> int:
    """Return a CPU quantity in millicores."""
    return int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)


@pytest.fixture(scope="module")
def manager(cluster: Any, operator: Any) -> Iterator[Kueue]:
    """Return Kueue, which manages only the namespaces of these tests."""
    del operator
    if not cluster.is_bed:
        pytest.skip("Kueue is started beside the bed only.")
    one = Kueue(cluster.api)
    try:
        one.install()
        yield one
    finally:
        one.remove()


@pytest.fixture
def queue(manager: Kueue, runs: Runs) -> Iterator[Queue]:
    """Return a queue with room for three nodes, which is removed after the test."""
    one = Queue(runs, manager)
    one.create(nodes=3)
    try:
        yield one
    finally:
        one.remove()


@pytest.fixture
def racks(manager: Kueue, runs: Runs, faults: Any) -> Iterator[Queue]:
    """Return a queue whose quota exceeds the capacity of its topology's hosts."""
    one = Queue(runs, manager)
    for host, places in RACKS.items():
        faults.set_gpus(host, places, resource=PLACE)
        runs.kubectl("label", "--overwrite", "node", host, f"{RACK}={host}")
    one.create(nodes=5, levels=(RACK, "kubernetes.io/hostname"))
    try:
        yield one
    finally:
        one.remove()
        for kind in ("resourceflavors.kueue.x-k8s.io", "topologies.kueue.x-k8s.io"):
            runs.kubectl("delete", kind, one.name, "--wait=false", check=False)
        for host in RACKS:
            runs.kubectl("label", "node", host, f"{RACK}-")


def start_in_one_rack(queue: Queue, name: str, *, nodes: tuple[int, int]) -> Run:
    """Start a run that requests a rack as documented on the page about queues."""
    return queue.start(
        name,
        nodes=nodes,
        resources={"requests": {PLACE: "1"}, "limits": {PLACE: "1"}},
        template={"annotations": {"kueue.x-k8s.io/podset-required-topology": RACK}},
    )


def hosts(run: Run) -> dict[int, str]:
    """Return the host of each node, by index."""
    return {index: pod["spec"]["nodeName"] for index, pod in run.live_pods().items()}


def train(run: Run, *, steps: int = 10) -> None:
    """Wait until the run has trained ``steps`` more steps."""
    run.wait_for_step(run.newest_step() + steps)


def wait_until_queued(run: Run, queue: Queue) -> str:
    """Wait until the run's status reports that it waits in the queue, and return the message."""

    def is_queued() -> str:
        status = run.status()
        is_waiting = (status.get("phase"), status.get("reason")) == ("Waiting", "Queued")
        return str(status["message"]) if is_waiting else ""

    said: str = wait_for(is_queued, f"{run.name}: Waiting, Queued")
    assert f"the queue {queue.name}" in said, said
    assert not run.is_true("Stalled") and run.is_true("Reconciling")
    return said


def attempts(run: Run) -> dict[int, int]:
    """Return the highest attempt of all created pods, by index."""
    names = {
        event["involvedObject"]["name"]
        for event in run.runs.list("events")
        if event["involvedObject"]["kind"] == "Pod"
    }
    names |= {pod["metadata"]["name"] for pod in run.pods()}
    found: dict[int, int] = {}
    for name in names:
        index, _, attempt = name.removeprefix(f"{run.name}-").rpartition("-")
        if name.startswith(f"{run.name}-") and index.isdecimal():
            found[int(index)] = max(found.get(int(index), 0), int(attempt))
    return found


def scheduled_at(pod: dict[str, Any]) -> str:
    """Return the time at which the pod got its host, in the API server's format, which sorts as text."""
    return next(
        str(one["lastTransitionTime"])
        for one in pod["status"]["conditions"]
        if one["type"] == "PodScheduled" and one["status"] == "True"
    )


@dataclass
class Watched:
    """The objects from watches of Workloads and pods. They are complete when the watches have ended."""

    queue: Queue
    workloads: list[dict[str, Any]]
    pods: list[dict[str, Any]]

    def assert_released(self, run: Run, *, condition: str = "") -> None:
        """Check that the quota of a run was released in time.

        The time starts at the transition of ``condition``, or else at the end of the run's last node.
        """
        newest = {
            one["object"]["metadata"]["name"]: one["object"] for one in self.workloads
        }
        newest |= {one["metadata"]["name"]: one for one in self.queue.workloads()}
        times = {name: lost_at(one) for name, one in newest.items() if run.name in name}
        assert times and all(times.values()), f"{run.name}: {times}"
        begin = (
            parse_time(run.condition(condition)["lastTransitionTime"]) if condition else 0.0
        )
        if not condition:
            last = {one["object"]["metadata"]["name"]: one["object"] for one in self.pods}
            nodes = [one for one in last.values() if is_node_of(run, one)]
            begin = max(map(ended_at, nodes))
        assert begin
        took = {name: min(given) - begin for name, given in times.items()}
        assert max(took.values()) <= QUOTA_SECONDS, f"{run.name}: {took}"


@contextlib.contextmanager
def watched(queue: Queue) -> Iterator[Watched]:
    """Watch inside the block. The quota must be released at the end of the block."""
    runs = queue.runs
    with runs.watch(WORKLOADS) as workloads, runs.watch("pods") as pods:
        yield Watched(queue, workloads, pods)


def is_node_of(run: Run, pod: dict[str, Any]) -> bool:
    """Return whether a pod is a node of the run. Only nodes use quota."""
    labels = pod["metadata"].get("labels", {})
    return (labels.get(f"{GROUP}/run"), labels.get(f"{GROUP}/role")) == (run.name, "node")


def lost_at(workload: dict[str, Any]) -> list[float]:
    """Return the times at which a Workload lost its quota. The list is empty while it holds quota."""
    ends = (("Finished", "True"), ("QuotaReserved", "False"))
    found = [
        one["lastTransitionTime"]
        for one in workload.get("status", {}).get("conditions", [])
        if (one["type"], one["status"]) in ends
    ]
    found.append(workload["metadata"].get("deletionTimestamp"))
    return [at for text in found if (at := parse_time(text)) is not None]


def ended_at(pod: dict[str, Any]) -> float:
    """Return the time at which a pod's containers ended, or the end of its grace if it shows no end."""
    states = [one["state"] for one in pod["status"].get("containerStatuses", [])]
    ends = [one["terminated"]["finishedAt"] for one in states if "terminated" in one]
    texts = ends or [pod["metadata"].get("deletionTimestamp")]
    return max(parse_time(text) or 0.0 for text in texts)


def test_quota_is_released_on_completion(queue: Queue) -> None:
    with watched(queue) as seen:
        run = queue.start("complete", steps=60)
        run.wait_for_phase("Complete")
        queue.wait_for_use(0)
    seen.assert_released(run, condition="Complete")
    # Kueue releases the quota first, and removes the pods' finalizers afterwards.
    wait_for(
        lambda: (
            not any(
                FINALIZER in pod["metadata"].get("finalizers", ()) for pod in run.pods()
            )
        ),
        "pods that Kueue has let go",
    )


def test_quota_is_released_on_failure_and_the_next_run_starts(queue: Queue) -> None:
    sources = [{"name": "docs", "type": "jsonl", "path": "/documents/nowhere.jsonl"}]
    run = queue.start("wrong", nodes=(3, 3), training={"data": {"sources": sources}})
    # Wait for this run's admission before the next run starts, so that the next run has to wait.
    wait_for(
        lambda: queue.used() == 3 * NODE or run.status().get("phase") == "Failed",
        "admission",
    )
    next_run = queue.start("next", nodes=(3, 3))
    with watched(queue) as seen:
        run.wait_for_phase("Failed")
        queue.wait_for_use(3)
        train(next_run)
    seen.assert_released(run, condition="Failed")
    assert all(
        any(one["type"] == "Finished" for one in workload["status"].get("conditions", []))
        for workload in queue.workloads()
        if workload["metadata"]["name"].startswith("wrong-")
    )


def test_quota_is_released_on_suspension_and_a_run_resumes_with_a_quota_for_one_gang(
    queue: Queue,
) -> None:
    run = queue.start("paused")
    run.wait_for_pods(0, 1, 2)
    train(run)
    step = run.newest_step()
    with watched(queue) as seen:
        run.patch({"suspend": True})
        run.wait_for_phase("Suspended")
        queue.wait_for_use(0)
    seen.assert_released(run, condition="Suspended")
    run.patch({"suspend": False})
    run.wait_for_pods(0, 1, 2)
    run.wait_for_step(step + 10)
    assert queue.used() == 3 * NODE


def test_quota_is_released_on_deletion(queue: Queue) -> None:
    run = queue.start("deleted")
    run.wait_for_pods(0, 1, 2)
    with watched(queue) as seen:
        run.runs.kubectl("delete", RESOURCE, run.name, "--wait=false")
        queue.wait_for_use(0)
        wait_for(lambda: not run.pods(), "the pods' end")
    seen.assert_released(run)


def test_a_run_that_is_deleted_in_the_queue_never_takes_quota(queue: Queue) -> None:
    first = queue.start("first", nodes=(3, 3))
    first.wait_for_pods(0, 1, 2)
    second = queue.start("second", nodes=(3, 3))
    wait_until_queued(second, queue)
    second.runs.kubectl("delete", RESOURCE, second.name, "--wait=false")
    wait_for(lambda: not second.pods(), "the queued pods' end")
    first.runs.kubectl("delete", RESOURCE, first.name, "--wait=false")
    third = queue.start("third", nodes=(3, 3))
    train(third)
    assert queue.used() == 3 * NODE


@pytest.mark.operator_ends
def test_quota_is_released_on_deletion_without_an_operator(
    queue: Queue, operator: Any
) -> None:
    run = queue.start("orphaned")
    run.wait_for_pods(0, 1, 2)
    with operator.gone(), watched(queue) as seen:
        run.runs.kubectl("delete", RESOURCE, run.name, "--wait=false")
        queue.wait_for_use(0)
        wait_for(lambda: not run.pods(), "the pods' end")
    seen.assert_released(run)


def test_a_higher_priority_preempts_an_elastic_node_first_and_the_gang_continues(
    queue: Queue,
) -> None:
    low = queue.start("lo", priority="normal")
    low.wait_for_pods(0, 1, 2)
    low.wait_for_world(3)
    high = queue.start("hi", nodes=(1, 1), priority="high")
    train(high)
    low.wait_for_pods(0, 1)
    low.wait_for_world(2)
    train(low)
    wait_for(lambda: low.restarts() == {"Preempted": 1}, "the preemption in the status")
    assert attempts(low)[0] == attempts(low)[1] == 0
    high.runs.kubectl("delete", RESOURCE, high.name, "--wait=false")
    low.wait_for_attempt(2, 1)
    low.wait_for_world(3)


def test_a_preempted_run_releases_all_of_its_quota_and_returns(queue: Queue) -> None:
    low = queue.start("lo", priority="normal")
    low.wait_for_pods(0, 1, 2)
    low.wait_for_world(3)
    train(low)
    high = queue.start("hi", nodes=(2, 2), priority="high")
    train(high)
    # Otherwise the third node would not train but still hold quota.
    wait_for(lambda: not low.live_pods(), "the elastic node's end")
    queue.wait_for_use(2)
    said = wait_until_queued(low, queue)
    assert "because they were preempted" in said, said
    step = low.newest_step()
    made = attempts(low)
    high.runs.kubectl("delete", RESOURCE, high.name, "--wait=false")
    low.wait_for_pods(0, 1, 2)
    low.wait_for_step(step + 10)
    # Each node of the gang lost one pod. A replacement that was created when Kueue had just finished its
    # group is created once more, which is not a loss.
    assert low.restarts() == {"Preempted": 2}
    assert max(made.values()) <= 2 and attempts(low)[2] <= 1, (made, attempts(low))


def test_nodes_above_the_minimum_join_only_after_the_gang(queue: Queue) -> None:
    first = queue.start("first", nodes=(2, 2))
    first.wait_for_pods(0, 1)
    # One place is free. A node above the minimum could use it.
    second = queue.start("second")
    wait_until_queued(second, queue)
    assert sorted(attempts(second)) == [0, 1]
    first.runs.kubectl("delete", RESOURCE, first.name, "--wait=false")
    pods = second.wait_for_pods(0, 1, 2)
    youngest = max(scheduled_at(pods[index]) for index in (0, 1))
    assert pods[2]["metadata"]["creationTimestamp"] > youngest


def test_each_lost_pod_causes_one_replacement(queue: Queue, faults: Any) -> None:
    run = queue.start("lossy")
    run.wait_for_pods(0, 1, 2)
    run.wait_for_world(3)
    # One pod is deleted, and saves until its end; another one is killed.
    run.runs.kubectl("delete", "pod", f"{run.name}-0-0", "--wait=false")
    run.wait_for_attempt(0, 1)
    run.wait_for_world(3)
    faults.kill_container(run.runs.namespace, f"{run.name}-1-0")
    run.wait_for_attempt(1, 1)
    run.wait_for_world(3)
    train(run)
    assert attempts(run) == {0: 1, 1: 1, 2: 0}
    assert sum(run.restarts().values()) == 2


def test_a_gang_whose_nodes_are_all_lost_returns_as_a_new_group(queue: Queue) -> None:
    run = queue.start("emptied", nodes=(2, 2))
    run.wait_for_pods(0, 1)
    train(run)
    names = [f"{run.name}-{index}-0" for index in (0, 1)]
    run.runs.kubectl("delete", "pod", *names, "--wait=false")
    run.wait_for_pods(0, 1)
    train(run)
    wait_for(lambda: queue.used() == 2 * NODE, "the quota of one gang")
    assert all(count <= 2 for count in attempts(run).values()), attempts(run)


def test_status_and_events_name_the_queue(queue: Queue) -> None:
    first = queue.start("first", nodes=(3, 3))
    first.wait_for_pods(0, 1, 2)
    second = queue.start("second", nodes=(3, 3))
    said = wait_until_queued(second, queue)
    assert "and 2 more wait" in said, said

    def is_named() -> bool:
        events = second.runs.list("events")
        return any(
            event["reason"] == "Queued"
            and event["involvedObject"]["name"] == second.name
            and f"the queue {queue.name}" in event["message"]
            for event in events
        )

    wait_for(is_named, "an event that names the queue")


@contextlib.contextmanager
def managing_all(manager: Kueue) -> Iterator[None]:
    """Run Kueue with ``manageJobsWithoutQueueName`` inside the block."""
    manager.stop()
    try:
        manager.start(manages_all=True)
        yield
    finally:
        manager.stop()
        manager.start()


def test_the_coordinator_starts_although_kueue_admits_nothing_without_a_queue(
    queue: Queue,
) -> None:
    # Three nodes and the coordinator.
    queue.create(nodes=4)
    with managing_all(queue.manager):
        run = queue.start("managed")
        run.wait_for_pods(0, 1, 2)
        train(run)
        (coordinator,) = run.live_pods(role="coordinator").values()
        assert coordinator["metadata"]["labels"][QUEUE] == queue.name
        assert "kueue.x-k8s.io/pod-group-name" not in coordinator["metadata"]["labels"]
        assert run.restarts() == {}
        run.runs.kubectl("delete", RESOURCE, run.name, "--wait=false")
        queue.wait_for_use(0)
        wait_for(lambda: not run.pods(), "the pods' end")


def test_a_run_without_a_queue_names_the_label_to_set_and_continues_with_it(
    queue: Queue,
) -> None:
    queue.create(nodes=4)
    with managing_all(queue.manager):
        run = queue.start("unlabelled", is_queued=False)
        wait_for(lambda: run.is_true("Stalled"), "the condition Stalled")
        assert run.status()["reason"] == "Queued"
        assert f"Set the label {QUEUE} on the TrainingRun" in run.status()["message"]
        run.runs.kubectl("label", RESOURCE, run.name, f"{QUEUE}={queue.name}")
        run.wait_for_pods(0, 1, 2)
        train(run)
        assert not run.is_true("Stalled") and run.restarts() == {}
        run.runs.kubectl("delete", RESOURCE, run.name, "--wait=false")
        wait_for(
            lambda: not run.runs.list("pods", f"{GROUP}/run={run.name}"),
            "all the pods' end",
        )


def test_a_gang_that_requests_a_topology_gets_one_rack_or_waits_for_one(
    racks: Queue,
) -> None:
    first = start_in_one_rack(racks, "first", nodes=(2, 3))
    first.wait_for_pods(0, 1, 2)
    first.wait_for_world(3)
    # Spread over the hosts, the two would have trained, too; the node above the minimum takes the rest.
    assert hosts(first) == {0: "n2", 1: "n2", 2: "n1"}

    # There is quota for two more nodes, but no rack with space for both.
    first.runs.kubectl(
        *("patch", RESOURCE, "first", "--type=merge"),
        *("--patch", json.dumps({"spec": {"nodes": {"max": 2}}})),
    )
    first.wait_for_pods(0, 1)
    second = start_in_one_rack(racks, "second", nodes=(2, 2))
    wait_until_queued(second, racks)
    first.runs.kubectl("delete", RESOURCE, "first", "--wait=false")
    second.wait_for_pods(0, 1)
    train(second)
    assert hosts(second) == {0: "n2", 1: "n2"}


def test_a_lost_node_of_a_gang_returns_to_its_rack(racks: Queue) -> None:
    run = start_in_one_rack(racks, "lost", nodes=(2, 2))
    run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    run.runs.kubectl("delete", "pod", f"{run.name}-0-0", "--wait=false")
    run.wait_for_attempt(0, 1)
    run.wait_for_world(2)
    train(run)
    assert hosts(run) == {0: "n2", 1: "n2"}
