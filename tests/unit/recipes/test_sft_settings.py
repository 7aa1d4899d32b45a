"""The settings that a task that reads rows requires in its file."""

from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_trainer.recipes.sft import Sft
from evergrad_trainer.task import Setup

SOURCES = [{"name": "rows", "path": "rows.jsonl"}]


class Mine(Sft):
    """A user's task."""


def open_mine(**changes: Any) -> Mine:
    values: dict[str, Any] = {
        "recipe": "mine:Mine",
        "model": {"config": {"model_type": "llama"}},
        "batching": {"globalBatchSize": 2, "microBatchSize": 1},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 10},
    }
    training = Training.model_validate({**values, **changes})
    return Mine(Setup(training, Mine.Options(), Path()))


@pytest.mark.parametrize(
    "texts",
    [
        {"data": {"sources": SOURCES, "sequenceLength": 16}},
        {"evaluation": {"every": {"steps": 1}, "sources": SOURCES}},
    ],
    ids=["to train on", "to evaluate on"],
)
def test_a_derived_task_whose_sources_are_prepared_as_texts_is_refused(
    texts: dict[str, Any],
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_mine(**texts)
    assert str(refused.value) == (
        "spec.training.rows: missing; the task reads rows, and the sources are prepared as texts. "
        "Add `rows: {}`."
    )
    assert open_mine(**texts, rows={}).settings.learn == "completions"


def test_a_derived_task_that_prepares_its_own_data_needs_no_rows_in_its_manifest() -> None:
    assert open_mine().settings.learn == "completions"
