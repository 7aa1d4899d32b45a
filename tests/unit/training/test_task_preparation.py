"""A task's own preparation: nodes on one volume take turns, and its errors are attributed to the task."""

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_trainer.base import lock
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.batch import Rows, Stage
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.recipes import setup
from evergrad_trainer.recipes.user_task import Code, load_own

TRAINING = Training.model_validate(
    {
        "recipe": "mine:Task",
        "batching": {"globalBatchSize": 4, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 3},
    }
)
NO_TEXT = Prepared((), (), tokenizer_identity="", vocab_size=0, end_of_document=0)
Prepare = Callable[[Prepared, Path], Mapping[str, Any] | None]


class Numbers:
    fingerprint = "numbers"

    @property
    def fill(self) -> Mapping[str, int]:
        return {"x": 0}

    def __len__(self) -> int:
        return 8

    def read(self, items: Any) -> Rows:
        return Rows({"x": torch.tensor(items)}, weight=len(items))

    def describe(self, item: int) -> str:
        return str(item)


@pytest.mark.capability("A-82")
@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("kinds_a", "Task = 7", "it has no loss, or no Options (a Section)"),
        (
            "kinds_b",
            "class Task:\n    Options = dict\n    loss = 1",
            "it has no loss, or no Options",
        ),
        ("kinds_c", "Tusk = None", "there is nothing of this name"),
    ],
)
def test_an_object_that_is_not_a_task_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, why: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{name}.py").write_text(text, "utf-8")
    training = TRAINING.model_copy(update={"recipe": f"{name}:Task"})
    with pytest.raises(ConfigurationError) as refused:
        load_own(training, tmp_path)
    (problem,) = refused.value.problems
    assert problem.path == "spec.training.recipe" and problem.why.startswith(why)
    assert problem.what == f"Task is no task of {name}.py" and problem.remedy


@pytest.fixture
def open_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Prepare], Prepared]:
    """Start a run whose task prepares its data in this way; return the prepared data."""
    (tmp_path / "mine.py").write_text("", "utf-8")

    def start(prepare: Prepare) -> Prepared:
        task = SimpleNamespace(
            prepare=prepare,
            stages=lambda prepared: [Stage({"numbers": (cast(Any, Numbers()), 1.0)})],
            evaluators=lambda prepared: {},
            observers=lambda: (),
            metrics={},
        )
        local.task = task
        opened = setup.open_recipe(
            TRAINING, NO_TEXT, tmp_path, prepared_directory=tmp_path / "prepared"
        )
        assert opened.prepared is not None
        return opened.prepared

    local = threading.local()
    monkeypatch.setattr(
        setup, "load_task", lambda *args, **kwargs: (local.task, Code(tmp_path))
    )
    return start


def test_a_node_that_waited_for_an_empty_preparation_has_a_folder_for_its_own(
    open_with: Callable[[Prepare], Prepared],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_waiting, is_first_done = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        # The second node looks at the lock twice at least, the last time when the first node is done.
        if is_waiting.is_set():
            assert is_first_done.wait(60)
        is_waiting.set()

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=wait))

    def prepare_something(prepared: Prepared, folder: Path) -> Mapping[str, Any]:
        (folder / "points").write_text("1 2 3", "utf-8")
        return {"file": "points"}

    with ThreadPoolExecutor(1) as second:

        def prepare_nothing(prepared: Prepared, folder: Path) -> None:
            starts.append(second.submit(open_with, prepare_something))
            assert is_waiting.wait(60)

        starts: list[Any] = []
        first = open_with(prepare_nothing)
        is_first_done.set()
        prepared = starts[0].result(60)
    assert first.folder is None
    assert prepared.folder is not None and (prepared.folder / "points").is_file()
    said = capsys.readouterr().err
    assert said.count("another process prepares the task's data in") == 1


def test_a_task_that_prepares_nothing_leaves_no_files(
    open_with: Callable[[Prepare], Prepared], tmp_path: Path
) -> None:
    assert open_with(lambda prepared, folder: None).folder is None
    assert list((tmp_path / "prepared").iterdir()) == []


def test_an_os_error_in_the_preparation_of_a_task_is_not_reported_as_wrong_data(
    open_with: Callable[[Prepare], Prepared],
) -> None:
    def prepare(prepared: Prepared, folder: Path) -> None:
        raise ConnectionResetError("the store of points went away")

    with pytest.raises(ConnectionResetError, match="went away"):
        open_with(prepare)


def test_an_unwritable_volume_is_reported(
    open_with: Callable[[Prepare], Prepared], tmp_path: Path
) -> None:
    (tmp_path / "prepared").write_text("a file where the folder should be", "utf-8")
    with pytest.raises(DataError, match="prepared"):
        open_with(lambda prepared, folder: None)
