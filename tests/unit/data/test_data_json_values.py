"""Lines of JSON that Python's own reader refuses for their size, and texts inside of other objects."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation import json_values
from evergrad_trainer.data.preparation.json_values import (
    LongNumber,
    find_nested,
    parse_json,
)
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.token_files import TokenReader
from evergrad_trainer.data.tokenizers import BYTE_END

Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]

DIGITS = "7" * 5000
DEEP = "[" * 20_000 + '{"a": [1, {}]}' + "]" * 20_000


def texts_of(prepared: Prepared) -> list[str]:
    sequence = prepared.sources[0].train
    reader = TokenReader(sequence, sequence_length=16, end_of_document=BYTE_END)
    ids = reader.read_span(0, sequence.tokens).tolist()
    reader.close()
    return bytes(32 if one == BYTE_END else one for one in ids).decode().split()


@pytest.mark.parametrize("extra", [DIGITS, DEEP, f'["\\ud800", {DIGITS}]'])
def test_a_line_with_a_huge_value_in_an_unused_key_gives_its_text(
    training: Recipe, prepared_in: Prepare, tmp_path: Path, extra: str
) -> None:
    lines = [f'{{"text": "one", "x": {extra}}}', f' {{"x": {extra} , "text" : "two"}} ']
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    assert texts_of(prepared_in(training())) == ["one", "two"]


@pytest.mark.parametrize("extra", [DIGITS, DEEP])
def test_a_row_with_a_huge_value_for_its_template_is_refused_by_name(
    training: Recipe, prepared_in: Prepare, tmp_path: Path, extra: str
) -> None:
    said = '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]'
    (tmp_path / "docs.jsonl").write_text(f'{{"messages": {said}, "tools": [{extra}]}}\n')
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError) as refused:
        prepared_in(training(recipe="sft", rows={"chatTemplate": template}))
    said = "has a number of 5000 digits" if extra == DIGITS else "it is nested too deeply"
    assert "docs.jsonl:1: the row" in str(refused.value)
    assert said in str(refused.value)
    # Without that key the row is read.
    (tmp_path / "docs.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}], '
        f'"x": {extra}}}\n'
    )
    recipe = training(recipe="sft", rows={"chatTemplate": template})
    assert prepared_in(recipe).sources[0].repaired == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"a": {"b": "deep"}, "x": []}',
        '{"a.b": "flat", "a": {"b": "deep"}}',
        '{"a": {"b": "deep", "b": "last"}}',
    ],
)
def test_a_text_field_may_be_a_path(
    training: Recipe, prepared_in: Prepare, tmp_path: Path, line: str
) -> None:
    (tmp_path / "docs.jsonl").write_text(line + "\n")
    source = {"name": "docs", "path": "docs.jsonl", "textField": "a.b"}
    wanted = {"flat": "flat", "last": "last"}
    expected = next((word for word in wanted if word in line), "deep")
    assert texts_of(prepared_in(training(data={"sources": [source]}))) == [expected]


def test_a_path_to_a_missing_key_is_reported(
    training: Recipe, prepared_in: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"a": "text"}\n')
    source = {"name": "docs", "path": "docs.jsonl", "textField": "a.b"}
    with pytest.raises(DataError, match=r"docs\.jsonl:1: the object has no field 'a\.b'"):
        prepared_in(training(data={"sources": [source]}))


VALUES = [
    '{"a": [1, -2, 2.5, 1e3, -0.0, "x\\u00e9\\"", null, true, false, {}, [], [[]], {"b": {"c": []}}]}',
    " [ ] ",
    '{"a":1,"a":2}',
    "[NaN, Infinity, -Infinity]",
    '"text"',
    "-12",
    '{"a" : [ 1 , 2 ] , "b" : { "c" : 3 } }',
]
WRONG = [
    "",
    "[1,]",
    "{",
    "[1 2]",
    '{"a" 1}',
    "{a: 1}",
    '{"a": 1,}',
    "[1]x",
    '["a',
    "01",
    "[",
    '{"a": }',
]


@pytest.mark.parametrize("text", VALUES)
def test_both_parsers_return_the_same_as_json(text: str) -> None:
    expected = repr(json.loads(text))
    assert repr(parse_json(text)) == expected
    value, end = json_values._scan_deep(text, len(text) - len(text.lstrip()))
    assert repr(value) == expected and not text[end:].strip()


@pytest.mark.parametrize("text", WRONG)
def test_both_parsers_refuse_the_same_as_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as ours:
        parse_json(text)
    assert ours.value.colno == expected.value.colno
    deep = "[" * 20_000 + text
    with pytest.raises(json.JSONDecodeError):
        parse_json(deep)


def test_a_number_with_many_digits_is_accepted() -> None:
    value: Any = parse_json(f"[{DIGITS}, -{DIGITS}, {DIGITS}.5]")
    assert [type(one) for one in value] == [LongNumber, LongNumber, float]
    assert value[0].digits == 5000 and math.isinf(value[2])
    assert find_nested({"a": {"b": 1}}, "a.c") == (False, None)
