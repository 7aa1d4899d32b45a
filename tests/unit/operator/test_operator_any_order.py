"""Random events of a run, in any order, with an operator that dies at any point: invariants always hold."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_run import OperatorDiedError, Simulation, make_run

from evergrad_operator.core.decision import Action
from evergrad_operator.core.objects.names import Phase

NODE = st.integers(0, 4)
DISRUPTIONS = ("PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager")
EVENTS = st.one_of(
    st.tuples(st.just("end"), NODE, st.sampled_from([1, 70, 75, 76, 137])),
    st.tuples(st.just("end"), NODE, st.sampled_from([0, 64])),
    st.tuples(st.just("delete"), NODE),
    st.tuples(st.just("vanish"), NODE),
    st.tuples(st.just("disrupt"), NODE, st.sampled_from(DISRUPTIONS)),
    st.tuples(st.just("coordinator"), st.sampled_from(["delete", "vanish"])),
    st.tuples(st.just("start")),
    st.tuples(st.just("leave")),
    st.tuples(st.just("train"), st.integers(0, 100)),
    st.tuples(st.just("silence")),
    st.tuples(st.just("age"), st.sampled_from([0.5, 3.0, 45.0, 700.0])),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("bounds"), st.integers(1, 5)),
    st.tuples(st.just("nonce"), st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("reconcile")),
)


def happen(world: Simulation, event: tuple[Any, ...]) -> None:
    kind, *arguments = event
    nodes, coordinators = world.live(), world.live(role="coordinator")
    if kind in ("end", "delete", "vanish", "disrupt"):
        index, *rest = arguments
        if nodes:
            getattr(world, kind)(nodes[index % len(nodes)], *rest)
    elif kind == "coordinator" and coordinators:
        getattr(world, arguments[0])(coordinators[0])
        world.progress = None
    elif kind in ("start", "leave"):
        getattr(world, kind)()
    elif kind == "train" and coordinators:
        world.train(*arguments)
    elif kind == "silence":
        world.progress = None
    elif kind == "age":
        world.age(*arguments)
    elif kind == "suspend":
        world.set_spec(suspend=arguments[0])
    elif kind == "bounds":
        world.set_spec(nodes={"min": 1, "max": arguments[0]})
    elif kind == "nonce":
        world.set_spec(restartNonce=arguments[0])
    elif kind == "reconcile":
        world.reconcile()


def check(world: Simulation) -> None:
    """Check the invariants after each pass."""
    live = [
        int(world.pods[name]["metadata"]["labels"]["evergrad.dev/index"])
        for name in world.live()
    ]
    assert len(set(live)) == len(live), "one live pod a node"
    if world.decision.action == Action.RUN:
        assert all(index < world.raw["spec"]["nodes"]["max"] for index in live), (
            "no node above the bounds"
        )
    assert len(world.live(role="coordinator")) <= 1
    assert len(json.dumps(world.status).encode()) < 16 * 1024
    newest_left_out = world.lifetime(is_newest_left_out=True)
    assert newest_left_out <= world.counted() <= world.lifetime(), (
        "each second of a pod counts once"
    )
    ends = {one["type"]: one["status"] for one in world.status["conditions"]}
    assert not (ends["Complete"] == "True" and ends["Failed"] == "True")
    if world.status["phase"] in (Phase.SUSPENDING, Phase.SUSPENDED):
        assert live == []
    restarts = world.status["restarts"]
    assert restarts["total"] == sum(restarts.get("byCause", {}).values())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, max_size=16))
def test_event_order_never_duplicates_a_node_pod_or_restarts_an_ended_run(
    events: list[tuple[Any, ...]],
) -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 3}))
    world.run()
    over: tuple[str, str | None] | None = None
    for event in events:
        created = len(world.created)
        happen(world, event)
        world.reconcile()
        check(world)
        phase, nonce = world.status["phase"], world.raw["spec"].get("restartNonce")
        if over is not None and (over[0] == Phase.COMPLETE or over[1] == nonce):
            assert phase == over[0], "what is over stays over"
            assert len(world.created) == created, "and makes nothing"
        over = (phase, nonce) if phase in (Phase.COMPLETE, Phase.FAILED) else None
    assert len(set(world.created)) == len(world.created), "no name is ever given twice"
    attempts: dict[str, list[int]] = {}
    for name in world.created:
        stem, _, attempt = name.rpartition("-")
        attempts.setdefault(stem, []).append(int(attempt))
    for found in attempts.values():
        assert found == sorted(set(found)), "attempts strictly grow"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(EVENTS, st.one_of(st.none(), st.integers(0, 6))), max_size=12))
def test_an_operator_that_exits_at_any_point_leaves_a_consistent_run(
    events: list[tuple[Any, int | None]],
) -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 3}))
    world.run()
    over: tuple[str, str | None] | None = None
    for event, writes_left in events:
        created = len(world.created)
        happen(world, event)
        world.writes_left = writes_left
        try:
            world.reconcile()
        except OperatorDiedError:
            continue
        world.writes_left = None
        check(world)
        phase, nonce = world.status["phase"], world.raw["spec"].get("restartNonce")
        if over is not None and (over[0] == Phase.COMPLETE or over[1] == nonce):
            assert phase == over[0]
            assert len(world.created) == created
        over = (phase, nonce) if phase in (Phase.COMPLETE, Phase.FAILED) else None


def failing(world: Simulation) -> None:
    world.age(100)
    world.end("docs-lm-1-0", 137)


def preempted(world: Simulation) -> None:
    world.age(100)
    world.disrupt("docs-lm-2-0", "PreemptionByScheduler")


def without_coordinator(world: Simulation) -> None:
    world.age(100)
    world.vanish("docs-lm-coordinator-0")


def wrong(world: Simulation) -> None:
    world.end("docs-lm-0-0", 64, message="bad data")


def done(world: Simulation) -> None:
    for name in world.live():
        world.end(name, 0)


def stopped(world: Simulation) -> None:
    world.train(50, phase="Stopped", reason="AfterStep", nodes={"connected": 0})
    for name in world.live():
        world.end(name, 75)


def not_finite(world: Simulation) -> None:
    world.train(50, phase="Stopped", reason="NonFinite", nodes={"connected": 0})
    for name in world.live():
        world.end(name, 75)


def failed_by_the_coordinator(world: Simulation) -> None:
    world.train(50, phase="Failed", reason="TooManyFailures", nodes={"connected": 0})
    for name in world.live():
        world.end(name, 70)


def cleaned_at_once(world: Simulation) -> None:
    world.set_spec(nodes={"min": 1, "max": 1}, ttlSecondsAfterFinished=0)
    world.settle()
    world.leave()
    failed_by_the_coordinator(world)


def grown(world: Simulation) -> None:
    world.set_spec(nodes={"min": 1, "max": 5})


def shrunk(world: Simulation) -> None:
    world.set_spec(nodes={"min": 1, "max": 1})


def suspended(world: Simulation) -> None:
    world.set_spec(suspend=True)


def restarted(world: Simulation) -> None:
    world.set_spec(restartNonce="again")


def born(world: Simulation) -> None:
    world.pods.clear()
    world.children.clear()
    world.created.clear()
    world.events.clear()
    world.raw.pop("status")


CHANGES = [
    born,
    failing,
    preempted,
    without_coordinator,
    wrong,
    done,
    stopped,
    not_finite,
    failed_by_the_coordinator,
    cleaned_at_once,
    grown,
    shrunk,
    suspended,
    restarted,
]


def follow(world: Simulation) -> tuple[list[str], list[str], dict[str, Any]]:
    for _ in range(8):
        try:
            world.reconcile()
        except OperatorDiedError:
            continue
        world.leave()
    world.settle()
    return sorted(world.pods), sorted(map(str, world.children)), world.status


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_an_operator_killed_between_two_writes_reaches_the_same_children_and_status(
    change: Any,
) -> None:
    begun = Simulation().run()
    change(begun)
    expected = follow(copy.deepcopy(begun))
    for writes_left in range(12):
        world = copy.deepcopy(begun)
        world.writes_left = writes_left
        assert follow(world) == expected, f"died after {writes_left} writes"
