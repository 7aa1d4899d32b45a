"""``evergrad node``: what is wrong with its arguments is told at once, before anything heavy is imported."""

from pathlib import Path

import pytest

from evergrad_trainer.cli.main import main
from evergrad_trainer.cli.nodes import coordinator_settings
from evergrad_trainer.config.manifest import TrainingRun
from evergrad_trainer.config.script import Script
from evergrad_trainer.node.run import choose_start_method, stop_seconds, with_grace_of
from evergrad_trainer.node.supervisor import NodeSettings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/elastic/trainingrun.yaml"


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["node", str(EXAMPLE), *arguments]) == 64
    return capsys.readouterr().err


@pytest.mark.parametrize("address", ["here", "host:", ":29400", "host:0", "host:70000", "host:port"])
def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert f"--join: '{address}' is not HOST:PORT" in fail(capsys, "--join", address)


def test_every_problem_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = fail(capsys, "--join", "here", "--node", "-1", "--workers", "0", "--token-file", "/nowhere")
    assert [line.split()[1] for line in said.splitlines()] == ["--join:", "--node:", "--workers:", "--token-file:"]


def test_a_node_needs_the_runs_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--token-file: is missing. Give the file that evergrad run prints." in fail(capsys, "--join", "127.0.0.1:29400")


def test_a_host_that_is_not_known_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    assert "--join: nowhere.invalid cannot be reached" in fail(
        capsys, "--join", "nowhere.invalid:29400", "--token-file", str(token)
    )


@pytest.mark.parametrize(
    ("arguments", "path"),
    [(["--nodes", "0"], "--nodes"), (["--chaos", "7"], "--chaos"), (["--nodes", "2", "--workers", "0"], "--workers")],
)
def test_a_run_of_impossible_nodes_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], path: str) -> None:
    assert main(["run", str(EXAMPLE), *arguments]) == 64
    assert f"error: {path}: " in capsys.readouterr().err


def test_workers_are_forked_unless_something_forbids_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_start_method("auto", num_accelerators=0) == "fork"
    assert choose_start_method("forkserver", num_accelerators=8) == "forkserver"
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert choose_start_method("auto", num_accelerators=1) == "spawn"
    assert "has touched an accelerator" in caplog.text


def test_a_forked_process_that_cannot_use_the_accelerator_is_found_out(
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
def test_a_script_leaves_by_itself_a_moment_before_it_would_be_killed(grace: int, seconds: float) -> None:
    assert stop_seconds(grace) == seconds


def test_a_node_and_a_local_coordinator_wait_for_a_script_that_takes_long_to_save(tmp_path: Path) -> None:
    settings = NodeSettings("r", "0", "127.0.0.1", 1, "127.0.0.1", "fresh", tmp_path)
    assert with_grace_of(script_of(600), settings).grace_seconds == 600
    assert with_grace_of(script_of(5), settings).grace_seconds == settings.grace_seconds
    for grace, limits in ((30, ()), (600, ("--soft-limit", "610"))):
        spec = {"nodes": {"min": 1}, "script": {"command": ["train.py"], "gracePeriodSeconds": grace}}
        manifest = {"apiVersion": "evergrad.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}, "spec": spec}
        found = coordinator_settings(TrainingRun.model_validate(manifest), tmp_path, num_nodes=1, recovery="fresh")
        assert found.extra == ("--hold-joins", *limits)
