"""Simulates one run without a cluster: plans are carried out in memory, tests add events, and the clock is a
number."""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fake_kubernetes.recipe import TRAINING

from evergrad_coordinator.protocol import Recovery
from evergrad_coordinator.rules.progress import ProgressCounter
from evergrad_coordinator.rules.state import TrainingState
from evergrad_operator.core.decision import Decision
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.kinds import Kind
from evergrad_operator.core.objects.times import format_time, parse_time
from evergrad_operator.core.observe.coordinator_status import (
    CoordinatorStatus,
    parse_progress,
)
from evergrad_operator.core.observe.observe import (
    ApplyFailure,
    Observation,
    observe,
    observe_gone,
)
from evergrad_operator.core.observe.profiles import NO_PROFILE
from evergrad_operator.core.observe.spec import SpecCache
from evergrad_operator.core.plan import ObjectPlan, plan_children
from evergrad_operator.core.plan.changes import compare_settings, is_edited
from evergrad_operator.core.policies import decide
from evergrad_operator.core.status.events import (
    KubernetesEvent,
    derive_events,
    describe_edit,
)
from evergrad_operator.core.status.run_status import (
    ApplyOutcome,
    build_status,
    without_usage,
)
from evergrad_operator.edge.api.tokens import derive_token

START = 1_900_000_000.0
CONFIG = Config(
    trainer_image="registry.example/trainer:1", operator_image="registry.example/operator:1"
)


def make_run(name: str = "docs-lm", **spec: Any) -> dict[str, Any]:
    """Return a TrainingRun as the API server stores it. ``spec`` replaces parts of its spec."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": format_time(START - 10),
        },
        "spec": {
            "nodes": {"min": 2, "max": 3},
            "storage": {"size": "1Gi"},
            "training": copy.deepcopy(TRAINING),
            **spec,
        },
    }


def make_progress(
    attempt: int = 0, *, phase: str = "Running", **fields: Any
) -> CoordinatorStatus:
    """Return a coordinator's status. The names are those of the wire format."""
    nodes = {"min": 2, "max": 3, "ready": 3, "connected": 3, **fields.pop("nodes", {})}
    return parse_progress(
        {"phase": phase, "reason": "AllMembersUp", "nodes": nodes, **fields},
        attempt=attempt,
    )


class OperatorDiedError(Exception):
    """Raised between two writes to simulate the operator's death."""


class Simulation:
    """One run, its child objects and its pods."""

    def __init__(
        self,
        run: Mapping[str, Any] | None = None,
        *,
        config: Config = CONFIG,
        now: float = START,
    ) -> None:
        self.raw: dict[str, Any] = copy.deepcopy(dict(run or make_run()))
        self.config, self.now = config, now
        self.specs = SpecCache(config.installation)
        self.profile = NO_PROFILE
        self.pods: dict[str, dict[str, Any]] = {}
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.others: list[dict[str, Any]] = []
        self.progress: CoordinatorStatus | None = None
        self._stale: CoordinatorStatus | None = None
        """The coordinator's last answer when a pod ended. It is older than the end."""
        self._counter: tuple[int, ProgressCounter] | None = None
        """The coordinator's attempt, and its counter of steps."""
        self.group_kind: Kind | None = None
        """The kind of PodGroup that the API server serves."""
        self.failures: list[ApplyFailure] = []
        self.users: frozenset[str] | None = None
        """Names of the runs that store files on the claim."""
        self.troubled: tuple[str, ...] = ()
        """Hosts on which other runs have failed."""
        self.events: list[KubernetesEvent] = []
        self.created: list[str] = []
        self.gone: list[tuple[dict[str, Any], float]] = []
        """The last version of each deleted pod, and its deletion time."""
        self.lives: dict[str, tuple[float, float | None]] = {}
        """Creation and end time of every pod except coordinators, as shown by the API server."""
        self.decision: Decision
        self.plan: ObjectPlan
        self.is_deleted = False
        """Whether the operator has deleted the run itself."""
        self.writes = 0
        self.writes_left: int | None = None
        """Number of writes after which the operator dies, before the next write."""
        self._serials = itertools.count()

    # ---- the operator --------------------------------------------------------------------------------------

    def look(self) -> Observation:
        """Return the operator's current observation. The coordinator notices lost nodes first."""
        is_answer_new = self.progress is not self._stale
        if self.progress is not None:
            staying = [
                pod["metadata"]
                for pod in self.pods.values()
                if "deletionTimestamp" not in pod["metadata"]
            ]
            there = sum(
                one["labels"][names.LABEL_ROLE] == names.ROLE_NODE for one in staying
            )
            self.progress = replace(
                self.progress, connected=min(self.progress.connected, there)
            )
        if not is_answer_new:
            self._stale = self.progress
        seen = observe(
            self.specs.parse(self.raw, self.profile),
            pods=copy.deepcopy(list(self.pods.values())),
            others=self.others,
            children=self.children,
            progress=self.progress,
            failures=self.failures,
        )
        seen = replace(seen, group_kind=self.group_kind, is_answer_new=is_answer_new)
        seen = replace(seen, claim_users=self.users, troubled_hosts=self.troubled)
        gone = [(raw, self.now - at) for raw, at in self.gone]
        seen = replace(seen, gone=observe_gone(seen.run, gone))
        config = self.children.get(("ConfigMap", names.config_name(seen.run.name)))
        if config is None or not is_edited(seen):
            return seen
        applied = compare_settings(config["data"][names.CONFIG_FILE], seen.run)
        return replace(seen, applied=applied)

    def reconcile(
        self, *, is_status_lost: bool = False, refuse: ApplyFailure | None = None
    ) -> Decision:
        """Run one pass of the operator's core and return its decision.

        ``is_status_lost``: the operator dies before it writes the status. ``refuse``: the failure that the
        API server returns for every new pod.
        """
        seen = self.look()
        self.decision = decide(seen, self.config, self.now)
        assert decide(self.look(), self.config, self.now) == self.decision
        self.plan = plan_children(
            seen,
            self.decision,
            self.config,
            token=derive_token(b"k" * 32, self.raw["metadata"]["uid"]),
        )
        edit = describe_edit(seen)
        if edit is not None and edit not in self.events:
            self.events.append(edit)
        created = self._carry_out(self.plan, refuse)
        if not is_status_lost:
            self.write_status(seen, created)
        return self.decision

    def settle(self, *, most: int = 20) -> Decision:
        """Reconcile until a pass has an empty plan and writes nothing, for at most ``most`` passes."""
        for _ in range(most):
            before = self.writes
            self.reconcile()
            if self.plan.is_empty and self.writes == before:
                return self.decision
        raise AssertionError(f"still busy after {most} passes: {self.decision}")

    def write_status(self, seen: Observation, created: tuple[str, ...]) -> None:
        """Write the status as the API server stores it, if more than the usage times has changed."""
        status = build_status(seen, self.decision, ApplyOutcome(created=created), self.now)
        if without_usage(status) != without_usage(self.raw.get("status") or {}):
            self._write()
            self.events += derive_events(self.raw.get("status", {}), status)
            self.raw["status"] = status
            self.writes += 1
            counted = {pod.uid for pod, _ in seen.gone}
            self.gone = [
                one for one in self.gone if one[0]["metadata"]["uid"] not in counted
            ]

    def _write(self) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                self.writes_left = None
                raise OperatorDiedError
            self.writes_left -= 1

    def _carry_out(self, plan: ObjectPlan, refuse: ApplyFailure | None) -> tuple[str, ...]:
        for child in (*((plan.claim,) if plan.claim else ()), *plan.apply):
            self._write()
            key = (child["kind"], child["metadata"]["name"])
            old = self.children.get(key, {})
            metadata = {**old.get("metadata", {}), **child["metadata"]}
            annotations = {
                **old.get("metadata", {}).get("annotations", {}),
                **child["metadata"].get("annotations", {}),
            }
            self.children[key] = copy.deepcopy(
                {**old, **child, "metadata": {**metadata, "annotations": annotations}}
            )
        if plan.bounds is not None and self.progress is not None:
            self.progress = replace(
                self.progress, min_nodes=plan.bounds.min, max_nodes=plan.bounds.max
            )
        for deletion in plan.delete:
            self._write()
            if deletion.kind == names.KIND:
                self.is_deleted = True
            elif deletion.kind == "Pod":
                self.delete(deletion.name)
            else:
                self.children.pop((deletion.kind, deletion.name))
        if refuse is not None:
            self.failures = [refuse] if plan.create else []
            return ()
        self.failures = []
        return tuple(self._create(pod) for pod in plan.create)

    def _create(self, pod: Mapping[str, Any]) -> str:
        self._write()
        pod = copy.deepcopy(dict(pod))
        name = str(pod["metadata"]["name"])
        assert name not in self.pods, f"{name} exists"
        pod["metadata"] |= {
            "uid": f"pod-{next(self._serials)}",
            "creationTimestamp": format_time(self.now),
        }
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        if pod["metadata"]["labels"][names.LABEL_ROLE] != names.ROLE_COORDINATOR:
            self.lives[name] = (parse_time(format_time(self.now)) or 0.0, None)
        self.created.append(name)
        return name

    # ---- actions of the cluster ----------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        """The status of the run."""
        return dict(self.raw.get("status", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        """Return the condition of type ``kind``."""
        return next(one for one in self.status["conditions"] if one["type"] == kind)

    def set_spec(self, **spec: Any) -> None:
        """Change fields of the spec as a user does, and increment the generation."""
        self.raw["spec"] |= spec
        self.raw["metadata"]["generation"] += 1

    def live(self, *, role: str = names.ROLE_NODE) -> list[str]:
        """Return the names of pods that have not ended and are not being deleted."""
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"][names.LABEL_ROLE] == role
            and "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
        ]

    def start(self, *chosen: str) -> None:
        """Start the containers of the chosen pods, or of all pending pods if none is chosen."""
        for name in chosen or [
            name for name, pod in self.pods.items() if pod["status"]["phase"] == "Pending"
        ]:
            pod = self.pods[name]
            container = {
                "name": pod["spec"]["containers"][0]["name"],
                "state": {"running": {"startedAt": format_time(self.now)}},
                "ready": True,
            }
            status = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [container],
            }
            pod["status"] = {**status, "podIP": "10.0.0.9"}
            pod["spec"].setdefault(
                "nodeName", f"host-{pod['metadata']['labels'].get(names.LABEL_INDEX, 'c')}"
            )

    def end(
        self, name: str, code: int, *, reason: str = "Error", message: str = ""
    ) -> None:
        """End the container of a pod. The coordinator's last answer is older than this end."""
        self._stale = self.progress
        pod = self.pods[name]
        terminated = {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "finishedAt": format_time(self.now),
        }
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "state": {"terminated": terminated},
        }
        kept = [
            one
            for one in pod["status"].get("conditions", ())
            if one["type"] == "DisruptionTarget"
        ]
        phase = "Failed" if code else "Succeeded"
        pod["status"] = {
            "phase": phase,
            "containerStatuses": [container],
            "conditions": kept,
        }
        self._note_end(name, parse_time(format_time(self.now)) or 0.0)

    def wait_for(self, name: str, reason: str, message: str = "") -> None:
        """Set the container of a pod to waiting, because it cannot start."""
        ours = self.pods[name]["spec"]["containers"][0]["name"]
        container = {
            "name": ours,
            "state": {"waiting": {"reason": reason, "message": message}},
        }
        self.pods[name]["status"] = {"phase": "Pending", "containerStatuses": [container]}

    def unschedulable(self, name: str, message: str, reason: str = "Unschedulable") -> None:
        """Mark a pod as unschedulable, or as not scheduled for another ``reason``."""
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
        }
        self.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}

    def delete(self, name: str, *, grace: float = 30.0) -> None:
        """Delete a pod. If it is not running, it is removed immediately."""
        pod = self.pods[name]
        if pod["status"]["phase"] != "Running":
            self.vanish(name)
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = format_time(self.now + grace)

    def disrupt(self, name: str, reason: str) -> None:
        """Add the condition DisruptionTarget to a pod, and delete it."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        self.pods[name]["status"].setdefault("conditions", []).append(condition)
        self.delete(name)

    def vanish(self, name: str) -> None:
        """Remove a pod from the API server."""
        self.gone.append((self.pods.pop(name), self.now))
        self._note_end(name, self.now)

    def _note_end(self, name: str, at: float) -> None:
        if name in self.lives and self.lives[name][1] is None:
            self.lives[name] = (self.lives[name][0], max(at, self.lives[name][0]))

    def leave(self) -> None:
        """Remove all pods that are being deleted, after their checkpoint is saved."""
        for name in [
            name
            for name, pod in self.pods.items()
            if "deletionTimestamp" in pod["metadata"]
        ]:
            self.vanish(name)

    def train(self, step: int | None = 10, **fields: Any) -> None:
        """Set the coordinator's progress to a running group at ``step``."""
        attempts = [
            pod
            for name, pod in self.pods.items()
            if name in self.live(role=names.ROLE_COORDINATOR)
        ]
        newest = max(
            (int(pod["metadata"]["labels"][names.LABEL_ATTEMPT]) for pod in attempts),
            default=0,
        )
        nodes = {key: self.raw["spec"]["nodes"][key] for key in ("min", "max")}
        values = {
            "step": step,
            "totalSteps": 100,
            "nodes": {**nodes, "ready": len(self.live())},
            **fields,
        }
        self.progress = make_progress(
            newest, **{"newSteps": self._count_steps(newest, values), **values}
        )

    def _count_steps(self, attempt: int, values: Mapping[str, Any]) -> int:
        """Count new steps as the coordinator does. Each attempt starts at 0."""
        if self._counter is None or self._counter[0] != attempt:
            recovery: Recovery = "fresh" if "script" in self.raw["spec"] else "in-process"
            self._counter = attempt, ProgressCounter(recovery)
        counter = self._counter[1]
        step, checkpoint = (values.get(name) for name in ("step", "checkpointStep"))
        training = TrainingState(
            step=-1 if step is None else step,
            checkpoint_step=-1 if checkpoint is None else checkpoint,
        )
        is_whole = values.get("phase", "Running") in ("Running", "Draining")
        counter.note_training(training, is_whole=is_whole)
        return counter.num_steps

    def run(self, step: int | None = 10) -> "Simulation":
        """Start the run: create its pods, start them, report progress, and settle."""
        self.reconcile()
        self.start()
        self.train(step)
        self.settle()
        return self

    def age(self, seconds: float) -> None:
        """Advance the time by ``seconds``."""
        self.now += seconds

    def seconds_since(self, text: str) -> float:
        """Return the seconds since ``text``, a time of the status."""
        return self.now - (parse_time(text) or 0.0)

    def lifetime(self, *, is_newest_left_out: bool = False) -> int:
        """Return the milliseconds of all pods except coordinators, from the times on the API server.

        ``is_newest_left_out``: leave out pods that were created in this second, because the next pass counts
        them.
        """
        return sum(
            round(1000 * ((self.now if ended is None else ended) - created))
            for created, ended in self.lives.values()
            if not (is_newest_left_out and ended is None and self.now - created < 1)
        )

    def counted(self) -> int:
        """Return the pod milliseconds that the last pass counted, including the pending usage."""
        usage = self.decision.memory.usage
        return usage.pod_milliseconds + usage.pending[0]
