"""``evergrad checkpoint list | verify | export``: their output and exit codes."""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad_trainer.base.errors import CheckpointError, RunDirectoryError
from evergrad_trainer.checkpoint.catalog import Catalog
from evergrad_trainer.checkpoint.weights import hold_checkpoint
from evergrad_trainer.commands import checkpoint as command

MakeSolo = Callable[..., Any]


def execute(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.execute(parser.parse_args(arguments))


@pytest.fixture
def run(make_solo: MakeSolo, tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 (the best) and 20."""
    solo = make_solo()
    solo.save(10, best=True)
    solo.save(20)
    return tmp_path


def test_list_shows_the_newest_first_with_its_marks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute("list", str(run)) == 0
    header, newest, older = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "CHECKPOINT",
        "STEP",
        "GENERATION",
        "WORLD",
        "SIZE",
        "FINISHED",
        "MARKS",
    ]
    assert newest.split()[:4] == ["step-20", "20", "1", "1"] and newest.endswith("latest")
    assert older.split()[:4] == ["step-10", "10", "1", "1"] and older.endswith("best")


def test_list_as_json_is_one_document_with_every_fact(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute("list", str(run), "--json") == 0
    newest, older = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (newest["checkpoint"], newest["is_latest"], newest["is_best"]) == (
        "step-20",
        True,
        False,
    )
    assert (older["checkpoint"], older["is_latest"], older["is_best"]) == (
        "step-10",
        False,
        True,
    )
    assert (
        newest["bytes"] > 1000 and newest["world_size"] == 1 and newest["finished"] > 1.7e9
    )


def test_list_names_unreadable_and_quarantined_checkpoints(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "quarantine" / "step-5").mkdir(parents=True)
    os.truncate(run / "checkpoints" / "step-20" / "manifest.json", 0)
    assert execute("list", str(run)) == 0
    out = capsys.readouterr().out
    assert "unreadable: file manifest.json: is empty" in out
    assert "set aside as damaged: step-5" in out


def test_a_run_without_saves_lists_nothing(
    make_solo: MakeSolo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_solo()
    assert execute("list", str(tmp_path)) == 0
    assert capsys.readouterr().out == "no checkpoints\n"


def test_verify_exits_with_0_if_all_checkpoints_are_valid(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute("verify", str(run)) == 0
    assert capsys.readouterr().out == "step-20: valid\nstep-10: valid\n"


def test_verify_names_the_damaged_file_exits_with_64_and_moves_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-20" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)
    assert execute("verify", str(run)) == 64
    assert (
        capsys.readouterr().out
        == "step-20: file rank-00000.bin: checksum differs\nstep-10: valid\n"
    )
    assert execute("verify", str(run), "--step", "10") == 0
    assert execute("verify", str(run), "--step", "20", "--json") == 64
    results = json.loads(capsys.readouterr().out.partition("\n")[2])["checkpoints"]
    assert results == [
        {
            "checkpoint": "step-20",
            "valid": False,
            "reason": "file rank-00000.bin: checksum differs",
        }
    ]
    assert not (run / "checkpoints" / "quarantine").exists() and path.exists()


def test_verify_skips_checkpoints_that_a_training_run_has_retired(
    make_solo: MakeSolo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    solo = make_solo(keep=2)
    solo.save(10)
    solo.save(20)
    real = Catalog.hold
    steps = iter((30, 40))

    def hold(catalog: Catalog, name: str) -> contextlib.AbstractContextManager[None]:
        # The run saves before the older checkpoint is reached.
        held = real(catalog, name)
        solo.save(next(steps))
        return held

    monkeypatch.setattr(Catalog, "hold", hold)
    assert execute("verify", str(tmp_path)) == 0
    assert capsys.readouterr().out == "step-20: valid\n"
    monkeypatch.setattr(Catalog, "hold", real)
    assert solo.names() == ["step-30", "step-40"]


def test_verify_of_a_step_that_is_retired_during_the_command_reports_it(
    make_solo: MakeSolo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo, real = make_solo(keep=1), Catalog.hold
    solo.save(10)

    def hold(catalog: Catalog, name: str) -> contextlib.AbstractContextManager[None]:
        solo.save(20)
        return real(catalog, name)

    monkeypatch.setattr(Catalog, "hold", hold)
    with pytest.raises(
        CheckpointError, match="no checkpoint of step 10; the run has removed"
    ):
        execute("verify", str(tmp_path), "--step", "10")


def test_a_missing_step_or_a_directory_without_checkpoints_is_an_error_that_names_it(
    run: Path, tmp_path: Path
) -> None:
    missing = rf"{run}: .* no checkpoint of step 30\. Name one of the steps 10, 20\."
    with pytest.raises(CheckpointError, match=missing):
        execute("verify", str(run), "--step", "30")
    # As `export --step 30` looks for it.
    with pytest.raises(CheckpointError, match=missing), hold_checkpoint(run, step=30):
        pass
    with pytest.raises(RunDirectoryError, match="nowhere: is not a run directory"):
        execute("list", str(tmp_path / "nowhere"))


def test_export_passes_its_arguments_and_prints_the_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Result:
        output: Path
        step: int

    calls = []

    def export_checkpoint(run_directory: Path, **options: Any) -> Result:
        calls.append((run_directory, options))
        return Result(options["output"], 20)

    module = types.ModuleType("evergrad_trainer.export")
    module.export_checkpoint = export_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evergrad_trainer.export", module)
    assert (
        execute(
            "export",
            str(run),
            "--output",
            "out",
            "--step",
            "20",
            "--dtype",
            "bfloat16",
            "--json",
        )
        == 0
    )
    options = {"step": 20, "output": Path("out"), "dtype": "bfloat16"}
    assert calls == [(run, {**options, "weights": "trained", "is_adapter": False})]
    assert json.loads(capsys.readouterr().out) == {"output": "out", "step": 20}


def test_checkpoint_commands_do_not_import_torch() -> None:
    code = (
        "import sys, evergrad_trainer.commands.checkpoint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
