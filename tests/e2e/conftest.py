"""Fixtures of all end-to-end tests: a cluster, the operator installed by Helm, one namespace per test, an
undisturbed local run, and a check of the operator after every test."""

import contextlib
import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bed.fixtures import cluster, faults  # noqa: F401 - fixtures

_CLASSES = [
    {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": f"evergrad-e2e-{name}"},
        "value": value,
    }
    for name, value in (("low", -10), ("high", 1000))
]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The undisturbed run, started early so that it trains while the cluster starts."""
    import cluster_runs

    one = cluster_runs.Reference(tmp_path_factory.mktemp("reference"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def operator(reference: Any, cluster: Any) -> Iterator[Any]:  # noqa: F811
    """The operator as a user installs it: images, Helm chart, CRD."""
    import installed_operator

    reference.hold()
    one = installed_operator.install(cluster)
    yield one
    one.close()


@pytest.fixture(scope="session")
def operator_watch(operator: Any) -> Any:
    """The previous check of the operator."""
    import operator_watch

    watch = operator_watch.OperatorWatch(operator)
    watch.look()
    return watch


_IS_UNWATCHED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _operator_stays_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no container of the operator restarted, no unexpected error in its log.

    See operator_watch.py.
    """
    if "operator" not in request.fixturenames:
        yield
        # Tests of the bed itself kill its API server, with or without a running operator.
        request.session.stash[_IS_UNWATCHED] = True
        return
    watch = request.getfixturevalue("operator_watch")
    one = request.getfixturevalue("operator")
    # If a module installs or restores the operator, the previous operator ends; no test of the module caused
    # this.
    if one.is_changed or request.session.stash.get(_IS_UNWATCHED, False):
        one.wait_for_rollout()
        watch.look()
        one.is_changed = request.session.stash[_IS_UNWATCHED] = False
    yield
    request.getfixturevalue("operator").wait_until_ready()
    patterns = [
        pattern
        for mark in request.node.iter_markers("operator_errors")
        for pattern in mark.args
    ]
    may_end = request.node.get_closest_marker("operator_ends") is not None
    unexpected = watch.look().without(patterns, may_end=may_end)
    assert not unexpected, "the operator did not stay well:\n" + "\n".join(unexpected)


@contextlib.contextmanager
def _open_runs(
    cluster: Any,  # noqa: F811
    request: pytest.FixtureRequest,
    scratch: Path,
) -> Iterator[Any]:
    """A namespace that enforces the restricted Pod Security profile, with documents to train on."""
    import cluster_runs

    name = f"e2e-{uuid.uuid4().hex[:8]}"
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "evergrad.dev/test": re.sub("[^a-z0-9_]", "", request.node.name)[:60].strip("_"),
    }
    runs = cluster_runs.Runs(cluster, name, scratch)
    objects = [
        *_CLASSES,
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "documents", "namespace": name},
            "data": {"documents.jsonl": cluster_runs.documents()},
        },
    ]
    for one in objects:
        runs.kubectl("apply", "--server-side", "-f", "-", text=json.dumps(one))
    yield runs
    if request.node.stash.get(_FAILED, False):
        print(runs.describe())
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        runs.remove()


@pytest.fixture
def runs(
    cluster: Any,  # noqa: F811
    operator: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Any]:
    """A namespace of one test."""
    del operator
    with _open_runs(cluster, request, tmp_path) as one:
        yield one


@pytest.fixture
def other_runs(
    cluster: Any,  # noqa: F811
    operator: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Any]:
    """A second namespace of the same test."""
    del operator
    (tmp_path / "other").mkdir()
    with _open_runs(cluster, request, tmp_path / "other") as one:
        yield one


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Record that a test failed, so that its namespace is described before it is deleted."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report
