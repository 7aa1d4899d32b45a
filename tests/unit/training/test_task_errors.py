"""Errors of a task's code: wrong input as long as the run has made no step, an error of a step afterwards."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.errors import InputError
from evergrad_manifest.files.task_files import hash_task
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import HostError, TaskError, TaskInputError
from evergrad_trainer.recipes.setup import open_recipe
from evergrad_trainer.recipes.user_task import Code, load_own
from evergrad_trainer.worker.session import SessionPlan
from evergrad_trainer.worker.setup import open_plan

MANIFEST: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 4, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 3},
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calling(code: Code, call: Callable[[], object]) -> None:
    with code.guarding("loss"):
        call()


@pytest.fixture
def own(tmp_path: Path) -> Callable[[], object]:
    """A function of the user's that fails."""
    path = tmp_path / "mine.py"
    path.write_text("def loss():\n    return {}['weight']\n", "utf-8")
    return cast(Callable[[], object], load(path).loss)


def plan_in(folder: Path, code: Code | None) -> SessionPlan:
    opened = None if code is None else SimpleNamespace(code=code)
    return cast(SessionPlan, SimpleNamespace(run_directory=folder, opened=opened))


def test_code_that_fails_before_the_first_step_of_a_run_is_a_user_error(
    tmp_path: Path, own: Callable[[], object]
) -> None:
    code = Code(tmp_path)
    open_plan(plan_in(tmp_path, code))
    with pytest.raises(TaskInputError, match=r"mine.py:2: KeyError: 'weight'"):
        calling(code, own)


@pytest.mark.parametrize(
    "sign", ["metrics.jsonl", "checkpoints/step-00000500/manifest.json"]
)
def test_a_joining_node_whose_copy_fails_does_not_end_a_run_that_has_made_steps(
    tmp_path: Path, own: Callable[[], object], sign: str
) -> None:
    (tmp_path / sign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / sign).write_text('{"step": 500, "sample_hash": "0"}\n', "utf-8")
    code = Code(tmp_path)
    open_plan(plan_in(tmp_path, code))
    with pytest.raises(TaskError, match=r"mine.py:2: KeyError: 'weight'") as caught:
        calling(code, own)
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("has_trained", "expected"), [(False, TaskInputError), (True, TaskError)]
)
def test_a_task_file_that_cannot_be_imported_does_not_end_a_run_that_has_made_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_trained: bool,
    expected: type[Exception],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lacking.py").write_text("import a_library_of_one_host_only\n", "utf-8")
    training = Training.model_validate({**MANIFEST, "recipe": "lacking:Task"})
    with pytest.raises(expected, match=r"lacking.py:1: ModuleNotFoundError"):
        load_own(training, tmp_path, has_trained=has_trained)


COLLECTIVES = {
    "the gather of a module's weights": ["distributed/distributed_c10d.py"],
    "the gather of one weight": [
        "distributed/tensor/_api.py",
        "distributed/_functional_collectives.py",
        "_ops.py",
    ],
}


def fail_below(tmp_path: Path, files: list[str]) -> Callable[[], object]:
    """A function of the user's whose call fails in the last of torch's ``files``, through those before it."""
    call: Callable[[], object] | None = None
    for name in reversed(["mine.py", *(f"site-packages/torch/{one}" for one in files)]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "return call()"
        if call is None:
            body = "raise RuntimeError('Connection closed by peer [::1]:5')"
        path.write_text(f"def run(call):\n    {body}\n", "utf-8")
        call = functools.partial(load(path).run, call)
    assert call is not None
    return call


@pytest.mark.parametrize("files", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_a_failed_collective_in_task_code_is_not_an_error_of_the_task(
    tmp_path: Path, files: list[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):
        calling(Code(tmp_path), fail_below(tmp_path, files))


@pytest.mark.parametrize(
    "files",
    [
        ["distributed/tensor/_dispatch.py", "_ops.py"],
        ["distributed/algorithms/_checkpoint/checkpoint_wrapper.py", "nn/functional.py"],
        ["nn/functional.py"],
    ],
)
def test_an_operation_that_fails_in_one_process_alone_is_an_error_of_the_task(
    tmp_path: Path, files: list[str]
) -> None:
    with pytest.raises(TaskInputError, match=r"mine.py:2: "):
        calling(Code(tmp_path), fail_below(tmp_path, files))


def test_a_worker_that_starts_later_never_trains_another_version_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "spawned.py").write_text("import spawned_table\n1 / 0\n", "utf-8")
    (tmp_path / "spawned_table.py").write_text("TABLE = 1\n", "utf-8")
    training = Training.model_validate({**MANIFEST, "recipe": "spawned:Task"})
    facts: dict[str, Any] = {
        "run": SimpleNamespace(training=training),
        "base_directory": tmp_path,
        "prepared": None,
        "task_hash": hash_task(training, tmp_path),
    }
    plan = cast(SessionPlan, SimpleNamespace(**vars(plan_in(tmp_path, None)), **facts))
    with pytest.raises(TaskInputError, match=r"spawned.py:2: ZeroDivisionError"):
        open_plan(plan)
    (tmp_path / "spawned_table.py").write_text("TABLE = 2\n", "utf-8")
    with pytest.raises(
        HostError, match=r"spawned.py: .* has changed since this node started; two versions"
    ):
        open_plan(plan)
    sys.modules.pop("spawned_table", None)


def test_stages_that_do_not_increase_are_an_error_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = """
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Stage

class Task(Pretrain):
    def stages(self, prepared):
        return [Stage({}, until=8), Stage({}, until=4), Stage({})]

    def evaluators(self, prepared):
        return {}
"""
    (tmp_path / "falling.py").write_text(text, "utf-8")
    training = Training.model_validate({**MANIFEST, "recipe": "falling:Task"})
    with pytest.raises(
        TaskInputError, match=r"spec.training.recipe: stages end at steps that rise"
    ):
        open_recipe(training, cast(Any, None), tmp_path)
    del sys.modules["falling"]
