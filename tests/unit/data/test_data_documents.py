"""Conversion of lines to texts: which lines are documents, and why others are skipped."""

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad_trainer.data.preparation.documents import (
    DocumentReader,
    LineCounts,
    SkipReason,
    read_blocks,
)


def read(
    data: bytes, *, size: int = 2**20, field: str = "text"
) -> tuple[list[str], list[int], LineCounts]:
    """Return the texts of a whole file, their lines, and the tally of skipped lines."""
    reader = DocumentReader(text_field=field, first_line=1)
    texts: list[str] = []
    lines: list[int] = []
    for block in read_blocks(io.BytesIO(data), start=0, end=len(data), size=size):
        more, numbers = reader.read(block)
        texts += more
        lines += numbers
    return texts, lines, reader.tally


def jsonl(texts: Sequence[Any], *, newline: bytes = b"\n") -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + newline for text in texts)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.text(min_size=1), max_size=12),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_every_text_is_read_unchanged_with_any_block_size(
    texts: list[str], size: int, mark: bool, escape: bool, newline: bytes
) -> None:
    lines = (
        json.dumps({"n": 1, "text": text, "z": None}, ensure_ascii=escape).encode()
        for text in texts
    )
    data = (b"\xef\xbb\xbf" if mark else b"") + b"".join(line + newline for line in lines)
    assert read(data, size=size) == (texts, list(range(1, len(texts) + 1)), LineCounts())


def test_the_last_line_needs_no_newline() -> None:
    assert read(jsonl(["a", "b"]).rstrip())[0] == ["a", "b"]


def test_only_a_newline_ends_a_line() -> None:
    texts = ["a\u2028b", "c\x85d", "e\x0bf"]
    data = "\n".join(
        json.dumps({"text": text}, ensure_ascii=False) for text in texts
    ).encode()
    assert read(data)[0] == ["a\u2028b", "c\x85d", "e\x0bf"]


def test_white_space_around_an_object_is_accepted() -> None:
    assert read(b'  {"text": "a"}\t \n\t{"text":"b"}\r\n')[0] == ["a", "b"]


def test_blank_lines_and_empty_texts_are_counted_and_not_errors() -> None:
    texts, lines, tally = read(b'\n  \n{"text": ""}\n\r\n{"text": "x"}\n\t\n')
    assert (texts, lines) == (["x"], [5])
    assert tally.skipped == {SkipReason.BLANK_LINE: 4, SkipReason.EMPTY_TEXT: 1}
    assert (tally.malformed, tally.problems) == (0, [])


@pytest.mark.parametrize(
    ("line", "reason", "what", "why"),
    [
        (
            b"{",
            SkipReason.NOT_JSON,
            "the line is not JSON",
            "Expecting property name enclosed in double quotes at column 2",
        ),
        (
            b'{"text": "a"} x',
            SkipReason.NOT_JSON,
            "the line is not JSON",
            "Extra data at column 15",
        ),
        (
            b'{"text": "a"}{"text": "b"}',
            SkipReason.NOT_JSON,
            "the line is not JSON",
            "Extra data at column 14",
        ),
        (
            b"plain text",
            SkipReason.NOT_JSON,
            "the line is not JSON",
            "Expecting value at column 1",
        ),
        (
            b"[" * 100_000,
            SkipReason.NOT_JSON,
            "the line is not JSON",
            "Expecting value at column 100001",
        ),
        (
            b'{"text": ' + b"1" * 5000 + b"}",
            SkipReason.NO_TEXT,
            "the field 'text' contains a number",
            "a text is a JSON string",
        ),
        (
            b'{"text": "\xff"}',
            SkipReason.NOT_UTF8,
            "the line is not UTF-8",
            "a byte in it starts no character",
        ),
        (
            b'{"text": "\xed\xa0\x80"}',
            SkipReason.NOT_UTF8,
            "the line is not UTF-8",
            "a byte in it starts no character",
        ),
        (
            b"[1]",
            SkipReason.NOT_AN_OBJECT,
            "the line contains a list",
            "each line is one JSON object",
        ),
        (
            b'"a"',
            SkipReason.NOT_AN_OBJECT,
            "the line contains a string",
            "each line is one JSON object",
        ),
        (
            b"null",
            SkipReason.NOT_AN_OBJECT,
            "the line contains null",
            "each line is one JSON object",
        ),
        (
            b'{"body": "a"}',
            SkipReason.NO_TEXT,
            "the object has no field 'text'",
            "it has 'body'",
        ),
        (b"{}", SkipReason.NO_TEXT, "the object has no field 'text'", "it has none"),
        (
            b'{"text": 3}',
            SkipReason.NO_TEXT,
            "the field 'text' contains a number",
            "a text is a JSON string",
        ),
        (
            b'{"text": null}',
            SkipReason.NO_TEXT,
            "the field 'text' contains null",
            "a text is a JSON string",
        ),
        (
            b'{"text": ["a"]}',
            SkipReason.NO_TEXT,
            "the field 'text' contains a list",
            "a text is a JSON string",
        ),
    ],
)
def test_a_malformed_line_is_counted_and_described(
    line: bytes, reason: SkipReason, what: str, why: str
) -> None:
    texts, lines, tally = read(jsonl(["before"]) + line + b"\n" + jsonl(["after"]))
    assert (texts, lines) == (["before", "after"], [1, 3])
    assert (dict(tally.skipped), tally.malformed) == ({reason: 1}, 1)
    assert (tally.problems[0].line, tally.problems[0].what, tally.problems[0].is_torn) == (
        2,
        what,
        False,
    )
    assert tally.problems[0].why.startswith(why)


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_truncated_last_line_is_detected(cut: int) -> None:
    _, _, tally = read(jsonl(["a", "bcdefghi"])[:-cut])
    assert [problem.is_torn for problem in tally.problems] == ([True] if cut > 1 else [])


def test_a_last_line_truncated_within_a_character_is_detected() -> None:
    whole = json.dumps({"text": "aé"}, ensure_ascii=False).encode()
    _, _, tally = read(whole[:-3])
    assert (tally.problems[0].is_torn, dict(tally.skipped)) == (
        True,
        {SkipReason.NOT_UTF8: 1},
    )


def test_only_the_first_problems_are_stored_and_all_are_counted() -> None:
    _, _, tally = read(b"bad\n" * 40)
    assert (tally.malformed, [problem.line for problem in tally.problems]) == (
        40,
        [1, 2, 3, 4, 5],
    )


def test_tallies_of_chunks_are_added_in_line_order() -> None:
    later, earlier = read(b"\n" * 10 + b"bad\n" * 3)[2], read(b"bad\n" * 4)[2]
    later.add(earlier)
    assert later.skipped == {SkipReason.NOT_JSON: 7, SkipReason.BLANK_LINE: 10}
    assert [problem.line for problem in later.problems] == [1, 2, 3, 4, 11]
    assert LineCounts.from_json(json.loads(json.dumps(later.to_json()))) == later


def test_unpaired_surrogates_are_replaced_and_counted_and_pairs_are_kept() -> None:
    texts, _, tally = read(
        b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n{"text": "\\uDC00"}\n{"text": "\\\\ud800"}\n'
    )
    assert texts == ["a\ufffdb", "😀", "\ufffd", "\\ud800"]
    assert tally.repaired == 2


def test_another_field_can_contain_the_text() -> None:
    assert read(b'{"body": "a", "text": 3}\n', field="body")[0] == ["a"]


def test_a_file_that_became_shorter_is_detected() -> None:
    with pytest.raises(EOFError):
        list(read_blocks(io.BytesIO(b"abc\n"), start=0, end=10, size=2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 20))
def test_no_bytes_make_the_reader_fail(lines: list[bytes], size: int) -> None:
    texts, numbers, tally = read(b"\n".join(lines), size=size)
    count = b"\n".join(lines).count(b"\n") + (
        not b"\n".join(lines).endswith(b"\n") and bool(b"\n".join(lines))
    )
    if b"\xef\xbb\xbf" not in b"\n".join(lines)[:3]:
        assert len(texts) + sum(tally.skipped.values()) == count
    assert len(numbers) == len(texts)
