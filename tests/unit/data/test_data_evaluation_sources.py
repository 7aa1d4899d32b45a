"""Sources that are only used for evaluation may change between two starts, but the meaning of a name may
not."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.prepare import check_prepared, check_unchanged
from evergrad_trainer.data.prepared import Prepared

Write = Callable[[Path, Sequence[str]], Path]
Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]


def evaluated_on(training: Recipe, *names: str, **paths: str) -> Training:
    """A recipe with evaluation sources; their files are named after them, but for ``paths``."""
    sources = [{"name": name, "path": paths.get(name, f"{name}.jsonl")} for name in names]
    return training(evaluation={"every": {"steps": 5}, "sources": sources})


@pytest.mark.parametrize("names", [["books"], ["books", "wiki"], ["news", "wiki"], []])
def test_evaluation_sources_may_be_added_removed_and_reordered_between_two_starts(
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


def test_changed_content_of_an_evaluation_source_of_the_same_name_is_refused(
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


@pytest.mark.parametrize(
    "fields",
    [{"textField": "title"}, {"type": "text", "document": "line"}],
    ids=["another field", "another type"],
)
def test_the_same_files_read_as_other_documents_under_the_same_name_are_refused(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Prepare,
    fields: dict[str, str],
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    rows = [{"text": text, "title": text[:3]} for text in topics]
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def on_wiki(name: str = "wiki", **fields: str) -> Training:
        sources = [{"name": name, "path": "wiki.jsonl", **fields}]
        return training(
            data={"heldOut": {"count": 5}},
            evaluation={"every": {"steps": 5}, "sources": sources},
        )

    recorded = prepared_in(on_wiki())
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    said = (
        r"spec.training.evaluation.sources\[0\]: its files are read as other documents .* "
        "or give the evaluation source another name"
    )
    with pytest.raises(DataError, match=said):
        check_unchanged(recorded, on_wiki(**fields), **where)
    with pytest.raises(DataError, match=said):
        check_prepared(recorded, prepared_in(on_wiki(**fields)))
    for same in (on_wiki(), on_wiki("titles", **fields), on_wiki(dtype="uint32")):
        check_unchanged(recorded, same, **where)
        check_prepared(recorded, prepared_in(same))
