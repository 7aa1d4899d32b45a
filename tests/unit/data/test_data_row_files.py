"""Files with rows: folders, compressed files and Parquet give the rows of one plain file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.row_source import RowReader

Make = Callable[..., Training]
Prepare = Callable[..., Prepared]

pytestmark = pytest.mark.usefixtures("small_chunks")
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def sft(training: Make, path: str, type_: str = "jsonl", **rows: Any) -> Training:
    source = {"name": "rows", "path": path, "type": type_}
    data = {"sources": [source], "sequenceLength": 64}
    return training(recipe="sft", rows={"chatTemplate": TEMPLATE, **rows}, data=data)


def make_rows(count: int = 60) -> list[dict[str, Any]]:
    """Conversations and prompts by turns."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        if number % 2:
            rows.append({"prompt": f"{number}=", "completion": str(number)})
            continue
        said = [("user", f"say {number}"), ("assistant", f"é{number}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in said]})
    return rows


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_parquet(path: Path, rows: list[dict[str, Any]], *, group: int = 7) -> None:
    columns = dict.fromkeys(["id", *(key for row in rows for key in row)])
    table = pa.Table.from_pylist([{**columns, **row} for row in rows])
    pq.write_table(table, path, row_group_size=group)


def read(prepared: Prepared) -> list[tuple[list[int], list[int]]]:
    reader = RowReader(prepared.sources[0], prepared.sources[0].train)
    rows = [reader.read(number) for number in range(len(reader))]
    return [(row.ids.tolist(), row.marks.astype(int).tolist()) for row in rows]


@pytest.fixture
def plain(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> list[tuple[list[int], list[int]]]:
    """The rows of one plain file."""
    (tmp_path / "plain.jsonl").write_text(lines(make_rows()), "utf-8")
    return read(prepared_in(sft(training, "plain.jsonl")))


@pytest.mark.parametrize("path", ["d", "d/*.jsonl*"])
def test_a_folder_or_pattern_of_plain_and_compressed_files_is_one_source(
    training: Make,
    prepared_in: Prepare,
    tmp_path: Path,
    plain: list[tuple[list[int], list[int]]],
    path: str,
) -> None:
    (tmp_path / "d").mkdir()
    rows = make_rows()
    (tmp_path / "d" / "0.jsonl.gz").write_bytes(gzip.compress(lines(rows[:20]).encode()))
    (tmp_path / "d" / "1.jsonl").write_text(lines(rows[20:]), "utf-8")
    prepared = prepared_in(sft(training, path))
    assert read(prepared) == plain and len(plain) == 60
    (source,) = prepared.sources
    assert RowReader(source, source.train).describe([0, 20]) == (
        "0.jsonl.gz, line 1; 1.jsonl, line 1"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_parquet_rows_equal_the_rows_of_the_same_json_objects(
    training: Make,
    prepared_in: Prepare,
    tmp_path: Path,
    plain: list[tuple[list[int], list[int]]],
    workers: int,
) -> None:
    """Each of its rows has all columns: those without a value are not there."""
    write_parquet(tmp_path / "rows.parquet", make_rows())
    prepared = prepared_in(sft(training, "rows.parquet", "parquet"), workers=workers)
    assert read(prepared) == plain
    (source,) = prepared.sources
    assert len(source.train.shards) > 1 and source.documents == 60
    assert RowReader(source, source.train).describe([59]) == "rows.parquet, row 60"


def test_columns_with_other_names_and_extra_template_values_are_read(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    row = {"turns": make_rows(1)[0]["messages"], "tools": ["add", "sub"]}
    write_parquet(tmp_path / "rows.parquet", [row])
    template = "{{ tools | join(',') }}|" + TEMPLATE
    recipe = sft(
        training, "rows.parquet", "parquet", messagesField="turns", chatTemplate=template
    )
    ((ids, _),) = read(prepared_in(recipe))
    assert bytes(one for one in ids if one < 256).startswith(b"add,sub|u:say 0")


def message_of(prepare: Prepare, recipe: Training) -> str:
    with pytest.raises(DataError) as caught:
        prepare(recipe)
    return str(caught.value)


def test_a_parquet_file_without_a_rows_column_is_refused_with_its_columns(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "rows.parquet")
    message = message_of(prepared_in, sft(training, "rows.parquet", "parquet"))
    assert (
        "rows.parquet: has none of the columns 'messages', 'prompt', 'completion', 'conversations'; it has "
        "'text', 'id'. Name its columns under spec.training.rows." in message
    )


def test_an_invalid_row_of_a_parquet_file_is_refused_with_its_number(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    rows = [*make_rows(10), {"prompt": "a"}]
    write_parquet(tmp_path / "rows.parquet", rows, group=4)
    message = message_of(prepared_in, sft(training, "rows.parquet", "parquet"))
    assert (
        "rows.parquet, row 11: the row has no field 'completion'; it has 'prompt'"
        in message
    )


def test_only_a_parquet_row_that_is_not_utf8_is_refused(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    prompts = pa.array([b"a", b"\xff", b"c"], type=pa.binary()).view(pa.string())
    table = pa.table({"prompt": prompts, "completion": ["1", "2", "3"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    message = message_of(prepared_in, sft(training, "rows.parquet", "parquet"))
    assert (
        "rows.parquet, row 2: the row is not UTF-8; a byte in it starts no character"
        in message
    )
    assert "row 1" not in message and "row 3" not in message
