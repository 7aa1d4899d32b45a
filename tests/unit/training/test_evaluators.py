"""The metrics that a task's evaluator computes from the means of its parts: errors in it, and undeclared
metrics."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_manifest.errors import InputError
from evergrad_trainer.base.errors import TaskError, TaskInputError
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Evaluator, Loss, Modules, Stage
from evergrad_trainer.training.task_adapter import build_measures

STAGE = Stage({})


def measure_none(modules: Any, tensors: Any, stage: Stage) -> Loss:
    raise AssertionError("nothing is measured here")


def summary_of(code: Code, **facts: Any) -> Callable[..., Mapping[str, float]]:
    """How the evaluator ``own`` makes its metrics."""
    given = {"measure": measure_none, "metrics": {"share": "A share."}, "parts": ("right",)}
    evaluator = Evaluator((), **{**given, **facts})
    opened = SimpleNamespace(
        task=SimpleNamespace(metrics={"right": "Right ones."}),
        code=code,
        evaluators={"own": evaluator},
    )
    built = build_measures(cast(Opened, opened), Modules({}), cast(Any, None))
    return built["own"].summarize


@pytest.mark.capability("O-53")
@pytest.mark.parametrize(
    ("has_trained", "expected"), [(False, TaskInputError), (True, TaskError)]
)
def test_an_error_in_a_summary_names_the_line_of_the_task(
    tmp_path: Path, has_trained: bool, expected: type[Exception]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def share(means):\n    return {'share': 1 / means['right']}\n", "utf-8"
    )
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    summarize = summary_of(Code(tmp_path, has_trained=has_trained), summarize=module.share)
    assert summarize({"right": 0.5}, STAGE) == {"share": 2.0}
    said = r"mine.py:2: ZeroDivisionError: .* failed in summarize of its evaluator own"
    with pytest.raises(expected, match=said):
        summarize({"right": 0.0}, STAGE)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"shares": 0.5}, "it gives shares"),
        ({"share": 0.5, "more": 1.0}, "it gives share, more"),
        ({}, r"it gives \(none\)"),
        ({"share": None}, "it gives what is no number under each name"),
        (None, "it gives what is no number under each name"),
        ({"share": torch.zeros(2)}, "it gives what is no number under each name"),
    ],
)
def test_undeclared_metrics_are_refused(found: Any, said: str) -> None:
    """The best checkpoint, or a monitor, would wait for a metric that is never measured."""
    summarize = summary_of(Code(None), summarize=lambda means: found)
    with pytest.raises(InputError, match=f"the metrics of evaluator own are share; {said}"):
        summarize({"right": 0.5}, STAGE)


def test_a_stage_without_a_metric_has_a_summary_without_it() -> None:
    metrics = {"share": "A share.", "kl": "A divergence."}
    summarize = summary_of(
        Code(None), metrics=metrics, summarize=lambda means: {"share": torch.tensor(0.5)}
    )
    assert summarize({"right": 0.5}, Stage({}, without=("kl",))) == {"share": 0.5}


def test_a_summary_of_the_parts_of_the_task_loss_is_used() -> None:
    summarize = summary_of(
        Code(None), measure=None, summarize=lambda means: {"share": 1 - means["right"]}
    )
    assert summarize({"right": 0.25}, STAGE) == {"share": 0.75}


def test_means_of_the_parts_are_the_metrics_without_a_summary() -> None:
    metrics = {"right": "Right ones."}
    assert summary_of(Code(None), metrics=metrics)({"right": 0.25}, STAGE) == {
        "right": 0.25
    }
