"""Simulates one operator's reconciler on a Store. The test acts as the kubelets and the coordinators."""

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from evergrad_operator.core.decision import NodeBounds
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.errors import ApiError, OperatorError
from evergrad_operator.core.objects.kinds import KINDS
from evergrad_operator.core.objects.names import LABEL_ROLE, Key
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.observe import Silence
from evergrad_operator.edge.api.event_recorder import Recorder
from evergrad_operator.edge.api.tokens import derive_token
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS, RUNS
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics
from evergrad_operator.edge.reconcile.coordinator_poller import (
    CoordinatorResponse,
    Coordinators,
)
from evergrad_operator.edge.reconcile.reconciler import Reconciler
from fake_kubernetes.cluster import FakeCluster
from fake_kubernetes.recipe import TRAINING
from fake_kubernetes.store import Store, Write

KEY: Key = ("ns", "run")
CONFIG = Config(
    trainer_image="trainer:1",
    operator_image="operator:1",
    network_policies=False,
    disruption_budgets=False,
)
RESOURCES = {"trainingruns": RUNS, "pods": PODS, "persistentvolumeclaims": CLAIMS}
WATCHED = tuple(RESOURCES)


KEY_OF_TOKENS = b"k" * 32


class Crash(BaseException):
    """Raised at the point where the operator process is killed."""


class FakeCoordinators(Coordinators):
    """Returns the answers that the test sets, and records posted bounds.

    ``answers`` are the answers that the operator already has; ``unheard`` replaces them at the next ``ask``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Callable[[], float] = lambda: 0.0
        self.answers: dict[Key, Mapping[str, Any]] = {}
        self.unheard: dict[Key, Mapping[str, Any]] = {}
        self.asked_at: dict[Key, float] = {}
        self.bounds: list[NodeBounds] = []
        self.silent_since: dict[Key, float] = {}
        self.has_timed_out = False

    def answer(self, key: Key) -> CoordinatorResponse | None:
        followed = self._followed.get(key)
        raw = self.answers.get(key)
        return (
            CoordinatorResponse(raw, followed.attempt, self.asked_at.get(key, 0.0))
            if followed is not None and raw is not None
            else None
        )

    def silence(self, key: Key) -> Silence | None:
        followed, since = self._followed.get(key), self.silent_since.get(key)
        if followed is None or since is None:
            return None
        text = f"the coordinator at {followed.address} did not answer GET /status: TimeoutError"
        seconds = self.now() - since
        reason, is_dead = "CoordinatorUnreachable", self.has_timed_out
        return Silence(
            followed.attempt,
            seconds,
            reason,
            text,
            has_answered=True,
            has_timed_out=is_dead,
            is_alone=True,
        )

    async def ask(self, key: Key) -> None:
        self.answers.update(self.unheard)
        self.asked_at[key] = self.clock()

    async def post_bounds(self, key: Key, bounds: NodeBounds) -> None:
        if key not in self._followed:
            raise OperatorError("no coordinator")
        self.bounds.append(bounds)


class Simulation:
    """A cluster with one operator that the test can kill and start again."""

    def __init__(self, *, config: Config = CONFIG) -> None:
        self.now = 1_800_000_000.0
        self.store = Store(clock=lambda: self.now)
        self.cluster = FakeCluster(self.store)
        self.config = config
        self.coordinators = FakeCoordinators()
        self.is_watch_late = False
        """Whether watches deliver changes only at ``deliver``, instead of before the write returns."""
        self.shown_later: list[tuple[str, str, Any]] = []
        self.start_operator()

    def start_operator(self) -> None:
        """Start a new operator process with an empty memory. It lists all objects."""
        self.cache, self.metrics = InformerCache(clock=lambda: self.now), OperatorMetrics()
        self.shown_later.clear()
        answers, self.coordinators = self.coordinators.answers, FakeCoordinators()
        self.coordinators.now = lambda: self.now
        self.coordinators.answers = answers
        self.reconciler = Reconciler(
            self.cluster,
            cache=self.cache,
            coordinators=self.coordinators,
            recorder=Recorder(self.cluster, clock=lambda: self.now),
            config=self.config,
            metrics=self.metrics,
        )
        self.reconciler.clock = lambda: self.now
        self.reconciler.token_of = partial(derive_token, KEY_OF_TOKENS)
        for plural in (
            "trainingruns",
            "persistentvolumeclaims",
            "pods",
            "configmaps",
            "services",
        ):
            for raw in self.store.list(plural):
                self.cache.see(RESOURCES.get(plural, CHILDREN), raw, is_watched=True)
        self.store.on_change = self._watch

    def _watch(self, kind: str, plural: str, raw: Any) -> None:
        if plural not in WATCHED:
            return
        if self.is_watch_late:
            self.shown_later.append((kind, plural, copy.deepcopy(raw)))
        else:
            self._show(kind, plural, raw)

    def _show(self, kind: str, plural: str, raw: Any) -> None:
        self.cache.see(
            RESOURCES[plural], raw, is_deleted=kind == "DELETED", is_watched=True
        )

    def deliver(self) -> None:
        """Deliver the delayed watch events."""
        waiting, self.shown_later[:] = list(self.shown_later), []
        for change in waiting:
            self._show(*change)

    def resync(self) -> None:
        """Replace the operator's cache with the result of a new LIST of every resource."""
        children = [*self.store.list("configmaps"), *self.store.list("services")]
        lists = {RESOURCES[plural]: self.store.list(plural) for plural in WATCHED} | {
            CHILDREN: children
        }
        for resource, raws in lists.items():
            self.cache.replace(
                resource, raws, version=self.store.version, covers=lambda namespace: True
            )

    def reconcile(self, key: Key = KEY) -> float | None:
        """Reconcile once. If watches are late, deliver the changes at the end of the pass."""
        try:
            return asyncio.run(self.reconciler.reconcile(key))
        finally:
            self.deliver()

    def settle(self, key: Key = KEY, *, most: int = 20) -> float | None:
        """Reconcile until a pass writes nothing.

        If a write is refused, time advances by the delay until its retry (if the delay is less than 5 s).
        Raises AssertionError after ``most`` passes.
        """
        delay: float | None = None
        for _ in range(most):
            before = len(self.store.writes)
            try:
                delay = self.reconcile(key)
            except ApiError:
                continue
            if self.refused(key) and delay is not None and delay < 5.0:
                self.now += delay
            elif len(self.store.writes) == before:
                return delay
        raise AssertionError(f"no end of writes: {self.store.writes[-10:]}")

    def refused(self, key: Key = KEY) -> list[tuple[str, str, str]]:
        """Return the writes that are refused and not accepted since, as (verb, name, reason)."""
        memory = self.reconciler._hints.get(key)
        failures = memory.applied.refusals.failures() if memory is not None else ()
        return [(failure.verb, failure.name, failure.reason) for failure in failures]

    # ---- actions of other components -----------------------------------------------------------------------

    def create_run(self, name: str = "run", **spec: Any) -> None:
        body = {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"nodes": {"min": 1, "max": 2}, "training": TRAINING, **spec},
        }
        with self.by_others():
            self.store.create("trainingruns", body)

    def start_pods(self) -> None:
        """Start all pending pods as kubelets do, and bind all claims as a provisioner does."""
        for number, raw in enumerate(self.store.list("pods")):
            is_held = raw["spec"].get("schedulingGates") or raw["metadata"].get(
                "deletionTimestamp"
            )
            if raw["status"].get("phase") == "Pending" and not is_held:
                state = {"running": {"startedAt": format_time(self.now)}}
                name = raw["spec"]["containers"][0]["name"]
                status = {
                    "phase": "Running",
                    "podIP": f"10.0.0.{number + 1}",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [
                        {"name": name, "state": state, "ready": True, "restartCount": 0}
                    ],
                }
                self.store.change(
                    "pods",
                    "ns",
                    raw["metadata"]["name"],
                    {"status": status, "spec": {"nodeName": "n1"}},
                )
        for raw in self.store.list("persistentvolumeclaims"):
            if (raw.get("status") or {}).get("phase") != "Bound":
                self.store.change(
                    "persistentvolumeclaims",
                    "ns",
                    raw["metadata"]["name"],
                    {"status": {"phase": "Bound"}},
                )

    def end_pod(self, name: str, exit_code: int = 0, **terminated: Any) -> None:
        """End a pod's container, so that the pod is Succeeded or Failed."""
        raw = self.store.get("pods", "ns", name)
        ended = {
            "exitCode": exit_code,
            "finishedAt": format_time(self.now),
            "reason": "Error" if exit_code else "Completed",
            **terminated,
        }
        container = {
            "name": raw["spec"]["containers"][0]["name"],
            "state": {"terminated": ended},
            "ready": False,
        }
        phase = "Failed" if exit_code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [container], "conditions": []}
        self.store.change("pods", "ns", name, {"status": status})

    def reap(self) -> None:
        """End and remove the pods that are being deleted. A pod with a finalizer ends but stays."""
        for raw in self.store.list("pods"):
            name, metadata = raw["metadata"]["name"], raw["metadata"]
            if not metadata.get("deletionTimestamp"):
                continue
            if raw["status"].get("phase") not in ("Failed", "Succeeded"):
                self.end_pod(name, 75)
            self.store.remove("pods", "ns", name)

    def train(self, step: int = 1, **more: Any) -> None:
        """Set the coordinator's answer to a running group at ``step``."""
        nodes = {"min": 1, "max": 2, "ready": 2, "connected": 2, "members": []}
        answer = {
            "phase": "Running",
            "reason": "AllMembersUp",
            "message": "",
            "generation": 1,
            "nodes": nodes,
            "worldSize": 2,
        }
        answer |= {
            "step": step,
            "totalSteps": 10,
            "loss": 2.0,
            "tokensPerSecond": 5.0,
            "restarts": {},
            "lostSeconds": {},
        }
        self.coordinators.answers[KEY] = {**answer, "updatedSecondsAgo": 0.1, **more}

    def fall_silent(self, *, is_host_dead: bool = False) -> None:
        """Stop the coordinator's answers. The last answer stays until the operator discards it."""
        self.coordinators.silent_since[KEY] = self.now
        self.coordinators.has_timed_out = is_host_dead

    @contextlib.contextmanager
    def by_others(self) -> Iterator[None]:
        """A context whose writes are not counted as the operator's writes."""
        before, hook = len(self.store.writes), (self.store.before, self.store.after)
        self.store.before = self.store.after = lambda write: None
        try:
            yield
        finally:
            del self.store.writes[before:]
            self.store.before, self.store.after = hook

    # ---- observations --------------------------------------------------------------------------------------

    @property
    def watch_lag(self) -> float:
        """Watch lag in seconds, as the operator measures it.

        Above 100 s, /healthz fails and the operator is restarted.
        """
        return max(self.cache.expectations.lag().values())

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.store.get("trainingruns", *KEY).get("status") or {})

    def pods(self, role: str = "node") -> list[str]:
        return [
            raw["metadata"]["name"]
            for raw in self.store.list("pods")
            if raw["metadata"]["labels"][LABEL_ROLE] == role
        ]

    def children(self) -> list[tuple[str, str]]:
        return sorted(
            (plural, name)
            for plural, _, name in self.store.objects
            if plural not in ("trainingruns", "events", "leases")
        )


def crash_at(number: int, *, is_before: bool) -> tuple[Any, Any]:
    """Return the Store hooks that kill the operator before or after its write ``number`` (from 0)."""
    count = [-1]

    def before(write: Write) -> None:
        if write.plural == "events":
            return
        count[0] += 1
        if is_before and count[0] == number:
            raise Crash

    def after(write: Write) -> None:
        if not is_before and count[0] == number and write.plural != "events":
            raise Crash

    return before, after


def make_trained() -> Simulation:
    """Return a simulation with a run whose nodes all train."""
    simulation = Simulation()
    simulation.create_run()
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    simulation.train()
    simulation.settle()
    return simulation


__all__ = [
    "CONFIG",
    "KEY",
    "KINDS",
    "Crash",
    "Simulation",
    "crash_at",
    "make_trained",
]
