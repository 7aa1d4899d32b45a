"""Rows as they are prepared: the ids of each, and which of them are learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.documents import RowError
from evergrad_trainer.data.preparation.row_format import row_format
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.tokenizers import BYTE_END

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
Make = Callable[..., Training]
Prepare = Callable[..., Prepared]


def sft(training: Make, *, rows: dict[str, Any] | None = None, **sections: Any) -> Training:
    data = {"sources": [{"name": "rows", "path": "rows.jsonl"}], **sections.pop("data", {})}
    return training(
        recipe="sft", rows={"chatTemplate": TEMPLATE, **(rows or {})}, data=data, **sections
    )


def write(folder: Path, *rows: Any) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, "utf-8")


def chat(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[at % 2], "content": text} for at, text in enumerate(said)
        ]
    }


def read(prepared: Prepared) -> list[tuple[list[int], list[int]]]:
    reader = RowReader(prepared.sources[0], prepared.sources[0].train)
    rows = [reader.read(number) for number in range(len(reader))]
    return [(row.ids.tolist(), row.marks.astype(int).tolist()) for row in rows]


def test_the_completion_and_its_end_token_are_learned(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "ab", "completion": "cd"}, {"prompt": "", "completion": "é"})
    assert read(prepared_in(sft(training))) == [
        ([*b"abcd", BYTE_END], [0, 0, 1, 1, 1]),
        ([*"é".encode(), BYTE_END], [1, 1, 1]),
    ]


@pytest.mark.capability("C-37")
def test_assistant_turns_of_a_conversation_are_learned(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, chat("hi", "yo", "?", "!"))
    ids, marks = read(prepared_in(sft(training, data={"sequenceLength": 32})))[0]
    end = BYTE_END
    assert ids == [*b"u:hi", end, *b"a:yo", end, *b"u:?", end, *b"a:!", end]
    assert marks == [*[0] * 7, *[1] * 3, *[0] * 6, *[1] * 2]


def test_field_names_are_read_from_the_manifest(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {"q": "a", "text": "b", "prompt": 1},
        {"turns": chat("a", "b")["messages"]},
    )
    names = {"promptField": "q", "completionField": "text", "messagesField": "turns"}
    assert len(read(prepared_in(sft(training, rows=names)))) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "the line contains a list; each line is one JSON object"),
        (
            {"prompt": "a", **chat("b", "c")},
            "the row has 'messages' and 'prompt'; it is a conv",
        ),
        ({"completion": "a"}, "the row has no field 'prompt'; it has 'completion'"),
        (
            {"prompt": "a", "completion": 1},
            "the field 'completion' is not a text; it is a JSON string",
        ),
        (
            {"prompt": "a", "completion": ""},
            "the field 'completion' is empty; there is nothing to",
        ),
        ({"messages": "hi"}, "the field 'messages' is not a list of messages"),
        (
            {"messages": ["hi"]},
            "messages[0] is not an object; a message has a role and content",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0] has only a role; a message has content, tool calls or reasoning",
        ),
        (chat("only"), "no message has the role 'assistant'; there are user"),
        (
            {},
            "the row has neither 'messages' nor 'prompt' and 'completion'; its fields are none",
        ),
    ],
)
def test_an_invalid_row_is_refused_with_file_and_line(
    training: Make, prepared_in: Prepare, tmp_path: Path, row: Any, said: str
) -> None:
    write(tmp_path, {"prompt": "a", "completion": "b"}, row)
    with pytest.raises(DataError) as refused:
        prepared_in(sft(training))
    assert f"rows.jsonl:2: {said}" in str(refused.value)
    assert "Correct the line, or set spec.training.data.malformed to skip" in str(
        refused.value
    )


@pytest.mark.acceptance("8d-12d:sft")
def test_invalid_rows_are_counted_if_the_manifest_permits_them(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "a", "completion": "b"}, {}, chat("a"))
    prepared = prepared_in(sft(training, data={"malformed": "skip"}))
    assert prepared.sources[0].skipped == {"noRow": 2}
    assert len(read(prepared)) == 1


def test_a_conversation_needs_a_template(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, chat("a", "b"))
    with pytest.raises(DataError) as refused:
        prepared_in(sft(training, rows={"chatTemplate": None}))
    (problem,) = refused.value.problems
    assert problem.path == "spec.training.rows.chatTemplate"
    with pytest.raises(
        DataError, match=r"spec\.training\.rows\.chatTemplate: is not a jinja template"
    ):
        prepared_in(sft(training, rows={"chatTemplate": "{% for %}"}))


def test_conversations_without_a_template_are_one_problem_with_a_working_remedy(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, *[chat("a", "b")] * 60)
    for malformed in ("refuse", "skip"):
        data = {"malformed": malformed}
        with pytest.raises(DataError) as refused:
            prepared_in(sft(training, rows={"chatTemplate": None}, data=data))
        (problem,) = refused.value.problems
        assert problem.path == "spec.training.rows.chatTemplate"
        assert "rows.jsonl:1 is a conversation" in problem.what
        assert "skip" not in problem.remedy

    # The template that the remedy shows, as it is.
    example = problem.remedy.split('"')[1]
    prepared = prepared_in(
        sft(training, rows={"chatTemplate": example}, data={"sequenceLength": 32})
    )
    learned = [*b"b", BYTE_END]
    ids, marks = read(prepared)[0]
    assert bytes(one for one in ids if one < 256) == b"user: aassistant: b"
    assert [
        one for one, is_learned in zip(ids, marks, strict=True) if is_learned
    ] == learned


def test_prompts_among_conversations_are_trained_on_if_malformed_rows_are_skipped(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, chat("a", "b"), {"prompt": "a", "completion": "b"})
    recipe = sft(training, rows={"chatTemplate": None}, data={"malformed": "skip"})
    prepared = prepared_in(recipe)
    assert prepared.sources[0].skipped == {"noRow": 1}
    assert len(read(prepared)) == 1


LONG = {"prompt": "p" * 10, "completion": "c" * 20}
"""31 tokens, but a sample has room for 17."""
LONG_PROMPT = {"prompt": "p" * 20, "completion": "c"}


def test_an_overlong_row_is_refused_with_any_policy_for_malformed_lines(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "a", "completion": "b"}, LONG)
    for malformed in ("refuse", "skip"):
        with pytest.raises(DataError) as refused:
            prepared_in(sft(training, data={"malformed": malformed}))
        assert "rows.jsonl:2: the row has 31 tokens, and a sample holds 17" in str(
            refused.value
        )
        assert "set spec.training.rows.tooLong to skip or truncate" in str(refused.value)


def test_overlong_rows_are_reported_after_any_number_of_malformed_rows(
    training: Make, prepared_in: Prepare, tmp_path: Path, small_chunks: int
) -> None:
    """Those are passed over here, and these are what nothing is prepared for."""
    write(tmp_path, *[{}] * 200, *[LONG] * 70)
    with pytest.raises(DataError) as refused:
        prepared_in(sft(training, data={"malformed": "skip"}))
    *named, last = refused.value.problems
    assert [one.path for one in named] == [
        f"{tmp_path}/rows.jsonl:{line}" for line in range(201, 206)
    ]
    assert {one.what for one in named} == {"the row has 31 tokens, and a sample holds 17"}
    assert last.what == "70 of 270 rows are too long"

    # If neither fits, the first rows of both are the first rows of the file.
    write(tmp_path, *[LONG] * 2, *[{}] * 200)
    with pytest.raises(DataError) as refused:
        prepared_in(sft(training))
    assert [one.path.rpartition(":")[2] for one in refused.value.problems[:-1]] == [
        *"12345"
    ]


def test_overlong_rows_are_omitted_and_counted(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, LONG, {"prompt": "a", "completion": "b"}, LONG_PROMPT)
    prepared = prepared_in(sft(training, rows={"tooLong": "skip"}))
    assert prepared.sources[0].skipped == {"leftOut": 2}
    assert prepared.sources[0].malformed == 0
    assert len(read(prepared)) == 1


def test_overlong_rows_are_truncated_and_counted_unless_their_prompt_alone_is_too_long(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, LONG, LONG_PROMPT)
    prepared = prepared_in(sft(training, rows={"tooLong": "truncate"}))
    assert prepared.sources[0].skipped == {"truncated": 1, "leftOut": 1}
    assert read(prepared) == [([*b"p" * 10, *b"c" * 7], [*[0] * 10, *[1] * 7])]


def test_a_row_of_exactly_the_sample_length_is_not_too_long(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "p" * 10, "completion": "c" * 6})
    assert len(read(prepared_in(sft(training)))[0][0]) == 17


def test_a_source_in_which_no_row_fits_is_reported(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, LONG, LONG)
    with pytest.raises(DataError, match="2 are too long"):
        prepared_in(sft(training, rows={"tooLong": "skip"}))


def test_rows_are_prepared_again_for_another_template_but_not_for_other_learned_turns(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, chat("a", "b"))
    first = prepared_in(sft(training)).sources[0]
    again = prepared_in(sft(training, rows={"learn": "everything"})).sources[0]
    assert again.reused and again.fingerprint == first.fingerprint
    other = prepared_in(
        sft(training, rows={"chatTemplate": TEMPLATE.replace(":", ">")})
    ).sources[0]
    assert not other.reused and other.fingerprint != first.fingerprint


@pytest.mark.capability("C-35")
def test_held_out_rows_keep_their_marks_and_none_is_lost(
    training: Make, prepared_in: Prepare, tmp_path: Path, small_chunks: int
) -> None:
    rows = [{"prompt": f"{number}=", "completion": str(number)} for number in range(200)]
    write(tmp_path, *rows)
    prepared = prepared_in(
        sft(training, data={"heldOut": {"count": 20}}), workers=2
    ).sources[0]
    found = []
    assert prepared.held_out is not None
    for sequence in (prepared.train, prepared.held_out):
        reader = RowReader(prepared, sequence)
        for number in range(len(reader)):
            row = reader.read(number)
            text = bytes(row.ids[:-1].tolist()).decode()
            found.append(text)
            prompt = text.partition("=")[0] + "="
            expected = [*[0] * len(prompt), *[1] * (len(row.ids) - len(prompt))]
            assert row.marks.astype(int).tolist() == expected
    assert len(found) == 200
    assert sorted(found) == sorted(row["prompt"] + row["completion"] for row in rows)


def test_an_unpaired_surrogate_in_a_row_is_replaced(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "completion": "\\ud83d"}\n{"prompt": "", "completion": "\\ud83d\\ude00"}\n'
    )
    prepared = prepared_in(sft(training))
    ids, _ = read(prepared)[0]
    assert bytes(ids[1:-1]).decode() == "\ufffd"
    assert prepared.sources[0].repaired == 1


def test_an_unpaired_surrogate_is_replaced_in_all_template_inputs(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    """Such halves are also the marks of a template's generation blocks."""
    template = (
        "{{ tools[0].name }}{% for message in messages %}{{ message.name }}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    said = [
        {"role": "user", "name": "\ud800X\udfff", "content": "hi"},
        {"role": "assistant", "name": "a", "content": "yo"},
    ]
    write(tmp_path, {"messages": said, "tools": [{"name": "\ud83d"}]})
    prepared = prepared_in(sft(training, rows={"chatTemplate": template}))
    text = "\ufffd\ufffdX\ufffdhiayo".encode()
    assert read(prepared) == [([*text], [*[0] * (len(text) - 2), 1, 1])]
    assert prepared.sources[0].repaired == 1


def test_a_conversation_that_is_nested_too_deeply_is_refused(
    training: Make, tmp_path: Path
) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    form = row_format(sft(training), tmp_path)
    assert form is not None
    with pytest.raises(RowError) as refused:
        form.render({**chat("a", "b"), "tools": deep})
    assert refused.value.why == "it is nested too deeply"


def test_a_conversation_that_renders_to_nothing_is_refused(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, chat("a", "b"))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: the conversation becomes an empty text"
    ):
        prepared_in(sft(training, rows={"chatTemplate": "{# nothing #}"}))


def test_ids_are_stored_in_the_smallest_type_that_holds_them_with_their_marks(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "a", "completion": "b"})
    prepared = prepared_in(sft(training)).sources[0]
    assert prepared.train.dtype == "uint16"
    values = np.fromfile(prepared.train.shards[0].path, dtype="<u2")
    assert values.tolist() == [2 * ord("a"), 2 * ord("b") + 1, 2 * BYTE_END + 1]


def cut(path: Path) -> None:
    """Without the last row."""
    path.write_bytes(path.read_bytes()[:-16])


def empty(path: Path) -> None:
    """Without any row."""
    path.write_bytes(b"")


def repeat(path: Path) -> None:
    """With the last row twice."""
    data = path.read_bytes()
    path.write_bytes(data + data[-16:])


def blank(path: Path) -> None:
    """Replace all rows with zeros, as a crash may leave a file with the right length."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("stream", ["train", "heldOut"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"-\*\.documents: name 9 rows together, and 10 are needed"),
        (empty, r"-00000\.documents: is not an index of rows of \d+ tokens"),
        (repeat, r"-00000\.documents: is not an index of rows of \d+ tokens"),
        (blank, r"-00000\.documents: is not an index of rows of \d+ tokens"),
    ],
)
def test_an_index_that_does_not_match_the_rows_is_refused(
    training: Make,
    prepared_in: Prepare,
    tmp_path: Path,
    stream: str,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    """A row begins where the previous row ends, so both would be trained as one row."""
    write(tmp_path, *({"prompt": "a", "completion": "b"} for _ in range(20)))
    (source,) = prepared_in(sft(training, data={"heldOut": {"count": 10}})).sources
    sequence = source.train if stream == "train" else source.held_out
    assert sequence is not None and len(RowReader(source, sequence)) == 10
    (shard,) = sequence.shards
    assert shard.documents is not None
    damage(shard.documents)
    with pytest.raises(DataError, match=stream + said) as refused:
        RowReader(source, sequence)
    assert f"delete the directory {shard.path.parent} and prepare again" in str(
        refused.value
    )
