"""A fake of the parts of Kueue that affect a run's pods: gates, finalizers and pod groups of a fixed size.

It behaves like the plain-pod integration of Kueue v0.19. Quota is counted in pods. ``work`` is one pass of
its controllers.
"""

from dataclasses import dataclass, field
from typing import Any

from fake_kubernetes.simulation import Simulation
from fake_kubernetes.store import Raw

PREFIX = "kueue.x-k8s.io/"
QUEUE, GROUP, FINALIZER = (
    f"{PREFIX}queue-name",
    f"{PREFIX}pod-group-name",
    f"{PREFIX}managed",
)


@dataclass
class Kueue:
    """``quota``: maximum number of admitted pods. ``manages_all``: also manage pods without a queue name."""

    simulation: Simulation
    quota: int
    manages_all: bool = False
    admitted: dict[str, int] = field(default_factory=dict)
    """Workload → number of pods that hold quota, in the order of admission."""
    finished: set[str] = field(default_factory=set)
    excess: list[str] = field(default_factory=list)
    """Pods that were deleted because their group was already complete."""

    def __post_init__(self) -> None:
        self.simulation.store.mutate = self._gate

    @property
    def used(self) -> int:
        """Quota in use, in pods."""
        return sum(self.admitted.values())

    def _gate(self, plural: str, raw: Raw) -> None:
        labels = raw["metadata"].get("labels") or {}
        if plural != "pods" or not (labels.get(QUEUE) or self.manages_all):
            return
        raw["metadata"]["finalizers"] = [FINALIZER]
        raw["spec"]["schedulingGates"] = [{"name": f"{PREFIX}admission"}]
        gated = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }
        raw["status"] = {"phase": "Pending", "conditions": [gated]}

    def work(self) -> None:
        """Admit the workloads that fit in the quota, finish completed workloads, and delete excess pods."""
        groups: dict[str, list[Raw]] = {}
        for raw in self.simulation.store.list("pods"):
            labels = raw["metadata"].get("labels") or {}
            if _is_managed(raw) and labels.get(GROUP):
                groups.setdefault(labels[GROUP], []).append(raw)
            elif _is_managed(raw):
                self._work_on_one(raw, bool(labels.get(QUEUE)))
        for name in [one for one in self.admitted if one not in groups]:
            if not name.startswith("pod-"):
                del self.admitted[name]
        for name, pods in sorted(groups.items()):
            self._work_on_group(name, pods)

    def _work_on_one(self, raw: Raw, has_queue: bool) -> None:
        name = f"pod-{raw['metadata']['name']}"
        if _has_terminated(raw) or raw["metadata"].get("deletionTimestamp"):
            self.admitted.pop(name, None)
            self._let_go(raw)
        elif has_queue and name not in self.admitted and self._has_room(1):
            self.admitted[name] = 1
            self._ungate(raw)

    def _work_on_group(self, name: str, pods: list[Raw]) -> None:
        annotations = pods[0]["metadata"]["annotations"]
        size = int(annotations[f"{PREFIX}pod-group-total-count"])
        assert (
            len({raw["metadata"]["annotations"][f"{PREFIX}role-hash"] for raw in pods}) == 1
        )
        is_over = all(_has_terminated(raw) for raw in pods)
        if name in self.finished or (
            is_over and annotations.get(f"{PREFIX}retriable-in-group") == "false"
        ):
            self.finished.add(name)
            self.admitted.pop(name, None)
            for raw in pods:
                self._let_go(raw)
            return
        active = [raw for raw in pods if _is_active(raw)]
        inactive = [raw for raw in pods if not _is_active(raw)]
        active.sort(key=lambda raw: int(raw["metadata"]["uid"].partition("-")[2]))
        active.sort(key=lambda raw: bool(raw["spec"].get("schedulingGates")))
        for raw in active[size:]:
            self.excess.append(raw["metadata"]["name"])
            self._let_go(raw)
            self.simulation.store.remove("pods", "ns", raw["metadata"]["name"])
        for raw in inactive[: max(0, len(inactive) + len(active) - size)]:
            self._let_go(raw)
        if len(active) == size and name not in self.admitted and self._has_room(size):
            self.admitted[name] = size
        for raw in active[:size] if name in self.admitted else ():
            self._ungate(raw)

    def preempt(self, workload: str) -> None:
        """Evict a workload, as Kueue does for a workload of higher priority."""
        del self.admitted[workload]
        for raw in self.simulation.store.list("pods"):
            name = raw["metadata"]["name"]
            is_of_it = raw["metadata"]["labels"].get(GROUP) == workload
            if not (is_of_it or f"pod-{name}" == workload) or _has_terminated(raw):
                continue
            mark = {
                "type": "TerminationTarget",
                "status": "True",
                "reason": "WorkloadEvictedDueToPreempted",
            }
            self._change(raw, {"status": {**raw["status"], "conditions": [mark]}})
            self.simulation.store.remove("pods", "ns", name)

    def _has_room(self, pods: int) -> bool:
        return self.used + pods <= self.quota

    def _ungate(self, raw: Raw) -> None:
        if raw["spec"].get("schedulingGates"):
            self._change(
                raw, {"spec": {"schedulingGates": None}, "status": {"conditions": None}}
            )

    def _let_go(self, raw: Raw) -> None:
        self._change(raw, {"metadata": {"finalizers": None}})
        metadata = raw["metadata"]
        is_idle = _has_terminated(raw) or not raw["spec"].get("nodeName")
        if metadata.get("deletionTimestamp") and is_idle:
            self.simulation.store.remove("pods", "ns", metadata["name"])

    def _change(self, raw: Raw, patch: dict[str, Any]) -> None:
        self.simulation.store.change("pods", "ns", raw["metadata"]["name"], patch)


def _is_managed(raw: Raw) -> bool:
    return bool(raw["metadata"].get("finalizers"))


def _has_terminated(raw: Raw) -> bool:
    return raw["status"].get("phase") in ("Failed", "Succeeded")


def _is_active(raw: Raw) -> bool:
    never_runs = raw["metadata"].get("deletionTimestamp") and not raw["spec"].get(
        "nodeName"
    )
    return raw["status"].get("phase") != "Failed" and not never_runs
