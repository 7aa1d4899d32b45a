"""Steps that every gang scheduler must support, for the tests of each."""

from dataclasses import dataclass
from typing import Any

from cluster_runs import ENDLESS, GROUP, RESOURCE, Run, Runs, wait_for

PLACE = "example.com/place"
"""A simulated device. Hosts have exactly as many as a test needs."""


@dataclass(frozen=True)
class Groups:
    """The PodGroups of one gang scheduler. ``version``: API group and version. ``minimum``: path to the
    minimum in a group's spec."""

    version: str
    minimum: tuple[str, ...]

    def path(self, run: Run) -> str:
        """Return the PodGroup of the run from the API server, or None."""
        return f"/apis/{self.version}/namespaces/{run.runs.namespace}/podgroups/{run.name}"

    def of(self, run: Run) -> dict[str, Any]:
        """Return the PodGroup of the run."""
        found: dict[str, Any] = run.runs.cluster.api.get(self.path(run))
        return found

    def minimum_of(self, run: Run) -> Any:
        """Return how many of its pods must find a host together."""
        found: Any = self.of(run)["spec"]
        for key in self.minimum:
            found = found[key]
        return found

    def has_no_group(self, run: Run) -> bool:
        """Return whether the run has no PodGroup."""
        return not run.runs.cluster.api.is_there(self.path(run))


def start(runs: Runs, name: str, *, least: int, most: int, **changes: Any) -> Run:
    """Start a run of this number of nodes, each of which occupies one place of a host."""
    return runs.start(
        name,
        steps=ENDLESS,
        nodes={"min": least, "max": most},
        resources={"requests": {PLACE: "1"}, "limits": {PLACE: "1"}},
        **changes,
    )


def hosts(run: Run) -> dict[int, str]:
    """Return the host of each pod by index, or an empty text for a pod without one."""
    return {
        int(pod["metadata"]["labels"][f"{GROUP}/index"]): str(
            pod["spec"].get("nodeName", "")
        )
        for pod in run.pods()
    }


def place_one_gang_after_the_other(runs: Runs, faults: Any, groups: Groups) -> Run:
    """Start a second gang of two nodes while one place is free, and check that it waits as a whole until the
    first gang has ended.

    Returns the second run.
    """
    faults.set_gpus("n1", 2, resource=PLACE)
    faults.set_gpus("n2", 1, resource=PLACE)
    first = start(runs, "first", least=2, most=2)
    first.wait_for_pods(0, 1)
    first.wait_for_step(5)
    assert groups.minimum_of(first) == 2

    # One place is free. Without a gang, a pod of the second run would occupy it and wait forever.
    second = start(runs, "second", least=2, most=2)
    wait_for(lambda: len(hosts(second)) == 2, "both pods of the second run")
    wait_for(
        lambda: second.status().get("reason") == "Unschedulable",
        "the second run's own words",
    )
    assert hosts(second) == {0: "", 1: ""}, second.status()

    # The place is really free: a run of one node gets it.
    single = start(runs, "single", least=1, most=1)
    single.wait_for_step(5)
    assert hosts(second) == {0: "", 1: ""}
    runs.kubectl("delete", RESOURCE, "single")

    runs.kubectl("delete", RESOURCE, "first")
    second.wait_for_pods(0, 1)
    second.wait_for_step(5)
    wait_for(lambda: groups.has_no_group(first), "the end of the first run's group")
    return second


def grow_and_replace(runs: Runs, faults: Any, groups: Groups) -> Run:
    """Check that a node above the minimum joins alone when there is capacity, and that a lost pod is
    replaced. Returns the run of two to three nodes."""
    faults.set_gpus("n1", 2, resource=PLACE)
    run = start(runs, "elastic", least=2, most=3)
    run.wait_for_world(2)
    run.wait_for_step(5)
    faults.set_gpus("n2", 1, resource=PLACE)
    run.wait_for_pods(0, 1, 2)
    run.wait_for_world(3)

    step = run.newest_step()
    runs.kubectl("delete", "pod", run.live_pods()[0]["metadata"]["name"], "--wait=false")
    run.wait_for_attempt(0, 1)
    run.wait_for_world(3)
    run.wait_for_step(step + 10)
    assert groups.minimum_of(run) == 2
    assert run.restarts() == {"Deleted": 1}
    return run
