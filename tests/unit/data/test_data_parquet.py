"""Parquet files: a column of texts, row group by row group, and every message about a file that has none."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.parquet import read_row_groups
from evergrad_trainer.data.prepared import Prepared, TokenSequence
from evergrad_trainer.data.token_source import TokenSource

Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]

pytestmark = pytest.mark.usefixtures("small_chunks")
FIELD = "spec.training.data.sources[0]"


def write(
    path: Path, texts: Sequence[str | None], *, rows: int = 7, kind: Any = None
) -> Path:
    """A file with a column of texts among others, ``rows`` a row group."""
    column = pa.array(texts, type=kind or pa.string())
    table = pa.table({"id": list(range(len(texts))), "text": column})
    pq.write_table(table, path, row_group_size=rows)
    return path


def recipe_of(training: Recipe, path: str, **keys: object) -> Training:
    source = {"name": "docs", "type": "parquet", "path": path}
    return training(data={"sources": [{**source, **keys}]})


def texts_of(sequence: TokenSequence) -> list[str]:
    """The documents of a sequence of byte tokens."""
    tokens = np.concatenate([np.fromfile(shard.path, "<u2") for shard in sequence.shards])
    documents = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    assert documents.pop().size == 0
    return [bytes(one[:-1].astype(np.uint8)).decode() for one in documents]


def message_of(prepare: Prepare, recipe: Training) -> str:
    with pytest.raises(DataError) as caught:
        prepare(recipe)
    assert caught.value.exit_code == 64
    return str(caught.value)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_the_texts_of_a_column_become_documents_in_row_order(
    tmp_path: Path, training: Recipe, topics: list[str], prepared_in: Prepare, kind: Any
) -> None:
    write(tmp_path / "a.parquet", topics, kind=kind)
    (source,) = prepared_in(recipe_of(training, "a.parquet")).sources
    assert texts_of(source.train) == topics
    assert (source.documents, source.unit) == (len(topics), "row")
    assert len(source.train.shards) > 1


def test_a_folder_of_parquet_files_is_one_source(
    tmp_path: Path, training: Recipe, topics: list[str], prepared_in: Prepare
) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "1.parquet", topics[20:])
    write(tmp_path / "d" / "0.parquet", topics[:20])
    (source,) = prepared_in(recipe_of(training, "d")).sources
    assert texts_of(source.train) == topics
    items = TokenSource(source, source.train, sequence_length=64, end_of_document=256)
    assert items.describe(0).startswith("0.parquet, row")
    assert items.describe(len(items) - 1) == "1.parquet, row 30"


def test_another_column_can_contain_the_texts(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    pq.write_table(
        pa.table({"a.b": ["one", "two"], "text": ["x", "y"]}), tmp_path / "a.parquet"
    )
    (source,) = prepared_in(recipe_of(training, "a.parquet", textField="a.b")).sources
    assert texts_of(source.train) == ["one", "two"]


def test_rows_without_a_text_are_reported_or_counted(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    write(tmp_path / "a.parquet", ["one", "", None, "two"], rows=2)
    recipe = recipe_of(training, "a.parquet")
    assert message_of(prepared_in, recipe) == (
        f"{tmp_path / 'a.parquet'}, row 3: the column 'text' contains null; a text is a string. "
        "Correct the row, or set spec.training.data.malformed to skip."
    )
    kept = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"malformed": "skip"})}
    )
    (source,) = prepared_in(kept).sources
    assert texts_of(source.train) == ["one", "two"]
    assert (source.skipped, source.malformed) == ({"emptyText": 1, "noText": 1}, 1)


def test_a_row_that_is_not_utf8_is_reported(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    column = pa.array([b"fine", b"\xff", b"also"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert message_of(prepared_in, recipe_of(training, "a.parquet")).startswith(
        f"{tmp_path / 'a.parquet'}, row 2: the column 'text' is not UTF-8; "
    )


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            {"textField": "body"},
            f"has no column 'body'; it has 'id', 'text'. Name the column of texts in {FIELD}.textField.",
        ),
        (
            {"textField": "id"},
            (
                "its column 'id' contains values of the type int64; a text is a string. "
                f"Name a column of strings in {FIELD}.textField."
            ),
        ),
    ],
)
def test_a_column_without_texts_is_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, keys: dict[str, str], what: str
) -> None:
    path = write(tmp_path / "a.parquet", ["one"])
    assert (
        message_of(prepared_in, recipe_of(training, "a.parquet", **keys))
        == f"{path}: {what}"
    )


def test_a_column_of_lists_of_texts_is_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    texts: Any = [["one", "two"]]
    path = write(tmp_path / "a.parquet", texts, kind=pa.list_(pa.string()))
    assert message_of(prepared_in, recipe_of(training, "a.parquet")).startswith(
        f"{path}: its column 'text' contains values of the type list<"
    )


def test_a_file_that_is_not_a_complete_parquet_file_is_reported(
    tmp_path: Path, training: Recipe, topics: list[str], prepared_in: Prepare
) -> None:
    path = write(tmp_path / "a.parquet", topics)
    whole = path.read_bytes()
    for data in (whole[:-20], b"plain text that is no Parquet"):
        path.write_bytes(data)
        message = message_of(prepared_in, recipe_of(training, "a.parquet"))
        assert message.startswith(f"{path}: cannot be read as a Parquet file; ")
        assert message.endswith("and copy it again if it was cut short or damaged.")


def test_a_file_damaged_in_its_middle_is_reported(
    tmp_path: Path, training: Recipe, topics: list[str], prepared_in: Prepare
) -> None:
    path = write(tmp_path / "a.parquet", topics, rows=50)
    data = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata
    column = metadata.row_group(0).column(1)
    begin = column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + column.total_compressed_size] = (
        b"\xff" * column.total_compressed_size
    )
    path.write_bytes(data)
    message = message_of(prepared_in, recipe_of(training, "a.parquet"))
    assert message.startswith(f"{path}: cannot be read as a Parquet file; ")


def test_without_pyarrow_the_message_names_the_package_to_install(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", ["one"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert message_of(prepared_in, recipe_of(training, "a.parquet")) == (
        f"{path}: cannot be read here; the package pyarrow is not installed. "
        "Run `pip install pyarrow`, or convert the file to JSON Lines."
    )


def test_row_groups_are_read_from_the_file_with_the_size_of_their_texts(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.parquet", [f"{n}" * 100 for n in range(20)], rows=8)
    groups = read_row_groups(path, "text", field=FIELD)
    assert [group.rows for group in groups] == [8, 8, 4]
    assert all(group.size > 800 for group in groups)


def test_a_column_whose_name_is_a_path_takes_precedence_over_a_structure_field(
    tmp_path: Path, training: Recipe, prepared_in: Prepare
) -> None:
    flat = [f"flat {number}" for number in range(20)]
    nested = [{"text": f"nested {number}", "x": number} for number in range(20)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"meta": nested, "meta.text": flat}), path, row_group_size=7)
    (source,) = prepared_in(recipe_of(training, "a.parquet", textField="meta.text")).sources
    assert texts_of(source.train) == flat

    # Without it the field of the structure is read; a structure that is null has none.
    column = [*nested[:-1], None]
    pq.write_table(pa.table({"meta": column, "id": flat}), path, row_group_size=7)
    recipe = recipe_of(training, "a.parquet", textField="meta.text")
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"malformed": "skip"})}
    )
    (source,) = prepared_in(recipe).sources
    assert texts_of(source.train) == [one["text"] for one in nested[:-1]]
    assert source.skipped == {"noText": 1}


@pytest.mark.parametrize("field", ["meta.none", "meta.text.more", "meta", "ids.text"])
def test_a_path_that_refers_to_no_text_is_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, field: str
) -> None:
    table = pa.table({"meta": [{"text": "a"}], "ids": [[{"text": "b"}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    said = message_of(prepared_in, recipe_of(training, "a.parquet", textField=field))
    if field == "meta":
        assert "its column 'meta' contains values of the type struct<text: string>" in said
    else:
        assert f"has no column {field!r}; it has 'meta', 'ids'" in said


@pytest.mark.parametrize("rows", [None, {}])
def test_two_columns_with_one_name_are_refused(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, rows: dict[str, Any] | None
) -> None:
    name = "text" if rows is None else "prompt"
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"]), pa.array(["e", "f"])]
    table = pa.Table.from_arrays(columns, names=[name, name, "completion"])
    pq.write_table(table, tmp_path / "a.parquet")
    recipe = recipe_of(training, "a.parquet")
    if rows is not None:
        source = {"name": "docs", "type": "parquet", "path": "a.parquet"}
        recipe = training(data={"sources": [source]}, recipe="sft", rows=rows)
    said = message_of(prepared_in, recipe)
    assert f"a.parquet: has 2 columns with the name {name!r}" in said
    # Other columns may share one.
    table = pa.Table.from_arrays(columns[::-1], names=["x", "x", name])
    pq.write_table(table, tmp_path / "a.parquet")
    if rows is None:
        (source,) = prepared_in(recipe).sources
        assert texts_of(source.train) == ["a", "b"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_binary_texts_without_a_text_annotation_are_read(
    tmp_path: Path, training: Recipe, prepared_in: Prepare, kind: Any
) -> None:
    """As older writers leave them."""
    column = pa.array([b"one", "zwölf".encode(), b"\xff", None], type=kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    source = {"name": "docs", "type": "parquet", "path": "a.parquet"}
    recipe = training(data={"sources": [source], "malformed": "skip"})
    (prepared,) = prepared_in(recipe).sources
    assert texts_of(prepared.train) == ["one", "zwölf"]
    assert prepared.skipped == {"notUtf8": 1, "noText": 1}

    rows = {"prompt": column, "completion": pa.array([b"a", b"b", b"c", b"d"], type=kind)}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    recipe = training(
        data={"sources": [source], "malformed": "skip"}, recipe="sft", rows={}
    )
    (prepared,) = prepared_in(recipe).sources
    assert (prepared.documents, prepared.skipped) == (2, {"notUtf8": 1, "noRow": 1})
