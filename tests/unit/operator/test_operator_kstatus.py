"""The status as kstatus interprets it, and therefore Flux, `kubectl` plug-ins and other tools that wait: a
run is never done before the operator has observed it, and it is a failure only if a person must act."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kstatus_rules import ask_kstatus, judge
from run_samples import make_samples
from simulated_run import START, Simulation, make_run

from bed import toolbox
from evergrad_manifest.crd.definition import build_root
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.status.run_status import (
    ApplyOutcome,
    build_refused_status,
    build_status,
)

EXPECTED = {
    "new": "InProgress",
    "starting": "InProgress",
    "preparing": "InProgress",
    "running": "Current",
    "running_on_fewer_nodes": "Current",
    "edited": "InProgress",
    "restarting": "InProgress",
    "waiting_for_nodes": "InProgress",
    "queued": "InProgress",
    "unschedulable": "InProgress",
    "quota": "InProgress",
    "image_missing_for_seconds": "InProgress",
    "image_missing_for_minutes": "Failed",
    "refused_by_a_policy": "Failed",
    "invalid": "Failed",
    "unreadable": "Failed",
    "unreadable_edit": "Failed",
    "suspending": "InProgress",
    "suspended": "Current",
    "stopped": "Current",
    "not_finite": "Failed",
    "complete": "Current",
    "failed": "Failed",
    "deleting": "Terminating",
}
"""The kstatus result of each case."""
AT_ITS_END = {Phase.RUNNING, Phase.COMPLETE, Phase.SUSPENDED}


def every_status() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the expected result and the run, for each phase with each reason, with and without an action of
    a person.

    Conditions follow from these three and from numbers that kstatus does not read, so this covers every
    status that the operator can write.
    """
    world = Simulation()
    world.reconcile()
    seen, decision = world.look(), world.decision
    for phase, reason, is_blocked in itertools.product(Phase, Reason, (False, True)):
        made = replace(decision, phase=phase, reason=reason, is_blocked=is_blocked)
        status = build_status(seen, made, ApplyOutcome(), START)
        if is_blocked or phase == Phase.FAILED:
            expected = "Failed"
        else:
            expected = "Current" if phase in AT_ITS_END else "InProgress"
        yield expected, {**world.raw, "status": status}


@pytest.fixture(scope="session")
def kstatus() -> None:
    """Return the real program, which may need some seconds to build."""
    if reason := toolbox.unavailable("kstatus"):
        pytest.skip(reason)


def test_a_run_without_a_status_is_in_progress() -> None:
    status = build_root()["properties"]["status"]
    assert status["default"] == {"observedGeneration": -1}
    assert status["properties"]["observedGeneration"]["minimum"] == -1
    assert judge({**make_run(), "status": status["default"]}) == "InProgress"
    assert judge(make_run()) == "Current", "which is why there is a default"


def test_each_state_of_a_run_has_its_kstatus_result() -> None:
    assert {name: judge(raw) for name, raw in make_samples().items()} == EXPECTED


def test_no_status_that_the_operator_can_write_has_another_kstatus_result() -> None:
    for expected, raw in every_status():
        status = raw["status"]
        assert judge(raw) == expected, (status["phase"], status["reason"])


def test_an_unreadable_spec_is_a_failure_although_an_earlier_generation_was_applied() -> (
    None
):
    for raw in make_samples().values():
        if raw["status"].get("phase") in (Phase.COMPLETE, Phase.FAILED):
            continue
        edited = {**raw, "metadata": {**raw["metadata"], "generation": 7}}
        edited["metadata"].pop("deletionTimestamp", None)
        edited["status"] = build_refused_status(edited, "spec.nodes: no mapping", START)
        assert judge(edited) == "Failed"


def test_an_edit_that_one_operator_could_not_read_is_applied_by_the_next_operator() -> None:
    world = Simulation().run(40)
    world.set_spec(
        training={**world.raw["spec"]["training"], "checkpoint": {"every": {"steps": 7}}}
    )
    world.raw["status"] = build_refused_status(world.raw, "unknown word", START)
    assert world.status["observedGeneration"] == world.raw["metadata"]["generation"]
    world.reconcile()
    assert world.status["phase"] == "Restarting"
    assert [event.reason for event in world.events].count("SettingsChanged") == 1


@pytest.mark.timeout(1800)  # the program may have to be built first
def test_the_kstatus_library_agrees_on_every_state(kstatus: None) -> None:
    samples = make_samples()
    found = ask_kstatus(list(samples.values()))
    assert dict(zip(samples, found, strict=True)) == EXPECTED


@pytest.mark.timeout(1800)  # the program may have to be built first
def test_the_kstatus_library_agrees_on_every_status_that_the_operator_can_write(
    kstatus: None,
) -> None:
    expected, runs = zip(*every_status(), strict=True)
    assert ask_kstatus(runs) == list(expected)
    assert ask_kstatus([make_run()]) == ["Current"], "a run without any status"
