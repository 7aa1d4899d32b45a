"""A run's report as a value of Python, and the public form of paths."""

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from evergrad_coordinator.contract import ExitCode
from evergrad_manifest.errors import ConfigurationError, InputError
from evergrad_trainer import api
from evergrad_trainer.errors import RunDirectoryError
from evergrad_trainer.provenance.redaction import public_path

MANIFESTS = Path(__file__).parents[1] / "manifest"


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
def test_a_public_path_leads_into_nobodys_folders(path: str, public: str) -> None:
    assert public_path(path) == public


@pytest.mark.capability("G-96")
def test_a_report_has_the_figures_and_the_files_of_a_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=20, ended="killed"))
    run.write(synthetic.Process(last=50, resumed_from=20))
    start = {"type": "start", "resumed_from": 20, "samples_per_step": 32}
    with run.directory.events.open("a") as file:
        file.write(json.dumps(start | {"time": run.now, "step": 20, "generation": 2}) + "\n")
    found = api.report(tmp_path / "run")
    assert (found.completed_steps, found.resumed_from, found.samples) == (50, 20, 50 * 32)
    assert found.loss is not None and found.metrics == run.directory.metrics
    assert found.checkpoint is None and found.preflight is None

    public = found.to_dict()
    assert (public["directory"], public["metrics"]) == ("run", "metrics.jsonl")
    assert str(tmp_path) not in json.dumps(public)
    assert found.to_dict(is_public=False)["metrics"] == str(run.directory.metrics)


def test_what_is_no_run_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        api.report(tmp_path / "nowhere")


@pytest.mark.capability("G-1")
def test_a_wrong_file_is_refused_before_anything_is_started(tmp_path: Path) -> None:
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
def test_a_run_that_fails_raises_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 70)

    monkeypatch.setattr(subprocess, "run", start)
    with pytest.raises(api.RunFailedError, match="ended with exit code 70") as failed:
        api.run(manifest=MANIFESTS / "base_manifest.yaml", run_directory=tmp_path / "run")
    assert failed.value.exit_code == ExitCode.INTERNAL
