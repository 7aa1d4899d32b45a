"""A node's plan: which checks come before the preparation of its data, and which come after it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.reading.loader import load_manifest
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.commands import prepare, session_plan
from evergrad_trainer.commands.session_plan import PlanRequest
from evergrad_trainer.data.start_positions import DATA_START, DataStart, SourcePosition
from evergrad_trainer.recipes import setup
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import RunState
from evergrad_trainer.worker import resume_position
from evergrad_trainer.worker.resume_position import OtherRun

MANIFEST = Path(__file__).parents[1] / "manifest" / "base_manifest.yaml"


@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_a_run_that_others_trained_while_a_node_prepared_its_data_counts_as_trained(
    is_one_of_many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    said: list[bool] = []

    def prepare_slowly(*arguments: Any, **named: Any) -> Any:
        directory.metrics.write_text('{"step": 1}\n')
        return SimpleNamespace(tokenizer_identity="byte")

    def open_recipe(*arguments: Any, has_trained: bool, **named: Any) -> Any:
        said.append(has_trained)
        opened = SimpleNamespace()
        opened.starting_at = lambda start, training: opened
        return opened

    monkeypatch.setattr(prepare, "prepare_with_progress", prepare_slowly)
    monkeypatch.setattr(setup, "open_recipe", open_recipe)
    request = PlanRequest(
        load_manifest(MANIFEST),
        directory,
        RunState("fresh"),
        cast(Any, None),
        num_workers=1,
        is_one_of_many=is_one_of_many,
    )
    session_plan._prepare(request)
    # A fault of the task on one node is then a host fault, and ends no run.
    assert said == [is_one_of_many]


BEGUN = DataStart((SourcePosition("a", "A", 0, 18),), 4, (), "theirs")
NEWER = DataStart((SourcePosition("a", "A", 0, 24),), 6, (), "theirs")


class Node:
    """A node that starts a run at the position of another run, whose newest checkpoint is of step 6."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = RunDirectory(path / "run")
        self.directory.create()
        self.before_opening: Callable[[], None] = lambda: None
        self.begins_at: DataStart | None = None
        self.opened = SimpleNamespace(
            starting_at=self._start_at,
            prepared=None,
            data=SimpleNamespace(train=SimpleNamespace(start=None)),
        )
        monkeypatch.setattr(resume_position, "find_other", self._find)
        monkeypatch.setattr(resume_position, "check_content", lambda *arguments: ())
        monkeypatch.setattr(prepare, "prepare_with_progress", self._prepare)
        monkeypatch.setattr(setup, "open_recipe", lambda *_, **__: self.opened)

    def plan(self, state: RunState, *, is_one_of_many: bool = True) -> None:
        overrides = [
            f"spec.training.initFrom.{one}" for one in ("path=theirs", "load=position")
        ]
        request = PlanRequest(
            load_manifest(MANIFEST, overrides=overrides),
            self.directory,
            state,
            cast(Any, None),
            num_workers=1,
            is_one_of_many=is_one_of_many,
        )
        session_plan._prepare(request)

    def others_begin(self, *, has_record: bool = True) -> None:
        self.directory.metrics.write_text('{"step": 1}\n')
        begun = {"path": "theirs", "checkpoint": "step-4", "step": 4, "hash": "x"}
        record = {"begunFrom": {**begun, "load": "position"}, DATA_START: BEGUN.to_json()}
        if has_record:
            self.directory.write_resolved(record)

    def _prepare(self, *arguments: Any, **named: Any) -> Any:
        self.before_opening()
        return SimpleNamespace(tokenizer_identity="byte")

    def _find(self, *arguments: Any) -> OtherRun:
        return OtherRun(NEWER, None, "step-6")

    def _start_at(self, start: DataStart | None, training: Any) -> Any:
        self.begins_at = start
        return self.opened


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_node_starts_where_others_have_started_since_it_read_the_directory(
    node: Node,
) -> None:
    node.others_begin()
    node.plan(RunState("fresh"))
    assert node.begins_at == BEGUN


def test_a_node_starts_where_others_have_started_while_it_prepared_its_data(
    node: Node,
) -> None:
    node.before_opening = node.others_begin
    node.plan(RunState("fresh"))
    assert node.begins_at == BEGUN


def test_a_node_that_sees_steps_before_their_record_does_not_start_at_the_first_sample(
    node: Node,
) -> None:
    node.others_begin(has_record=False)
    node.plan(RunState("fresh"))
    assert node.begins_at == NEWER


def test_a_file_that_loads_more_of_another_run_than_the_start_is_refused_by_that_field(
    node: Node,
) -> None:
    began = RunState("begun", load="weights")
    with pytest.raises(
        CheckpointError, match="load: position here, and this run began with weights"
    ):
        node.plan(began, is_one_of_many=False)
    # A single node must not end the run of the others.
    node.plan(began)
    # With steps, the load reports the problem; with checkpoints, the field has no effect.
    node.others_begin(has_record=False)
    node.begins_at = None
    node.plan(began, is_one_of_many=False)
    assert node.begins_at is None
