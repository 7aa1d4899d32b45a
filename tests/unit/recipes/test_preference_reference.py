"""The reference of a run: the checkpoint that it has begun with, although that run trains on."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import from_wire, to_wire
from evergrad_trainer.base.errors import CheckpointError, RunDirectoryError
from evergrad_trainer.checkpoint.restore import Restored
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.preference import Preference
from evergrad_trainer.recipes.preference import task as preference_task
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import BegunFrom

BEGUN = BegunFrom("theirs", "step-4", 4, "hash", "weights")


class Runs:
    """Runs in the folders of ``path``; the newest checkpoint of ``theirs`` is after step 6."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.there = [4, 6]
        self.read: list[tuple[Path, int]] = []
        (path / "theirs").mkdir()
        monkeypatch.setattr(preference_task, "load_weights", self._load)

    def manifest(self, **init_from: Any) -> dict[str, Any]:
        training = {
            "recipe": "preference",
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": [{"name": "p", "path": "p.jsonl"}], "sequenceLength": 8},
            "batching": {"globalBatchSize": 2, "microBatchSize": 1},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
            "initFrom": init_from,
        }
        return {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "pairs"},
            "spec": {"training": training},
        }

    def write(self, name: str, begun: BegunFrom, **init_from: Any) -> RunDirectory:
        """The record of a run that began with ``begun``."""
        directory = RunDirectory(self.path / name)
        directory.create()
        record = {
            "manifest": to_wire(from_wire(self.manifest(**init_from))),
            "baseDirectory": "..",
            "begunFrom": asdict(begun),
        }
        directory.write_resolved(record)
        return directory

    def build(self, name: str = "ours", **init_from: Any) -> int | None:
        """Build the modules of the run ``name``; return the step after which it must begin."""
        training = from_wire(self.manifest(**init_from)).training
        task, _ = load_task(training, self.path, run_directory=self.path / name)
        modules = cast(Preference, task).build(lambda: nn.Linear(1, 1))
        return modules.begins_behind

    def _load(self, path: Path, tensors: Any, *, step: int | None) -> Restored:
        step = self.there[-1] if step is None else step
        if step not in self.there:
            what = f"contains no checkpoint of step {step}"
            raise CheckpointError(Problem(str(path), what, "", "Name one of them"))
        self.read.append((path.resolve(), step))
        return Restored(step, 1, path, {}, 0.1)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def test_a_new_run_reads_the_newest_reference_and_must_start_with_it(runs: Runs) -> None:
    assert runs.build(path="theirs") == 6
    assert runs.build(path="theirs", step=4) == 4


def test_a_run_that_has_started_reads_the_reference_of_its_start(runs: Runs) -> None:
    runs.write("ours", BEGUN, path="theirs")
    assert runs.build(path="theirs") == 4
    assert runs.read == [(runs.path / "theirs", 4)]


def test_a_run_that_another_node_has_started_in_the_meantime_has_its_reference(
    runs: Runs,
) -> None:
    training = from_wire(runs.manifest(path="theirs")).training
    task, _ = load_task(training, runs.path, run_directory=runs.path / "ours")
    runs.write("ours", BEGUN, path="theirs")
    assert cast(Preference, task).build(lambda: nn.Linear(1, 1)).begins_behind == 4


def test_a_chain_of_runs_has_the_reference_of_its_first_run(runs: Runs) -> None:
    runs.write("first", BEGUN, path="theirs")
    went_on = BegunFrom("first", "step-8", 8, "other", "everything")
    runs.write("second", went_on, path="first", load="everything")
    for name in ("fresh", "second"):
        # It begins with a state of the run before it, and not with the reference.
        assert runs.build(name, path="first", load="everything") is None
    assert runs.build(path="second", load="everything") is None
    assert runs.read == [(runs.path / "theirs", 4)] * 3


def test_a_chain_recorded_relative_to_a_link_target_finds_the_start_of_its_run(
    runs: Runs,
) -> None:
    theirs = runs.path / "theirs"
    directory = runs.write("first", BEGUN, path="theirs")
    record = json.loads(directory.resolved.read_text())
    record["baseDirectory"] = "../elsewhere"
    record["begunFrom"]["path"] = str(theirs)
    directory.write_resolved(record)
    runs.build(path="first", load="everything")
    assert runs.read == [(theirs, 4)]


def test_a_missing_reference_is_reported_and_no_other_one_suggested(runs: Runs) -> None:
    runs.write("ours", BEGUN, path="theirs")
    runs.there = [6]
    with pytest.raises(CheckpointError) as error:
        runs.build(path="theirs")
    where = runs.path / "theirs"
    assert str(error.value) == (
        f"spec.training.initFrom.path: the reference is step 4 in {where}, which cannot be loaded now; "
        f"{where}: contains no checkpoint of step 4. Bring it back: it is read at each start until the run is "
        "complete."
    )


def test_a_damaged_record_of_a_chain_is_reported_and_not_the_manifest_of_the_user(
    runs: Runs,
) -> None:
    directory = runs.write("first", BEGUN, path="theirs")
    record = json.loads(directory.resolved.read_text())
    record["manifest"]["spec"]["training"]["horizon"] = {"steps": "many"}
    directory.write_resolved(record)
    with pytest.raises(RunDirectoryError) as error:
        runs.build(path="first", load="everything")
    assert str(error.value).startswith(f"{directory.resolved}: does not hold a run")
