"""The bed comes and goes without a trace, however it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import bed
import pytest
from bed import boxes, state, toolbox
from bed.api import Api, ApiError
from bed.places import HOST_ADDRESS, KUBECONFIG, REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # the first run may build Kubernetes


@pytest.fixture(scope="module")
def leftovers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leftovers", Path(__file__).with_name("leftovers.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def _nothing_is_up() -> Iterator[None]:
    reason = bed.unavailable()
    if reason:
        pytest.skip(reason)
    if bed.Bed.is_up():
        pytest.skip("A bed is up (make cluster) and stays; this test begins with none. Take it down to run it: make cluster-down")
    command("down")
    for name in (*toolbox.NEEDED["full"], *toolbox.NEEDED["kwok"]):
        toolbox.build(name)
    yield
    command("down")


def start(*words: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), "PYTHONSAFEPATH": "1"}
    line = [sys.executable, "-m", "bed", *words]
    return subprocess.Popen(
        line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def command(*words: str) -> str:
    with start(*words) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_nothing_was_added(leftovers: ModuleType, before: dict[str, set[str]]) -> None:
    """At the latest after a while: the machine's first process may reap late, and it is not ours."""
    deadline = time.monotonic() + 15
    while leftovers.added(before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers.added(before) == {}


@pytest.mark.usefixtures("_nothing_is_up")
def test_a_bed_that_was_up_leaves_nothing_and_shows_only_one_link_and_routes_meanwhile(leftovers: ModuleType) -> None:
    before = leftovers.snapshot()
    command("up")
    visible = leftovers.added(before)
    assert visible["links"] == {"bed0"}
    assert not {"mounts", "iptables", "nftables"} & set(visible)
    assert all("10.96." in route or "10.100." in route or "10.244." in route or "bed0" in route for route in visible["routes"])
    assert HOST_ADDRESS in "".join(visible["routes"])
    assert len(Api(KUBECONFIG).get("/api/v1/nodes")["items"]) == 2
    assert "up already" in command("up")
    command("down")
    assert_nothing_was_added(leftovers, before)


@pytest.mark.parametrize("seconds", [0.2, 1, 3, 6])
@pytest.mark.usefixtures("_nothing_is_up")
def test_an_up_that_is_killed_half_way_leaves_nothing_after_down(leftovers: ModuleType, seconds: float) -> None:
    before = leftovers.snapshot()
    with start("up") as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    said = command("down")
    assert "down after" in said
    assert_nothing_was_added(leftovers, before)


@pytest.mark.usefixtures("_nothing_is_up")
def test_a_second_up_says_who_is_at_work_and_an_interrupted_one_cleans_up_itself(leftovers: ModuleType) -> None:
    before = leftovers.snapshot()
    with start("up") as first:
        wait_until(state.exists)
        with start("up") as second:
            said, _ = second.communicate()
        assert second.returncode == 1
        assert f"Another `up` or `down` of the bed is at work (pid {first.pid})" in said
        wait_until(lambda: boxes.is_up(boxes.CONTROL))
        first.send_signal(signal.SIGINT)
        first.communicate()
    assert first.returncode == 130
    assert_nothing_was_added(leftovers, before)


@pytest.mark.usefixtures("_nothing_is_up")
def test_the_profile_for_scale_runs_pods_without_nodes_and_leaves_nothing(leftovers: ModuleType) -> None:
    before = leftovers.snapshot()
    command("up", "--profile", "kwok")
    api = Api(KUBECONFIG)
    capacity = {"cpu": "32", "memory": "64Gi", "pods": "110"}
    metadata = {"name": "fake-1", "annotations": {"kwok.x-k8s.io/node": "fake"}}
    api.create("/api/v1/nodes", {"metadata": metadata, "status": {"capacity": capacity, "allocatable": capacity}})
    pod = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "main", "image": "localhost/none:1"}]}}
    wait_until(lambda: _created(api, pod))
    wait_until(lambda: api.get("/api/v1/namespaces/default/pods/one")["status"]["phase"] == "Running")
    api.delete("/api/v1/namespaces/default/pods/one")
    wait_until(lambda: not api.is_there("/api/v1/namespaces/default/pods/one"))
    command("down")
    assert_nothing_was_added(leftovers, before)


def _created(api: Api, pod: dict[str, object]) -> bool:
    try:
        api.create("/api/v1/namespaces/default/pods", pod)
    except ApiError as error:
        return error.reason == "AlreadyExists"
    return True
