"""What all end-to-end tests share: a cluster, the operator installed by Helm, a namespace each, an undisturbed local run."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bed.fixtures import cluster, faults  # noqa: F401 - fixtures

# The suite imports tests by path, so that helpers must be put where an ordinary import finds them.
for _name in ("cluster_runs", "installed_operator"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
        assert _spec is not None and _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])

_CLASSES = [
    {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": f"evergrad-e2e-{name}"}, "value": value}
    for name, value in (("low", -10), ("high", 1000))
]


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes] | None]]:
    """The undisturbed run, begun early so that it trains while the cluster starts, or the one EVERGRAD_E2E_REFERENCE names."""
    import cluster_runs

    if kept := os.environ.get("EVERGRAD_E2E_REFERENCE"):
        yield Path(kept), None
        return
    folder = tmp_path_factory.mktemp("reference")
    process = cluster_runs.start_locally(folder, steps=cluster_runs.STEPS)
    yield folder, process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture(scope="session")
def reference(local_run: tuple[Path, subprocess.Popen[bytes] | None]) -> Any:
    """Step → the row that the undisturbed run wrote."""
    import cluster_runs

    folder, process = local_run
    assert process is None or process.wait(600) == 0, (folder / "log").read_text()
    return cluster_runs.last_rows(cluster_runs.read_rows(folder / "run/metrics.jsonl"))


@pytest.fixture(scope="session")
def operator(local_run: Any, cluster: Any) -> Iterator[Any]:  # noqa: F811
    """The operator as a user installs it: images, Helm chart, CRD."""
    del local_run
    import installed_operator

    one = installed_operator.install(cluster)
    yield one
    one.close()


@pytest.fixture
def runs(cluster: Any, operator: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:  # noqa: F811
    """A namespace of this test's own that enforces the restricted Pod Security profile, with documents to train on."""
    import cluster_runs

    del operator
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "evergrad.dev/test": re.sub("[^a-z0-9_]", "", request.node.name)[:60].strip("_"),
    }
    runs = cluster_runs.Runs(cluster, name, tmp_path)
    objects = [
        *_CLASSES,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
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


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Remember that a test failed, so that its namespace is described before it goes."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report
