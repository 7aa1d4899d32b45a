"""The operator is upgraded from the first release, rolled back, uninstalled and installed twice, while runs
train.

For checks of the chart without a cluster, see tests/unit/repository/test_earlier_release.py.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_runs import ENDLESS, RESOURCE, Reference, Run, Runs, wait_for
from installed_operator import RELEASE, Operator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
FIRST_COMMIT, FIRST_TAG = "05accba", "v0.1.0"
FIRST_CHART = ROOT / "tests/earlier/evergrad-0.1.0.tgz"
CRD = "trainingruns.evergrad.dev"
NARROW = ("crds.install=false", "rbac.scope=namespaced", "rbac.aggregatedRoles=false")
"""An installation that needs nothing outside of its namespace."""


def uids(run: Run) -> dict[str, str]:
    """Return the uid of all its pods by name."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for role in ("node", "coordinator")
        for pod in run.pods(role=role)
    }


def start(runs: Runs, name: str) -> Run:
    run = runs.start(name, steps=ENDLESS)
    run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    return run


def expect_undisturbed(run: Run, pods: dict[str, str]) -> None:
    """Check that the same pods train twenty more steps without repeating any."""
    run.wait_for_step(run.newest_step() + 20)
    assert uids(run) == pods
    assert run.repeated_steps() == 0


def expect_reported(run: Run) -> None:
    """Check that the current operator reads the run and reports its progress."""
    step = run.newest_step()
    wait_for(
        lambda: run.status().get("progress", {}).get("step", -1) >= step,
        f"{run.name}: a status of step {step} or later",
    )


def fields_of_crd(operator: Operator) -> Any:
    """Return the schema of the run's training, as stored by the API server."""
    found = json.loads(operator.kubectl("get", "crd", CRD, "--output", "json"))
    return found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]


def fields_of_tree() -> Any:
    """Return the same schema of this tree."""
    crd = yaml.safe_load((ROOT / "crds/trainingrun.yaml").read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]


@pytest.fixture(scope="module")
def first(cluster: Any, operator: Operator) -> Operator:
    """The first release under the name of the session's operator, not installed; its images are loaded."""
    if not cluster.is_bed:
        pytest.skip("The first release's images are built for the bed only.")
    operator_image, trainer_image = cluster.earlier_images(FIRST_COMMIT, tag=FIRST_TAG)
    return dataclasses.replace(
        operator, operator_image=operator_image, trainer_image=trainer_image
    )


@contextlib.contextmanager
def restored_afterwards(operator: Operator) -> Iterator[None]:
    """Restore the session's operator after the block in any case."""
    try:
        yield
    finally:
        operator.upgrade()
        operator.wait_until_ready()


@pytest.mark.long
@pytest.mark.operator_ends
@pytest.mark.operator_errors(".")  # errors of the first release are not judged here
def test_a_run_of_the_first_release_trains_through_an_upgrade_and_its_rollback(
    first: Operator, runs: Runs, operator: Operator
) -> None:
    with restored_afterwards(operator):
        first.upgrade(chart=FIRST_CHART)
        first.wait_until_ready()
        before_upgrade = fields_of_crd(first)
        assert sorted(before_upgrade) != sorted(fields_of_tree())
        run = start(runs, "veteran")
        pods = uids(run)

        operator.upgrade()
        operator.wait_until_ready()
        assert sorted(fields_of_crd(operator)) == sorted(fields_of_tree())
        expect_undisturbed(run, pods)
        expect_reported(run)

        # Rolled back: the earlier operator and definition, the same pods.
        first.helm("rollback", RELEASE, "--wait", "--timeout", "300s")
        first.wait_until_ready()
        assert fields_of_crd(first) == before_upgrade
        expect_undisturbed(run, pods)
        expect_reported(run)

    # Upgraded again: a lost node is replaced as before.
    expect_undisturbed(run, pods)
    expect_reported(run)
    runs.kubectl("delete", "pod", run.live_pods()[1]["metadata"]["name"], "--wait=false")
    run.wait_for_attempt(1, 1)
    run.wait_for_world(2)
    run.wait_for_step(run.newest_step() + 20)


@pytest.mark.long
@pytest.mark.operator_ends
@pytest.mark.operator_errors(".")
def test_a_run_of_this_release_trains_under_the_rolled_back_first_release(
    first: Operator, runs: Runs, operator: Operator, reference: Reference
) -> None:
    run = start(runs, "newer")
    pods = uids(run)
    with restored_afterwards(operator):
        first.upgrade(chart=FIRST_CHART)
        first.wait_until_ready()
        expect_undisturbed(run, pods)
    expect_undisturbed(run, pods)
    expect_reported(run)
    run.expect_same_as(reference)


@pytest.mark.long
@pytest.mark.operator_ends
def test_a_run_trains_without_its_operator_and_the_next_installation_takes_it_over(
    runs: Runs, operator: Operator, reference: Reference
) -> None:
    run = start(runs, "left")
    pods = uids(run)
    with restored_afterwards(operator):
        operator.helm("uninstall", RELEASE, "--wait", "--cascade", "foreground")
        assert operator.pods() == []
        crd = json.loads(operator.kubectl("get", "crd", CRD, "--output", "json"))
        assert "deletionTimestamp" not in crd["metadata"]
        expect_undisturbed(run, pods)
    expect_undisturbed(run, pods)
    expect_reported(run)
    run.expect_same_as(reference)


@contextlib.contextmanager
def installed(operator: Operator, *namespaces: str) -> Iterator[list[Operator]]:
    """A separate release in each namespace, which serves this namespace; all are installed at the same
    time."""
    ones = [dataclasses.replace(operator, namespace=name) for name in namespaces]
    try:
        with ThreadPoolExecutor(len(ones)) as pool:
            for done in [pool.submit(one.upgrade, settings=NARROW) for one in ones]:
                done.result()
        yield ones
    finally:
        for one in ones:
            if RELEASE in one.helm("list", "--short").split():
                one.helm("uninstall", RELEASE, "--wait")


@pytest.mark.long
@pytest.mark.operator_ends
def test_two_installations_each_serve_one_namespace_and_are_removed_one_by_one(
    runs: Runs, other_runs: Runs, operator: Operator, reference: Reference
) -> None:
    # The session's operator serves all namespaces, and no run may have two operators.
    with operator.gone(), installed(operator, runs.namespace, other_runs.namespace) as ones:
        one, other = start(runs, "same"), start(other_runs, "same")
        expect_reported(one)
        expect_reported(other)
        for served, unserved in zip(ones, reversed(ones), strict=True):
            assert unserved.namespace not in served.logs()

        # One of them is uninstalled: its run continues to train, and the other is served as before.
        pods, other_pods = uids(one), uids(other)
        ones[0].helm("uninstall", RELEASE, "--wait", "--cascade", "foreground")
        expect_undisturbed(one, pods)
        expect_undisturbed(other, other_pods)
        other_runs.kubectl(
            "delete", "pod", other.live_pods()[1]["metadata"]["name"], "--wait=false"
        )
        other.wait_for_attempt(1, 1)
        other.wait_for_world(2)
        assert uids(one) == pods

        # An installation of the same name takes it over again.
        ones[0].upgrade(settings=NARROW)
        expect_undisturbed(one, pods)
        expect_reported(one)
        for where, run in ((runs, one), (other_runs, other)):
            run.expect_same_as(reference)
            # Each installation has its own key, so the session's operator could not poll their coordinators.
            where.kubectl("delete", RESOURCE, run.name, "--wait=true")
            wait_for(lambda run=run: not uids(run), "the end of its pods")
