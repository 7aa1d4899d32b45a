"""One run in each state that GitOps tools distinguish, written by the operator's own code.

``python run_samples.py`` writes the samples of Argo CD's test data.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from simulated_run import START, Simulation, make_progress, make_run

from evergrad_manifest.crd.status import STATUS
from evergrad_operator.core.observe.observe import ApplyFailure
from evergrad_operator.core.status.run_status import build_refused_status

Raw = dict[str, Any]
ARGO: Final = (
    Path(__file__).resolve().parents[3]
    / "examples/gitops/argocd/resource_customizations/evergrad.dev/TrainingRun"
)
"""Layout of Argo CD: health.lua, health_test.yaml, testdata/, actions/."""


def make_samples() -> dict[str, Raw]:
    """Return each run by name as a client reads it from an API server, in a fixed order."""
    return {name: json.loads(json.dumps(make())) for name, make in _SAMPLES.items()}


def _new() -> Raw:
    return {**make_run(), "status": copy.deepcopy(STATUS["default"])}


def _starting() -> Raw:
    world = Simulation()
    world.reconcile()
    return world.raw


def _preparing() -> Raw:
    world = Simulation(make_run(preparation={}))
    world.reconcile()
    return world.raw


def _running() -> Raw:
    return Simulation().run(40).raw


def _running_on_fewer_nodes() -> Raw:
    world = Simulation().run(40)
    world.age(100)
    world.end("docs-lm-2-0", 1)
    world.train(41)
    world.reconcile()
    return world.raw


def _edited() -> Raw:
    world = Simulation().run(40)
    world.set_spec(nodes={"min": 1, "max": 3})
    return world.raw


def _restarting() -> Raw:
    world = Simulation().run(40)
    world.set_spec(restartNonce="again")
    world.reconcile()
    return world.raw


def _waiting_for_nodes() -> Raw:
    world = Simulation().run(40)
    world.age(600)
    world.train(40, phase="Waiting", message="1 of 2 nodes are there")
    world.settle()
    return world.raw


def _held(how: str, *arguments: str, seconds: float = 0.0) -> Callable[[], Raw]:
    def make() -> Raw:
        world = Simulation()
        world.reconcile()
        world.start("docs-lm-coordinator-0")
        for index in range(3):
            getattr(world, how)(f"docs-lm-{index}-0", *arguments)
        world.progress = make_progress(0, phase="Waiting", nodes={"ready": 0})
        world.settle()
        world.age(seconds)
        world.settle()
        return world.raw

    return make


def _refused(status: int, message: str) -> Callable[[], Raw]:
    def make() -> Raw:
        world = Simulation()
        refusal = ApplyFailure("Pod", "docs-lm-0-0", status, "Forbidden", message, START)
        world.reconcile(refuse=refusal)
        world.reconcile(refuse=refusal)
        return world.raw

    return make


def _invalid() -> Raw:
    world = Simulation(make_run(image="Not An Image"))
    world.settle()
    return world.raw


def _unreadable() -> Raw:
    raw = {**make_run(nodes={"min": "many"}), "status": copy.deepcopy(STATUS["default"])}
    raw["status"] = build_refused_status(raw, "spec.nodes.min: no whole number", START)
    return raw


def _unreadable_edit() -> Raw:
    world = Simulation().run(40)
    world.set_spec(nodes={"min": "many"})
    world.raw["status"] = build_refused_status(
        world.raw, "spec.nodes.min: no whole number", START
    )
    return world.raw


def _suspended(is_over: bool) -> Callable[[], Raw]:
    def make() -> Raw:
        world = Simulation().run()
        world.train(40, checkpointStep=40)
        world.settle()
        world.set_spec(suspend=True)
        world.reconcile()
        while is_over and world.pods:
            world.leave()
            world.reconcile()
        if is_over:
            world.settle()
        return world.raw

    return make


def _stopped(reason: str) -> Callable[[], Raw]:
    def make() -> Raw:
        world = Simulation().run()
        world.train(50, phase="Stopped", reason=reason, checkpointStep=50)
        for name in world.live():
            world.end(name, 75)
        world.reconcile()
        world.progress = None
        world.leave()
        world.settle()
        return world.raw

    return make


def _ended(code: int, phase: str, **fields: Any) -> Callable[[], Raw]:
    def make() -> Raw:
        world = Simulation().run()
        world.train(100, phase=phase, checkpointStep=100, **fields)
        for name in world.live():
            world.end(name, code)
        world.settle()
        return world.raw

    return make


def _deleting() -> Raw:
    raw = Simulation().run(40).raw
    raw["metadata"]["deletionTimestamp"] = "2030-03-17T18:00:00Z"
    return raw


_SAMPLES: Final[dict[str, Callable[[], Raw]]] = {
    "new": _new,
    "starting": _starting,
    "preparing": _preparing,
    "running": _running,
    "running_on_fewer_nodes": _running_on_fewer_nodes,
    "edited": _edited,
    "restarting": _restarting,
    "waiting_for_nodes": _waiting_for_nodes,
    "queued": _held("unschedulable", "waiting", "SchedulingGated", seconds=3600),
    "unschedulable": _held("unschedulable", "0/2 nodes are available", seconds=3600),
    "quota": _refused(403, "exceeded quota: q, requested: pods=1"),
    "image_missing_for_seconds": _held("wait_for", "ErrImagePull", "manifest unknown"),
    "image_missing_for_minutes": _held(
        "wait_for", "ErrImagePull", "manifest unknown", seconds=300
    ),
    "refused_by_a_policy": _refused(403, "admission webhook denied the request"),
    "invalid": _invalid,
    "unreadable": _unreadable,
    "unreadable_edit": _unreadable_edit,
    "suspending": _suspended(is_over=False),
    "suspended": _suspended(is_over=True),
    "stopped": _stopped("AfterStep"),
    "not_finite": _stopped("NonFinite"),
    "complete": _ended(0, "Complete"),
    "failed": _ended(64, "Failed", reason="UserError", message="the data are empty"),
    "deleting": _deleting,
}


_READ: Final = ("observedGeneration", "phase", "reason", "message", "attempt", "progress")
_CONDITIONS: Final = ("Ready", "Complete", "Failed", "Suspended", "Stalled", "Reconciling")
_ACTIONS: Final[dict[str, tuple[str, Raw]]] = {
    "suspend": ("running", {"suspend": True}),
    "resume": ("suspended", {"suspend": False}),
    "restart": ("failed", {"restartNonce": "argocd-1"}),
}
"""Return, by the name of an action, a sample and the change that the action makes in its spec."""


def render_test_data() -> Iterator[tuple[str, str]]:
    """Return paths below ``ARGO`` and texts of Argo CD's test data: the parts of each run that a script might
    read, and for some runs the result of an action."""
    shown = {}
    for name, raw in make_samples().items():
        status = {key: raw["status"][key] for key in _READ if key in raw["status"]}
        conditions = raw["status"].get("conditions", ())
        if conditions:
            status["conditions"] = [one for one in conditions if one["type"] in _CONDITIONS]
        spec = {key: value for key, value in raw["spec"].items() if key != "training"}
        shown[name] = {**raw, "spec": spec, "status": status}
        yield f"testdata/{name}.yaml", _write(shown[name])
    for action, (name, change) in _ACTIONS.items():
        made = {**shown[name], "spec": {**shown[name]["spec"], **change}}
        yield f"actions/testdata/{action}.yaml", _write(made)


def _write(raw: Raw) -> str:
    return yaml.safe_dump(raw, sort_keys=False, width=110)


if __name__ == "__main__":
    texts = dict(render_test_data())
    for path in (*ARGO.glob("testdata/*"), *ARGO.glob("actions/testdata/*")):
        path.unlink()
    for name, text in texts.items():
        (ARGO / name).parent.mkdir(parents=True, exist_ok=True)
        (ARGO / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{ARGO.name}: {len(texts)} files of test data\n")
