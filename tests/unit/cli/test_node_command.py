"""``evergrad node``: errors in its arguments are reported before slow imports."""

import errno
import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evergrad_cli.main import main
from evergrad_common.contract import ErrorKind, decode_termination
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.envelope.script import Script
from evergrad_manifest.errors import InputError, Problem
from evergrad_trainer.base.host_errors import describe_host_trouble
from evergrad_trainer.commands import node, pod
from evergrad_trainer.commands.nodes import coordinator_settings
from evergrad_trainer.node.run import choose_start_method
from evergrad_trainer.node.script_node import stop_seconds, with_grace_of
from evergrad_trainer.node.settings import NodeSettings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/elastic/trainingrun.yaml"


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A node that is about to serve pauses garbage collection, but this process continues."""
    yield
    gc.enable()


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["node", str(EXAMPLE), *arguments]) == 64
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    ["here", "host:", ":29400", "host:0", "host:70000", "host:port", "::1:29400", "[::1]"],
)
def test_an_invalid_join_address_is_refused(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert f"--join: '{address}' is not HOST:PORT" in fail(capsys, "--join", address)


def test_all_problems_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    said = fail(
        capsys,
        "--join",
        "here",
        "--node",
        "-1",
        "--workers",
        "0",
        "--token-file",
        "/nowhere",
    )
    assert [line.split()[1] for line in said.splitlines()] == [
        "--join:",
        "--node:",
        "--workers:",
        "--token-file:",
    ]


def test_a_node_needs_the_token_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--token-file: is missing. Give the file that evergrad run prints." in fail(
        capsys, "--join", "127.0.0.1:29400"
    )


def test_an_unknown_host_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    assert "--join: nowhere.invalid cannot be reached" in fail(
        capsys, "--join", "nowhere.invalid:29400", "--token-file", str(token)
    )


def start_node(tmp_path: Path, *arguments: str) -> tuple[int, tuple[ErrorKind | None, str]]:
    """Return exit code and termination message of a node that is refused permanently."""
    (tmp_path / "token").write_text("secret")
    log = tmp_path / "last-words"
    common = [
        "--join",
        "127.0.0.1:1",
        "--address",
        "127.0.0.1",
        "--token-file",
        str(tmp_path / "token"),
    ]
    code = main(["node", str(EXAMPLE), *common, "--termination-log", str(log), *arguments])
    return code, decode_termination(log.read_text())


def test_an_unwritable_run_directory_is_retried_and_then_a_host_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pod, "HOST_PAUSES", (0.0, 0.0))
    # Even root cannot create a directory there.
    code, (kind, text) = start_node(tmp_path, "--run-directory", "/sys/evergrad/run")
    assert (code, kind) == (70, ErrorKind.ENVIRONMENT)
    assert f"host {socket.gethostname()}: /sys/evergrad" in text
    assert capsys.readouterr().err.count("Tried again in 0 s.") == 2


def test_a_mistake_in_the_file_is_a_user_error_without_retry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pod, "HOST_PAUSES", (3600.0,))
    directory = str(tmp_path / "run")
    code, (kind, text) = start_node(
        tmp_path,
        "--run-directory",
        directory,
        "--set",
        "spec.training.data.sources[0].path=nowhere",
    )
    assert (code, kind) == (64, ErrorKind.INPUT)
    assert "does not exist" in text


def test_a_host_that_recovers_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pod, "HOST_PAUSES", (0.0, 0.0))
    troubles = [
        OSError(errno.ESTALE, "stale"),
        InputError(
            Problem("memory", "too little", is_of_host=True),
            Problem("disk", "too little", is_of_host=True),
        ),
    ]

    def prepare(request: node.NodeRequest) -> Callable[[], int]:
        if troubles:
            raise troubles.pop()
        return lambda: 0

    monkeypatch.setattr(node, "_prepare", prepare)
    (tmp_path / "token").write_text("secret")
    place = ["--join", "127.0.0.1:1", "--address", "127.0.0.1"]
    token = ["--token-file", str(tmp_path / "token")]
    assert main(["node", str(EXAMPLE), *place, *token]) == 0


def test_a_host_fault_after_the_preparation_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def serve() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(node, "_prepare", lambda request: serve)
    code, (kind, text) = start_node(tmp_path)
    assert (code, kind) == (70, ErrorKind.ENVIRONMENT)
    assert "Cannot allocate memory" in text


@pytest.mark.parametrize(
    ("problems", "is_of_host"),
    [([True], True), ([True, True], True), ([True, False], False), ([False], False)],
)
def test_one_user_error_among_host_faults_is_a_user_error(
    problems: list[bool], is_of_host: bool
) -> None:
    error = InputError(*(Problem("x", "y", is_of_host=one) for one in problems))
    assert (describe_host_trouble(error) is not None) == is_of_host


def test_a_pod_that_sees_none_of_its_accelerators_is_a_host_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pod, "HOST_PAUSES", ())
    monkeypatch.setattr(
        "evergrad_trainer.distributed.process_groups.count_accelerators", lambda: 0
    )
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    limits = (
        "--set",
        'spec.resources={"limits": {"nvidia.com/gpu": 1}}',
        "--set",
        "spec.training.runtime.device=auto",
    )
    code, (kind, text) = start_node(
        tmp_path, "--run-directory", str(tmp_path / "run"), *limits
    )
    assert (code, kind) == (70, ErrorKind.ENVIRONMENT)
    assert (
        "no accelerator is visible; spec.resources.limits asks for nvidia.com/gpu" in text
    )


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--chaos", "7"], "--chaos"),
        (["--nodes", "2", "--workers", "0"], "--workers"),
    ],
)
def test_invalid_node_bounds_of_a_run_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], path: str
) -> None:
    assert main(["run", str(EXAMPLE), *arguments]) == 64
    assert f"error: {path}: " in capsys.readouterr().err


def test_workers_are_forked_unless_an_accelerator_or_setting_forbids_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_start_method("auto", num_accelerators=0) == "fork"
    assert choose_start_method("forkserver", num_accelerators=8) == "forkserver"
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert choose_start_method("auto", num_accelerators=1) == "spawn"
    assert "has touched an accelerator" in caplog.text


def test_a_forked_process_that_cannot_use_the_accelerator_is_detected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.zeros", fail)
    assert choose_start_method("auto", num_accelerators=1) == "spawn"
    assert "a forked process cannot use the accelerator here" in caplog.text


def script_of(grace: int) -> Script:
    return Script.model_validate({"command": ["train.py"], "gracePeriodSeconds": grace})


@pytest.mark.parametrize(("grace", "seconds"), [(0, 0), (5, 4.5), (30, 29), (600, 599)])
def test_the_grace_time_of_a_script_ends_shortly_before_it_would_be_killed(
    grace: int, seconds: float
) -> None:
    assert stop_seconds(grace) == seconds


def test_a_node_and_a_local_coordinator_wait_for_a_script_that_saves_slowly(
    tmp_path: Path,
) -> None:
    settings = NodeSettings("r", "0", "127.0.0.1", 1, "127.0.0.1", "fresh", tmp_path)
    assert with_grace_of(script_of(600), settings).grace_seconds == 600
    assert with_grace_of(script_of(5), settings).grace_seconds == settings.grace_seconds
    for grace, limits in ((30, ()), (600, ("--soft-limit", "610"))):
        spec = {
            "nodes": {"min": 1},
            "script": {"command": ["train.py"], "gracePeriodSeconds": grace},
        }
        manifest = {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "r"},
            "spec": spec,
        }
        found = coordinator_settings(
            TrainingRun.model_validate(manifest), tmp_path, num_nodes=1, recovery="fresh"
        )
        assert found.extra == ("--hold-joins", *limits)
