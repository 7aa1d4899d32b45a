"""Commands that accept a run directory of this machine in place of the name of a run on a cluster."""

import errno
import json
import re
import time
from pathlib import Path

import pytest

from evergrad_cli.cluster.commands.open import build_port_error
from evergrad_cli.main import KNOWN_VARIABLES, find_unknown_variables, main


def write_run(directory: Path, *, steps: int, saved: int | None) -> Path:
    """Write the files of a run that has trained ``steps`` of 20 steps and is still running."""
    directory.mkdir(parents=True)
    now = time.time()
    events = [
        {
            "type": "start",
            "time": now - 60,
            "run": "docs-lm",
            "total_steps": 20,
            "world_size": 2,
            "generation": 1,
            "step": 0,
        }
    ]
    if saved is not None:
        events.append(
            {
                "type": "save",
                "time": now - 5,
                "checkpoint": f"step-{saved}",
                "generation": 1,
                "step": saved,
            }
        )
    rows = [
        {"step": step, "time": now - 50 + step, "generation": 1, "world_size": 2, "loss": 4.5 - step / 10, "tokens": 512, "step_seconds": 0.5}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    for name, lines in (("events", events), ("metrics", rows)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text, "utf-8")
    return directory


def test_status_of_a_run_directory_shows_the_local_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "runs/docs-lm", steps=8, saved=5)
    assert main(["status", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Phase: +Running$", shown, re.M)
    assert re.search(r"^Progress: +step 8/20 \(40 %\)$", shown, re.M)
    # Steps that end one second apart: the throughput is by wall time, not by the seconds of the step.
    assert re.search(r"^ +loss 3\.7000 {2}512 tokens/s {2}ETA 12", shown, re.M)
    assert re.search(r"^Checkpoint: +step 5$", shown, re.M)
    assert f"touch {directory}/stop" in shown

    assert main(["status", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpointStep"] == 5


def test_status_of_a_run_without_saves_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", steps=0, saved=None)
    assert main(["status", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Checkpoint: +none yet$", shown, re.M)
    assert "Progress" not in shown


@pytest.mark.parametrize("command", ["open", "status"])
def test_a_missing_directory_is_reported_with_the_nearest_name(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs/docs-lm").mkdir(parents=True)
    wrong = tmp_path / "runs/docs-ml"
    assert main([command, str(wrong)]) == 64
    said = capsys.readouterr().err
    assert f"{wrong}: no such directory exists on this machine" in said
    assert f"Did you mean {tmp_path / 'runs/docs-lm'}?" in said
    assert "is not a TrainingRun" not in said


@pytest.mark.parametrize("command", ["open", "status"])
def test_a_directory_without_a_run_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 64
    assert "it has no events.jsonl" in capsys.readouterr().err


def test_a_run_directory_given_to_a_cluster_command_is_not_reported_as_a_wrong_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["logs", "runs/nosuch"])
    assert refused.value.code == 64
    assert "no such directory exists on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EADDRINUSE, "another process listens on it"),
        (errno.EACCES, "ports below 1024 need the rights of root"),
        (errno.ENOBUFS, "no buffer space available"),
    ],
)
def test_an_unusable_port_is_explained_without_an_errno(number: int, reason: str) -> None:
    (problem,) = build_port_error(80, OSError(number, "raw")).problems
    assert str(problem) == (
        f"--port: 80 cannot be used; {reason}. "
        "Choose another port, or leave --port out for any free one."
    )


def test_an_unknown_evergrad_variable_is_reported_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERGRAD_TOKEN_FIEL", "x")
    with pytest.raises(SystemExit):
        main(["--version"])
    said = capsys.readouterr().err
    assert (
        "warning: the environment variable EVERGRAD_TOKEN_FIEL is not known. "
        "Did you mean EVERGRAD_TOKEN_FILE?" in said
    )


def test_variables_that_kubernetes_sets_for_a_service_are_not_reported_in_a_pod() -> None:
    service = {"EVERGRAD_WEBHOOK_PORT": "443", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert find_unknown_variables(service) == []
    assert len(find_unknown_variables({"EVERGRAD_RUN_DIR": "/x"})) == 1


def test_every_variable_that_a_package_reads_is_known() -> None:
    root = Path(__file__).resolve().parents[3]
    read = set()
    for package in ("trainer_image", "latent_edit", "cli", "coordinator", "manifest"):
        for file in (root / package).rglob("*.py"):
            read.update(re.findall(r"\"(EVERGRAD_[A-Z_]*[A-Z])\"", file.read_text("utf-8")))
    assert len(read) >= 9
    assert [name for name in sorted(read) if not name.startswith(KNOWN_VARIABLES)] == []
