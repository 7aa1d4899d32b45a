"""A node's plan: what it asks before its data are prepared, and what behind that."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.reading.loader import load_manifest
from evergrad_trainer.cli import planning, prepare
from evergrad_trainer.cli.planning import PlanRequest
from evergrad_trainer.recipes import opening
from evergrad_trainer.resume import RunState
from evergrad_trainer.run_directory import RunDirectory

MANIFEST = Path(__file__).parents[1] / "manifest" / "base_manifest.yaml"


@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_a_run_that_others_have_trained_while_a_node_prepared_its_data_has_trained(
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
    monkeypatch.setattr(opening, "open_recipe", open_recipe)
    request = PlanRequest(
        load_manifest(MANIFEST),
        directory,
        RunState("fresh"),
        cast(Any, None),
        num_workers=1,
        is_one_of_many=is_one_of_many,
    )
    planning._prepare(request)
    # A task's fault on one node is then that host's, and ends no run.
    assert said == [is_one_of_many]
