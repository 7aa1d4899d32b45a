"""A bed leaves no traces, however it ends. Uses its own bed, because another may be up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

import bed
from bed import places
from bed.api import Api, ApiError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
NUMBER = "1"
KUBECONFIG = places.REPOSITORY / f".cluster{NUMBER}" / "kubeconfig"
STATE = places.STATES / f"bed{NUMBER}" / "state.json"
ENVIRONMENT = {
    **os.environ,
    "EVERGRAD_BED": NUMBER,
    "PYTHONPATH": os.pathsep.join(
        str(places.REPOSITORY / name) for name in ("tools", "tests")
    ),
    "PYTHONSAFEPATH": "1",
}

# An `up` that reports when it reaches a function of the bed, and pauses there until a signal ends it.
HELD_UP = """
import signal, sys
from importlib import import_module

from bed.__main__ import main

module, name = sys.argv.pop(1).split(":")

def stand_still(*_, **__):
    print("stands still", flush=True)
    signal.pause()

# A shell starts what runs in its background with this signal ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
setattr(import_module(module), name, stand_still)
sys.exit(main())
"""
# The place before any process runs, places with some processes, and the last before the bed counts as
# complete.
PLACES = (
    "bed.pki:write",
    "bed.control_plane:start_apiserver",
    pytest.param("bed.node:start_kubelet", marks=pytest.mark.long),
    "bed.node:is_ready",
)

Found = dict[str, set[str]]
_STARTED: list["subprocess.Popen[str]"] = []


@pytest.fixture
def _no_bed() -> Iterator[None]:
    """No bed exists before a test and after it, even if the test failed midway: a remaining bed would fail
    the next test."""
    reason = bed.unavailable()
    if reason:
        pytest.skip(reason)
    command("down")
    yield
    for process in _STARTED:
        with process:
            process.kill()
    _STARTED.clear()
    command("down")


def start(*words: str) -> "subprocess.Popen[str]":
    return _start("-m", "bed", *words)


def start_held_up(place: str) -> "subprocess.Popen[str]":
    """Start an `up` that pauses at a place; returns when it pauses."""
    process = _start("-c", HELD_UP, place, "up")
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line == "stands still\n":
            return process
    raise AssertionError(f"`up` ended before {place}: {''.join(said)}")


def _start(*arguments: str) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    line = [sys.executable, *arguments]
    process = subprocess.Popen(
        line, env=ENVIRONMENT, stdin=subprocess.DEVNULL, text=True, **pipes
    )
    _STARTED.append(process)
    return process


def command(*words: str) -> str:
    process = start(*words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def look() -> Found:
    """Return everything of every kind at this moment."""
    line = [sys.executable, str(Path(__file__).with_name("leftovers.py"))]
    result = subprocess.run(
        line, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return {name: set(entries) for name, entries in json.loads(result.stdout).items()}


def added(before: Found) -> Found:
    """Return what exists now and did not exist before, without empty kinds. A sysctl is included with its
    value."""
    now = look()
    return {name: now[name] - before[name] for name in now if now[name] - before[name]}


def wait_until(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so after a long while"
        time.sleep(0.05)


def assert_nothing_was_added(before: Found) -> None:
    """Wait for a while, because the first process of the machine may reap late, and it is not ours."""
    deadline = time.monotonic() + PATIENCE
    while (found := added(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == {}


@pytest.mark.usefixtures("_no_bed")
def test_a_bed_leaves_nothing_and_adds_only_one_link_and_routes_while_it_is_up() -> None:
    before = look()
    command("up")
    visible = added(before)
    assert visible["links"] == {f"bed{NUMBER}"}
    assert not {"mounts", "iptables", "nftables", "loop devices"} & set(visible)
    assert all(f"bed{NUMBER}" in route for route in visible["routes"])
    assert len(Api(KUBECONFIG).get("/api/v1/nodes")["items"]) == 2
    assert "up already" in command("up")
    command("down")
    assert_nothing_was_added(before)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("_no_bed")
def test_an_interrupted_up_leaves_nothing_after_down(place: str) -> None:
    before = look()
    process = start_held_up(place)
    process.kill()
    process.wait()
    assert "down after" in command("down")
    assert_nothing_was_added(before)


@pytest.mark.usefixtures("_no_bed")
def test_a_second_up_names_the_running_process_and_an_interrupted_up_cleans_up_itself() -> (
    None
):
    before = look()
    first = start_held_up(PLACES[-1])
    second = start("up")
    said, _ = second.communicate()
    assert second.returncode == 1
    assert f"Another `up` or `down` of the bed is at work (pid {first.pid})" in said
    assert KUBECONFIG.exists()
    first.send_signal(signal.SIGINT)
    first.communicate()
    assert first.returncode == 130
    assert not STATE.exists()
    assert_nothing_was_added(before)


@pytest.mark.long
@pytest.mark.usefixtures("_no_bed")
def test_the_scale_profile_runs_pods_without_nodes_and_leaves_nothing() -> None:
    before = look()
    command("up", "--profile", "kwok")
    api = Api(KUBECONFIG)
    capacity = {"cpu": "32", "memory": "64Gi", "pods": "110"}
    metadata = {"name": "fake-1", "annotations": {"kwok.x-k8s.io/node": "fake"}}
    api.create(
        "/api/v1/nodes",
        {"metadata": metadata, "status": {"capacity": capacity, "allocatable": capacity}},
    )
    pods = "/api/v1/namespaces/default/pods"
    pod = {
        "metadata": {"name": "one"},
        "spec": {"containers": [{"name": "main", "image": "localhost/none:1"}]},
    }
    wait_until(lambda: _is_created(api, pods, pod))
    wait_until(lambda: api.get(f"{pods}/one")["status"]["phase"] == "Running")
    api.delete(f"{pods}/one")
    wait_until(lambda: not api.is_there(f"{pods}/one"))
    command("down")
    assert_nothing_was_added(before)


def _is_created(api: Api, path: str, body: dict[str, object]) -> bool:
    try:
        api.create(path, body)
    except ApiError as error:
        return error.reason == "AlreadyExists"
    return True
