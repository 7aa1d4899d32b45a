"""Pairs as they are prepared: both rows of each, and which of their tokens are completions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.pair_source import PairSource
from evergrad_trainer.data.preparation.pairs import read_format
from evergrad_trainer.data.preparation.row_format import row_format
from evergrad_trainer.data.prepared import Prepared, TokenSequence
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.data.tokenizers import BYTE_END

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
BLOCKS = (
    "{% for message in messages %}{{ message.role[0] }}:{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
Make = Callable[..., Training]
Prepare = Callable[..., Prepared]
END = BYTE_END


def pairs(training: Make, **sections: Any) -> Training:
    data = {"sources": [{"name": "pairs", "path": "pairs.jsonl"}], "sequenceLength": 40}
    return training(
        recipe="preference",
        rows={"chatTemplate": TEMPLATE, **sections.pop("rows", {})},
        data={**data, **sections.pop("data", {})},
        **sections,
    )


def write(folder: Path, *rows: Any) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "pairs.jsonl").write_text(text, "utf-8")


def turns(*said: str, first: int = 0) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[(at + first) % 2], "content": text} for at, text in enumerate(said)
    ]


def source_of(
    recipe: Training, prepared: Prepared, sequence: TokenSequence | None = None
) -> PairSource:
    one = prepared.sources[0]
    return PairSource(
        RowReader(one, sequence or one.train),
        sequence_length=recipe.data.sequence_length,
        vocab_size=prepared.vocab_size,
    )


def read(recipe: Training, prepared: Prepared) -> list[list[tuple[list[int], list[int]]]]:
    """Of each pair both rows: all ids but the last, and the ids that are learned."""
    source = source_of(recipe, prepared)
    found = []
    for item in range(len(source)):
        tensors = source.read([item]).tensors
        inputs, labels = tensors["input_ids"][0], tensors["labels"][0]
        rows = []
        for ids, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
            last = max(at for at, label in enumerate(wanted) if label != IGNORE_INDEX)
            assert not any(ids[last + 1 :]), "filled up behind its end"
            rows.append(
                (ids[: last + 1], [label for label in wanted if label != IGNORE_INDEX])
            )
        found.append(rows)
    return found


@pytest.mark.capability("A-80", "T-52")
def test_both_completions_follow_the_prompt_and_only_completions_are_learned(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {"prompt": "ab", "chosen": "cd", "rejected": "é", "more": 1},
        {"prompt": "", "chosen": "xy", "rejected": "z!"},
    )
    recipe = pairs(training)
    e = list("é".encode())
    assert read(recipe, prepared_in(recipe)) == [
        [([*b"abcd"], [*b"cd", END]), ([*b"ab", *e], [*e, END])],
        # The first token of a row is never a label.
        [([*b"xy"], [*b"y", END]), ([*b"z!"], [*b"!", END])],
    ]


@pytest.mark.parametrize("template", [TEMPLATE, BLOCKS])
@pytest.mark.parametrize("has_prompt", [True, False])
def test_turns_of_the_prompt_are_not_learned_as_completion(
    training: Make, prepared_in: Prepare, tmp_path: Path, template: str, has_prompt: bool
) -> None:
    """A separate prompt, and a prompt that is the common beginning of both conversations."""
    before, good, bad = turns("hi", "yo", "?"), turns("!", first=1), turns("no", first=1)
    row = {"prompt": before, "chosen": good, "rejected": bad}
    if not has_prompt:
        row = {"chosen": [*before, *good], "rejected": [*before, *bad]}
    write(tmp_path, row)
    recipe = pairs(training, rows={"chatTemplate": template})
    ((chosen, rejected),) = read(recipe, prepared_in(recipe))
    start = [*b"u:hi", END, *b"a:yo", END, *b"u:?", END, *b"a:"]
    # A template without blocks ends a turn with its mark, whose id is the end's.
    assert chosen == ([*start, *b"!"], [*b"!", END])
    assert rejected == ([*start, *b"no"], [*b"no", END])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "the row has no field 'rejected'; its fields are"),
        ({"rejected": "b"}, "the row has no field 'chosen'; its fields are 'rejected'"),
        (
            {"chosen": "a", "rejected": "b"},
            "the row has no field 'prompt'; it has 'chosen'",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "the fields 'chosen' and 'rejected' are the same; neither of them can be preferred",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": ""},
            "the field 'rejected' is empty; there is nothing to learn",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "the field 'rejected' is not a text; it is a JSON string",
        ),
        (
            {"prompt": "a", "chosen": turns("b", first=1), "rejected": "c"},
            "the field 'rejected' is not a list of messages",
        ),
        (
            {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")},
            "the field 'prompt' is a text, and 'chosen' a list of messages; a prompt is messages",
        ),
        (
            {"chosen": turns("b", "c"), "rejected": "c"},
            "the field 'rejected' is not a list of messages",
        ),
        (
            {"chosen": turns("a", "b"), "rejected": turns("a", "b", "c", "d")},
            "the field 'chosen' is the beginning of the other one; nothing in it can be compared",
        ),
        (
            {"chosen": turns("a", "b"), "rejected": turns("c")},
            "no message has the role 'assistant'; there are user",
        ),
        (
            {
                "prompt": turns("a"),
                "chosen": turns("b", first=1),
                "rejected": [{"role": "x"}],
            },
            "rejected[0] has only a role; a message has content",
        ),
        (
            {
                "prompt": turns("a"),
                "chosen": turns("b", first=1),
                "rejected": turns("", first=1),
            },
            "the field 'rejected' is empty; there is nothing to learn",
        ),
        (
            {"chosen": turns("a", ""), "rejected": turns("a", "b")},
            "the field 'chosen' is empty; there is nothing to learn",
        ),
        (
            {
                "chosen": turns("a", "b"),
                "rejected": [*turns("a"), {**turns("a", "b")[1], "rank": 2}],
            },
            "both completions become the same tokens; neither of them can be preferred",
        ),
        (
            {"prompt": "a" * 39, "chosen": "b", "rejected": "cc"},
            "the row has 42 tokens, and a sample holds 41",
        ),
    ],
)
def test_a_row_that_is_not_a_pair_is_refused_with_file_and_line(
    training: Make, prepared_in: Prepare, tmp_path: Path, row: Any, said: str
) -> None:
    write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    with pytest.raises(DataError) as refused:
        prepared_in(pairs(training))
    assert f"pairs.jsonl:2: {said}" in str(refused.value)


def test_a_prompt_that_both_conversations_contain_is_not_added_again(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(tmp_path, {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")})
    recipe = pairs(training, rows={"promptField": "-"})
    ((chosen, rejected),) = read(recipe, prepared_in(recipe))
    start = [*b"u:a", END, *b"a:"]
    assert (chosen, rejected) == (
        ([*start, *b"b"], [*b"b", END]),
        ([*start, *b"c"], [*b"c", END]),
    )


def test_an_answer_with_only_a_tool_call_is_not_empty(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": ["f"]}
    write(tmp_path, {"chosen": [*turns("a"), call], "rejected": turns("a", "b")})
    template = TEMPLATE.replace(
        "message.content }}", "message.content or message.tool_calls[0] }}"
    )
    recipe = pairs(training, rows={"chatTemplate": template})
    ((chosen, rejected),) = read(recipe, prepared_in(recipe))
    assert (chosen[1], rejected[1]) == ([*b"f", END], [*b"b", END])


@pytest.mark.acceptance("8d-12d:preference")
def test_invalid_pairs_are_counted_if_the_file_permits_them(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {
            "chosen": turns("a", "b"),
            "rejected": [*turns("a"), {**turns("a", "b")[1], "rank": 2}],
        },
    )
    recipe = pairs(training, data={"malformed": "skip"})
    prepared = prepared_in(recipe)
    assert prepared.sources[0].skipped == {"noRow": 2, "noCompletion": 1}
    assert len(read(recipe, prepared)) == 1


def test_a_prompt_is_truncated_equally_in_both_rows(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    """Only at the end of the row: the rest of a prompt is the whole prompt, or the pair is left out."""
    prompt = "p" * 38
    write(
        tmp_path,
        {"prompt": prompt, "chosen": "b" * 9, "rejected": "cd"},
        {"prompt": prompt + "ppp", "chosen": "b" * 9, "rejected": "cd"},
    )
    recipe = pairs(training, rows={"tooLong": "truncate"})
    prepared = prepared_in(recipe)
    ((chosen, rejected),) = read(recipe, prepared)
    assert chosen == ([*prompt.encode(), *b"bb"], [*b"bbb"])
    assert rejected == ([*prompt.encode(), *b"cd"], [*b"cd", END])
    assert prepared.sources[0].skipped == {"truncated": 1, "leftOut": 1}


def test_a_pair_with_an_overlong_row_is_truncated_in_both_rows_or_omitted(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {"prompt": "a", "chosen": "b" * 50, "rejected": "c"},
        # The rest of these rows would be equal tokens, or only a prompt.
        {"prompt": "a", "chosen": "b" * 50, "rejected": "b" * 60},
        {"prompt": "a" * 50, "chosen": "b", "rejected": "c"},
    )
    found = {}
    for policy in ("skip", "truncate"):
        recipe = pairs(training, rows={"tooLong": policy})
        if policy == "skip":
            with pytest.raises(DataError, match="contains no document in 3 lines"):
                prepared_in(recipe)
            continue
        prepared = prepared_in(recipe)
        found = dict(prepared.sources[0].skipped)
        ((chosen, rejected),) = read(recipe, prepared)
        assert chosen == ([*b"a", *b"b" * 39], [*b"b" * 40])
        assert rejected == ([*b"ac"], [*b"c", END])
    assert found == {"truncated": 1, "leftOut": 2}


def test_a_held_out_pair_is_held_out_completely(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"{at}.", "chosen": f"{at}+", "rejected": f"{at}-"} for at in range(20)
    ]
    write(tmp_path, *rows)
    recipe = pairs(training, data={"heldOut": {"count": 5}})
    prepared = prepared_in(recipe)
    assert prepared.sources[0].held_out is not None
    seen = []
    for sequence in (prepared.sources[0].train, prepared.sources[0].held_out):
        source = source_of(recipe, prepared, sequence)
        for item in range(len(source)):
            inputs = source.read([item]).tensors["input_ids"][0].numpy().astype(np.uint8)
            texts = [bytes(row[row > 0]).decode() for row in inputs]
            number = texts[0].partition(".")[0]
            assert texts == [f"{number}.{number}+", f"{number}.{number}-"]
            assert source.describe(item) == f"pairs.jsonl, line {int(number) + 1}"
            seen.append(int(number))
    assert sorted(seen) == list(range(20)) and len(source) == 5


def test_pairs_of_a_parquet_file_with_other_column_names_are_the_same(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    rows = [
        {"q": "ab", "good": "c", "bad": "d", "other": 1},
        {"q": "x", "good": "y", "bad": "z", "other": 2},
    ]
    write(tmp_path, *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    found = []
    for name, kind in (("pairs.jsonl", "jsonl"), ("pairs.parquet", "parquet")):
        recipe = pairs(
            training,
            rows={"promptField": "q"},
            preference={"chosenField": "good", "rejectedField": "bad"},
            data={"sources": [{"name": "pairs", "path": name, "type": kind}]},
        )
        found.append(read(recipe, prepared_in(recipe)))
    assert found[0] == found[1] and len(found[0]) == 2


def test_the_description_of_rows_without_pairs_is_unchanged(
    training: Make, tmp_path: Path
) -> None:
    """The description is a part of the fingerprint, so data that were prepared before are found again."""
    form = row_format(training(recipe="sft"), tmp_path)
    assert form is not None and form.to_json().keys() == {
        "messages_field",
        "prompt_field",
        "completion_field",
        "longest",
        "too_long",
        "template",
        "variables",
    }
    assert read_format(form.to_json()) == form
    pair = row_format(pairs(training), tmp_path)
    assert pair is not None and read_format(json.loads(json.dumps(pair.to_json()))) == pair
