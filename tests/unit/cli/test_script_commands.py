"""The typed commands with the manifest of a script."""

import json
from pathlib import Path

import pytest

from evergrad_cli.main import main

MANIFEST = """
apiVersion: evergrad.dev/v1alpha1
kind: TrainingRun
metadata: {name: mine}
spec: {workersPerNode: 1, script: {command: [train.py]}}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MANIFEST)
    return path


def test_prepare_has_nothing_to_do_for_a_script(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "mine is a script, which reads its data itself: there is nothing to prepare\n"
    assert main(["prepare", str(manifest)]) == 0
    assert capsys.readouterr() == (text, "")
    assert main(["prepare", str(manifest), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"sources": [], "evaluation": []}, text)


def test_preflight_of_a_script_is_refused_until_its_file_exists(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "preflight",
        str(manifest),
        "--run-directory",
        str(manifest.parent / "run"),
    ]
    assert main(arguments) == 64
    assert (
        "train.py: does not exist; spec.script.command names it" in capsys.readouterr().err
    )
    (manifest.parent / "train.py").touch()
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == "" and "ok       spec.nodes: 1 worker in all, 1 a node." in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--extend"], "--extend"), (["--stop-after-steps", "3"], "--stop-after-steps")],
)
def test_options_of_typed_runs_are_refused_for_a_script_and_not_ignored(
    arguments: list[str], named: str, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(manifest), *arguments]) == 64
    assert (
        f"error: {named}: has no meaning for spec.script; only the script controls its steps."
        in capsys.readouterr().err
    )
