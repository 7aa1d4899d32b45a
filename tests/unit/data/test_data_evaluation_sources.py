"""Sources that are only evaluated on may change between two starts; what a name stands for may not."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import check_prepared, check_unchanged
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.errors import DataError

Write = Callable[[Path, Sequence[str]], Path]
Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]


def evaluated_on(training: Recipe, *names: str, **paths: str) -> Training:
    """A recipe with evaluation sources; their files are named after them, but for ``paths``."""
    sources = [{"name": name, "path": paths.get(name, f"{name}.jsonl")} for name in names]
    return training(evaluation={"every": {"steps": 5}, "sources": sources})


@pytest.mark.parametrize("names", [["books"], ["books", "wiki"], ["news", "wiki"], []])
def test_evaluation_sources_may_come_and_go_and_change_places_between_two_starts(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    names: list[str],
) -> None:
    for index, name in enumerate(("docs", "wiki", "books", "news")):
        documents(tmp_path / f"{name}.jsonl", topics[index:])
    recorded = prepared_in(evaluated_on(training, "wiki", "books"))
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    recipe = evaluated_on(training, *names)
    check_unchanged(recorded, recipe, **where)
    check_prepared(recorded, prepared_in(recipe))


def test_another_content_under_the_name_of_an_evaluation_source_is_refused(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
) -> None:
    for index, name in enumerate(("docs", "wiki", "books", "news")):
        documents(tmp_path / f"{name}.jsonl", topics[index:])
    recorded = prepared_in(evaluated_on(training, "wiki", "books"))
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    recipe = evaluated_on(training, "books", "wiki", wiki="news.jsonl")
    said = r"news.jsonl: its content changed .* or give the evaluation source another name"
    with pytest.raises(DataError, match=said):
        check_unchanged(recorded, recipe, **where)
    with pytest.raises(DataError, match=said):
        check_prepared(recorded, prepared_in(recipe))
    check_unchanged(
        recorded, evaluated_on(training, "mended", mended="news.jsonl"), **where
    )
