"""A coordinator that does not respond is replaced before Kubernetes gives up its host. No other coordinator
is replaced."""

import errno
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Crash, Simulation, crash_at

from evergrad_operator.core.objects.errors import OperatorError
from evergrad_operator.core.observe.observe import Silence
from evergrad_operator.edge.reconcile.coordinator_poller import Coordinators


def begin() -> Simulation:
    world = Simulation()
    world.create_run()
    world.settle()
    world.start_pods()
    world.train()
    world.settle()
    return world


def coordinators(world: Simulation) -> list[str]:
    """The coordinators that are not being deleted."""
    pods = [world.store.get("pods", "ns", name) for name in world.pods("coordinator")]
    return [
        pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    ]


def test_a_coordinator_that_is_silent_for_ten_seconds_is_replaced_and_its_nodes_stay() -> (
    None
):
    world = begin()
    world.fall_silent(is_host_dead=True)
    world.now += 9
    world.settle()
    assert coordinators(world) == ["run-coordinator-0"]
    world.now += 2
    nodes = world.pods()
    world.settle()
    assert coordinators(world) == ["run-coordinator-1"]
    assert world.pods() == nodes
    service = world.store.get("services", "ns", "run-coordinator")
    assert service["spec"]["selector"]["evergrad.dev/attempt"] == "1"
    assert world.status["restarts"]["byCause"] == {"CoordinatorLost": 1}
    assert world.status["failures"].get("withoutProgress", 0) == 0


def test_a_new_coordinator_is_not_replaced_for_the_silence_of_its_predecessor() -> None:
    world = begin()
    world.fall_silent(is_host_dead=True)
    world.now += 11
    world.settle()
    world.reap()
    world.now += 60
    world.settle()
    assert coordinators(world) == ["run-coordinator-1"]


@pytest.mark.parametrize(
    "change",
    [
        {
            "has_answered": False
        },  # perhaps no operator can reach it: it would be replaced forever
        {"has_timed_out": False},  # its host is alive, and the kubelet starts it again
        {"is_alone": False},  # the operator itself is cut off
        {"attempt": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_coordinator_is_kept_while_it_may_be_healthy(change: dict[str, Any]) -> None:
    world = begin()
    silence = Silence(
        0,
        1000.0,
        "CoordinatorUnreachable",
        "no answer",
        has_answered=True,
        has_timed_out=True,
        is_alone=True,
    )
    world.coordinators.silence = lambda key: (
        replace(silence, **change) if key == KEY else None
    )  # type: ignore[method-assign]
    world.now += 1000
    world.settle()
    assert coordinators(world) == ["run-coordinator-0"]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("number", range(3))
def test_an_operator_killed_while_it_replaces_a_silent_coordinator_creates_one_successor(
    number: int, is_before: bool
) -> None:
    world = begin()
    world.fall_silent(is_host_dead=True)
    world.now += 11
    world.store.before, world.store.after = crash_at(number, is_before=is_before)
    with pytest.raises(Crash):
        world.settle()
    world.store.before = world.store.after = lambda write: None
    # A new operator does not know how long the coordinator has not responded, so it polls again.
    world.start_operator()
    world.settle()
    world.fall_silent(is_host_dead=True)
    world.now += 11
    world.settle()
    world.reap()
    world.settle()
    assert len(coordinators(world)) == 1
    assert coordinators(world)[0] != "run-coordinator-0"


@pytest.mark.parametrize(
    ("followed", "silent", "is_alone"),
    [(1, 1, True), (2, 1, True), (4, 3, False), (3, 3, False)],
)
def test_an_operator_that_reaches_hardly_any_coordinator_assumes_that_it_is_isolated(
    followed: int, silent: int, is_alone: bool
) -> None:
    known = Coordinators()
    for number in range(followed):
        known.follow(("ns", f"run-{number}"), "10.0.0.1", 0, token="t")
    for number in range(silent):
        key = ("ns", f"run-{number}")
        known._note_failure(key, known._followed[key], OperatorError("no answer"))
    silence = known.silence(("ns", "run-0"))
    assert silence is not None and silence.is_alone is is_alone


@pytest.mark.parametrize(
    ("cause", "has_timed_out"),
    [
        (TimeoutError(), True),
        (OSError(errno.EHOSTUNREACH, "x"), True),
        (ConnectionRefusedError(), False),
        (EOFError(), False),
    ],
)
def test_a_host_that_sends_any_response_is_alive(
    cause: Exception, has_timed_out: bool
) -> None:
    known = Coordinators()
    known.follow(KEY, "10.0.0.1", 0, token="t")
    error = OperatorError("no answer")
    error.__cause__ = cause
    known._note_failure(KEY, known._followed[KEY], error)
    silence = known.silence(KEY)
    assert silence is not None and silence.has_timed_out is has_timed_out
