"""``spec.ttlDeletes: Run``: the operator deletes a run some time after its end, if the installation allows
it."""

from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes import simulation as fake
from fake_kubernetes.simulation import KEY
from fake_kubernetes.store import RefusedError, Write
from simulated_run import CONFIG, Simulation, make_run

from evergrad_operator.core.admission import find_problems
from evergrad_operator.core.decision import Action
from evergrad_operator.core.objects.installation import Installation
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.observe.profiles import RunProfile
from evergrad_operator.core.plan import Deletion

ALLOWED = replace(CONFIG, allow_run_deletion=True)
REFUSAL = "spec.ttlDeletes: Run is not allowed in this installation"


def completed(*, ttl: int | None = 600, config: Any = ALLOWED, **spec: Any) -> Simulation:
    """A complete run whose pods have ended, and for which nothing is left to do before its time to live is
    over."""
    times = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    run = make_run(**times, **{"ttlDeletes": "Run", **spec})
    run["metadata"]["resourceVersion"] = "17"
    world = Simulation(run, config=config).run()
    world.train(100, phase="Complete", reason="Complete")
    for name in world.live():
        world.end(name, 0)
    world.settle()
    world.leave()
    return world


# ---- decision and plan -------------------------------------------------------------------------------------


def test_after_its_time_to_live_the_run_itself_is_deleted_with_both_preconditions() -> None:
    world = completed()
    world.settle()
    world.age(599)
    world.reconcile()
    assert (world.decision.deletes_run, world.is_deleted) == (False, False)
    world.age(1)
    decision = world.reconcile()
    assert (decision.action, decision.deletes_run) == (Action.CLEAN, True)
    run = Deletion("TrainingRun", "docs-lm", "uid-docs-lm", resource_version="17")
    assert world.plan.delete == (run,), "the garbage collector takes the rest"
    assert (world.plan.claim, world.plan.apply, world.plan.create) == (None, (), ())
    assert decision.message == "all 100 steps are done"


@pytest.mark.parametrize("given", [{}, {"ttlDeletes": "Children"}, {"ttlDeletes": None}])
def test_by_default_the_run_stays(given: dict[str, Any]) -> None:
    world = completed(**{"ttlDeletes": None, **given})
    world.age(601)
    world.settle()
    assert not world.is_deleted and world.pods == {}
    assert world.status["phase"] == "Complete"


def test_without_a_time_to_live_nothing_is_deleted() -> None:
    world = completed(ttl=None)
    world.age(1e9)
    world.settle()
    assert not world.is_deleted and ("ConfigMap", "docs-lm-config") in world.children


def test_a_failed_run_is_deleted_too() -> None:
    run = make_run(activeDeadlineSeconds=60, ttlSecondsAfterFinished=600, ttlDeletes="Run")
    world = Simulation(run, config=ALLOWED).run()
    world.age(61)
    assert world.reconcile().phase == Phase.FAILED
    world.leave()
    world.settle()
    assert not world.is_deleted
    world.age(600)
    assert world.reconcile().deletes_run


def test_a_run_that_has_not_ended_is_never_deleted() -> None:
    world = Simulation(
        make_run(ttlSecondsAfterFinished=0, ttlDeletes="Run"), config=ALLOWED
    )
    world.run()
    world.train(50)
    world.age(100)
    world.settle()
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.age(10_000)
    assert world.reconcile().phase == Phase.SUSPENDED
    assert not world.is_deleted


def test_a_failed_run_that_starts_again_is_not_deleted() -> None:
    run = make_run(activeDeadlineSeconds=60, ttlSecondsAfterFinished=600, ttlDeletes="Run")
    world = Simulation(run, config=ALLOWED).run()
    world.age(61)
    world.reconcile()
    world.leave()
    world.settle()
    world.age(601)
    world.set_spec(restartNonce="again")
    assert world.reconcile().action == Action.RUN
    assert not world.is_deleted


@pytest.mark.parametrize("deletes", ["Children", "Run"])
def test_the_end_is_in_status_and_volume_before_the_time_to_live_deletes_anything(
    deletes: str,
) -> None:
    """A regression: a run with a lifetime of 0 left no record, and trained again when it was created
    again."""
    run = make_run(ttlSecondsAfterFinished=0, ttlDeletes=deletes)
    world = Simulation(run, config=ALLOWED).run()
    world.train(100, phase="Complete", reason="Complete")
    for name in world.live():
        world.end(name, 0)
    while world.status.get("phase") != "Complete":
        world.reconcile()
        assert not world.is_deleted, "others may wait for the condition Complete"
    while not world.is_deleted and not world.plan.is_empty:
        world.reconcile()
    assert world.is_deleted == (deletes == "Run")
    claim = world.children["PersistentVolumeClaim", "docs-lm"]
    assert '"complete":' in claim["metadata"]["annotations"]["run.evergrad.dev/docs-lm"]


def test_a_run_is_deleted_only_after_its_claim_has_the_requested_owner() -> None:
    world = completed(storage={"size": "1Gi", "whenDeleted": "Delete"})
    world.users = frozenset({"docs-lm"})
    world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]["creationTimestamp"] = (
        make_run()["metadata"]["creationTimestamp"]
    )
    world.settle()
    assert world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]["ownerReferences"]
    world.set_spec(storage={"size": "1Gi", "whenDeleted": "Retain"})
    world.age(600)
    assert world.reconcile().deletes_run
    assert world.plan.claim is not None and world.plan.delete == ()
    assert "ownerReferences" not in world.plan.claim["metadata"]
    # The API server removes fields that the manager no longer applies.
    claim = world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]
    del claim["ownerReferences"], claim["annotations"]["evergrad.dev/deleted-with"]
    assert world.reconcile().deletes_run
    assert world.is_deleted


# ---- if it is not allowed
# -----------------------------------------------------------------------------------


def test_if_run_deletion_is_disabled_the_webhook_refuses_it_and_names_the_chart_value() -> (
    None
):
    asking, silent = make_run(ttlDeletes="Run"), make_run(ttlDeletes="Children")
    (problem,) = find_problems(asking, None)
    assert str(problem) == (
        f"{REFUSAL}; its operator has no right to delete TrainingRuns. Write Children, or have "
        "runs.allowed.deletion of the chart set."
    )
    assert find_problems(silent, None) == ()
    assert find_problems(asking, silent) == (problem,)
    assert find_problems(asking, None, Installation(deletes_runs=True)) == ()


@pytest.mark.parametrize("is_of_profile", [False, True])
def test_if_run_deletion_is_disabled_no_pod_is_created(is_of_profile: bool) -> None:
    world = Simulation(make_run(**({} if is_of_profile else {"ttlDeletes": "Run"})))
    if is_of_profile:
        world.profile = RunProfile({"ttlDeletes": "Run"})
    decision = world.settle()
    assert (decision.reason, decision.is_blocked) == (Reason.INVALID_SPEC, True)
    assert decision.message.startswith(REFUSAL)
    assert world.created == []


def test_a_run_that_may_no_longer_be_deleted_reports_it_and_only_its_children_are_deleted() -> (
    None
):
    world = completed()
    world.settle()
    world.config = CONFIG
    world.settle()
    assert REFUSAL in world.status["message"]
    assert REFUSAL in world.condition("Ready")["message"]
    world.age(600)
    world.settle()
    assert not world.is_deleted and world.pods == {}
    assert list(world.children) == [("PersistentVolumeClaim", "docs-lm")]
    assert REFUSAL in world.status["message"]


# ---- with a fake API server
# ---------------------------------------------------------------------------------


def over(**spec: Any) -> fake.Simulation:
    """A complete run, an hour before its time to live is over."""
    simulation = fake.Simulation(config=replace(fake.CONFIG, allow_run_deletion=True))
    simulation.create_run(**{"ttlSecondsAfterFinished": 3600, "ttlDeletes": "Run", **spec})
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    for name in simulation.pods():
        simulation.end_pod(name)
    simulation.settle()
    simulation.reap()
    simulation.settle()
    assert simulation.status["phase"] == "Complete"
    simulation.store.writes.clear()
    return simulation


def deletions(simulation: fake.Simulation) -> list[Write]:
    return [
        write
        for write in simulation.store.writes
        if (write.verb, write.plural) == ("delete", "trainingruns")
    ]


def test_the_run_is_deleted_once_and_its_volume_stays() -> None:
    simulation = over()
    simulation.now += 3600
    simulation.is_watch_late = True
    assert simulation.reconcile() is None
    assert simulation.reconcile() is None
    assert len(deletions(simulation)) == 1
    assert simulation.children() == [("persistentvolumeclaims", "run")]
    assert simulation.store.writes == deletions(simulation), "nothing else was written"


def test_no_second_delete_request_is_sent_before_the_watch_shows_the_first() -> None:
    simulation = over()
    simulation.now += 3600
    simulation.store.on_change = lambda *_: None
    for _ in range(3):
        assert simulation.reconcile() is None
    assert len(deletions(simulation)) == 1


def test_a_run_that_a_finalizer_holds_is_not_deleted_again() -> None:
    simulation = over()
    finalizers = {"metadata": {"finalizers": ["example.org/keep"]}}
    with simulation.by_others():
        simulation.store.change("trainingruns", *KEY, finalizers)
    simulation.now += 3600
    for _ in range(3):
        simulation.reconcile()
    simulation.start_operator()
    simulation.settle()
    assert len(deletions(simulation)) == 1


def test_a_run_that_was_edited_in_the_meantime_is_not_deleted() -> None:
    simulation = over()
    simulation.now += 3600
    edit = {"spec": {"ttlDeletes": "Children"}}

    def edit_first(write: Write) -> None:
        if (write.verb, write.plural) == ("delete", "trainingruns"):
            simulation.store.before = lambda write: None
            with simulation.by_others():
                simulation.store.change("trainingruns", *KEY, edit)

    simulation.store.before = edit_first
    assert simulation.reconcile() is not None
    simulation.settle()
    assert deletions(simulation) == []
    assert simulation.status["phase"] == "Complete"


def test_a_namesake_created_in_the_meantime_is_not_deleted() -> None:
    simulation = over()
    simulation.now += 3600
    simulation.store.on_change = lambda *_: None
    simulation.store.remove("trainingruns", *KEY)
    simulation.create_run(ttlSecondsAfterFinished=3600, ttlDeletes="Run")
    simulation.reconcile()
    assert deletions(simulation) == []
    assert simulation.store.get("trainingruns", *KEY)["status"]["observedGeneration"] == -1


def test_a_run_of_another_controller_is_not_deleted() -> None:
    simulation = over()
    manager = {"spec": {"managedBy": "kueue.x-k8s.io/multikueue"}}
    with simulation.by_others():
        simulation.store.change("trainingruns", *KEY, manager)
    simulation.now += 3600
    simulation.reconcile()
    assert simulation.store.writes == []


def test_a_refused_deletion_is_explained_and_retried() -> None:
    simulation = over()
    simulation.now += 3600

    def forbid(write: Write) -> None:
        if (write.verb, write.plural) == ("delete", "trainingruns"):
            raise RefusedError(403, "Forbidden", "a policy keeps this run")

    simulation.store.before = forbid
    delay = simulation.reconcile()
    assert delay is not None
    assert "a policy keeps this run" in simulation.status["message"]
    simulation.store.before = lambda write: None
    simulation.now += 60
    simulation.reconcile()
    assert len(deletions(simulation)) == 1


def test_a_recreated_complete_run_is_complete_without_a_pod_and_deleted_again() -> None:
    simulation = over()
    simulation.now += 3600
    simulation.reconcile()
    simulation.create_run(ttlSecondsAfterFinished=3600, ttlDeletes="Run")
    simulation.settle()
    assert simulation.status["reason"] == "AlreadyComplete"
    assert simulation.pods() == []
    simulation.now += 3599
    simulation.settle()
    assert len(deletions(simulation)) == 1, "it is there as long as one that has trained"
    simulation.now += 1
    simulation.settle()
    assert len(deletions(simulation)) == 2, "as long as somebody makes it anew"
