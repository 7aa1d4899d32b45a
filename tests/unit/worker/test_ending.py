"""The export at the end of a run, with other files in its folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_trainer import export
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker import teardown


def write_export(directory: Path, *, step: int, output: Path, dtype: Any) -> None:
    output.mkdir(parents=True)
    (output / "config.json").write_text("{}")


def test_an_export_at_the_end_removes_only_its_own_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden file of the volume or of a desktop, or a user's own unfinished export, is not a leftover."""
    monkeypatch.setattr(export, "export_checkpoint", write_export)
    directory = RunDirectory(tmp_path)
    own = [".step-4.new", ".step-8.old", "..step-8.new.1a2b3c4d.tmp"]
    theirs = [".mine.1a2b3c4d.tmp", ".step-8.mine", ".step-x.new", "mine"]
    for name in (*own, *theirs):
        (directory.exports / name).mkdir(parents=True)
    files = [".nfs0001", ".DS_Store"]
    for name in files:
        (directory.exports / name).write_text("x")

    session = cast(Any, SimpleNamespace(directory=directory))
    assert teardown._export(session, 8) == directory.exports / "step-8"
    found = {one.name for one in directory.exports.iterdir()}
    assert found == {*theirs, *files, "step-8"}


def test_a_first_export_creates_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "export_checkpoint", write_export)
    session = cast(Any, SimpleNamespace(directory=RunDirectory(tmp_path)))
    assert (teardown._export(session, 8) / "config.json").is_file()
