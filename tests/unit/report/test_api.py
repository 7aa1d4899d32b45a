"""A run's report as a value of Python, and the public form of paths."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import ConfigurationError, InputError
from evergrad_trainer import api
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.run.redaction import public_path

MANIFESTS = Path(__file__).parents[1] / "manifest"


@pytest.mark.acceptance("8d-15d")
@pytest.mark.capability("G-97")
@pytest.mark.parametrize(
    ("path", "public"),
    [
        ("/home/somebody/data/a.jsonl", "a.jsonl"),
        ("data/a.jsonl", "data/a.jsonl"),
        ("./data/a.jsonl", "data/a.jsonl"),
        ("../secret/a.jsonl", "a.jsonl"),
        ("data/../../a.jsonl", "a.jsonl"),
        ("data/..", ""),
        ("", ""),
        ("/", ""),
    ],
)
def test_a_public_path_contains_no_home_folder(path: str, public: str) -> None:
    assert public_path(path) == public


@pytest.mark.capability("G-96")
def test_a_report_has_the_figures_and_the_files_of_a_run(
    tmp_path: Path, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=20, ended="killed"))
    run.write(synthetic.Process(last=50, resumed_from=20))
    start = {"type": "start", "resumed_from": 20, "samples_per_step": 32}
    with run.directory.events.open("a") as file:
        file.write(
            json.dumps(start | {"time": run.now, "step": 20, "generation": 2}) + "\n"
        )
    found = api.report(tmp_path / "run")
    assert (found.completed_steps, found.resumed_from, found.samples) == (50, 20, 50 * 32)
    assert found.loss is not None and found.metrics == run.directory.metrics
    assert found.checkpoint is None and found.preflight is None

    # From any place, a folder above the run does not matter.
    monkeypatch.chdir(tmp_path)
    assert api.report("../" + tmp_path.name + "/run").to_dict()["directory"] == "run"

    public = found.to_dict()
    assert (public["directory"], public["metrics"]) == ("run", "metrics.jsonl")
    assert str(tmp_path) not in json.dumps(public)
    assert found.to_dict(is_public=False)["metrics"] == str(run.directory.metrics)


def test_a_directory_without_a_run_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        api.report(tmp_path / "nowhere")


@pytest.mark.capability("G-1")
def test_an_invalid_manifest_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_steps"):
        api.run(
            manifest=MANIFESTS / "base_manifest.yaml",
            overrides=["spec.training.max_steps=2"],
            run_directory=tmp_path / "run",
        )
    with pytest.raises(InputError, match="is a script"):
        api.run(manifest=MANIFESTS / "script_manifest.yaml", run_directory=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.capability("G-1")
@pytest.mark.parametrize(
    ("code", "known"),
    [(64, ExitCode.USER_ERROR), (76, ExitCode.STOPPED_UNSAVED), (-9, ExitCode.INTERNAL)],
)
def test_a_run_that_fails_raises_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, known: ExitCode
) -> None:
    class Started:
        def __init__(self, command: list[str]) -> None:
            # The report is about the newest state of the run.
            assert command[-2:] == ["--run-directory", str(tmp_path / "run")]

        def wait(self) -> int:
            return code

    monkeypatch.setattr(subprocess, "Popen", Started)
    with pytest.raises(api.RunFailedError, match=f"ended with exit code {code}") as failed:
        api.run(
            manifest=MANIFESTS / "base_manifest.yaml",
            run_directory=tmp_path / "run",
            arguments=("--run-directory", "elsewhere"),
        )
    assert failed.value.exit_code == known


def test_an_interrupted_caller_lets_the_run_save_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in takes time to save, like a run.
    program = tmp_path / "saves.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.4)\n"
        "    pathlib.Path(sys.argv[1], 'saved').touch()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "while True:\n"
        "    time.sleep(1)\n"
    )

    class Interrupted(subprocess.Popen[bytes]):
        is_interrupted = False

        def wait(self, timeout: float | None = None) -> int:
            if self.is_interrupted:
                return super().wait(timeout)
            self.is_interrupted = True
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        api._wait_for([sys.executable, "-S", str(program), str(tmp_path)])
    assert (tmp_path / "saved").exists()
