"""Runs on rows that a first version began, which knew one chat template and left missing keys undefined."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data import prepare as module
from evergrad_trainer.data.preparation import publish
from evergrad_trainer.data.preparation.publish import Recipe
from evergrad_trainer.data.prepare import check_prepared, check_published, check_unchanged
from evergrad_trainer.data.prepared import Prepared, PreparedSource
from evergrad_trainer.data.tokenizers import ByteTokenizer

TALK = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
TALKS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
TEXT = "user: 2+2?;assistant: 4;"
Make = Callable[..., Training]
Prepare = Callable[..., Prepared]


@pytest.fixture
def begun(
    training: Make, prepared_in: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Training, Prepared]]:
    """A recipe on rows, and what a first version recorded of it."""

    def begin(
        template: str, *rows: dict[str, Any], tool_use: str | None = None, **data: Any
    ) -> tuple[Training, Prepared]:
        written = rows or ({"messages": TALKS},)
        text = "".join(json.dumps(row) + "\n" for row in written)
        (tmp_path / "docs.jsonl").write_text(text)
        ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
        if tool_use is not None:
            folder = tmp_path / "tokenizer" / "additional_chat_templates"
            folder.mkdir()
            (folder / "tool_use.jinja").write_text(tool_use)
        recipe = training(
            recipe="sft",
            tokenizer={"type": "transformers", "path": "tokenizer"},
            data={"sequenceLength": 64, **data},
            rows={},
        )
        # Its fingerprints had neither.
        real = module.row_format
        with monkeypatch.context() as patch:
            patch.setattr(
                module, "row_format", lambda *a: replace(real(*a), tool_template=None)
            )
            real_fingerprint = publish.compute_fingerprint
            patch.setattr(
                publish,
                "compute_fingerprint",
                lambda source, content, known: real_fingerprint(
                    source, content, of_first_versions(known)
                ),
            )
            return recipe, replace(prepared_in(recipe), row_texts={})

    return begin


def of_first_versions(recipe: Recipe) -> Recipe:
    return replace(recipe, rows=recipe.rows and recipe.rows.of_rendering(1))


def text_of(source: PreparedSource) -> str:
    """Return the text of its tokens, including tokens that are not learned."""
    (shard,) = source.train.shards
    values = np.fromfile(shard.path, dtype=source.train.dtype)
    # Ids of the byte tokenizer are bytes; each is kept with its mark.
    return bytes(int(one) // 2 for one in values if int(one) // 2 < 256).decode()


def where(tmp_path: Path) -> dict[str, Path]:
    return {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}


HARMLESS = "{% set tools = tools or [] %}" + TALK


@pytest.mark.parametrize(
    ("template", "tool_use"), [(TALK, "With tools: " + TALK), (HARMLESS, None)]
)
def test_a_run_continues_with_data_prepared_by_a_first_version(
    begun: Callable[..., tuple[Training, Prepared]],
    prepared_in: Prepare,
    tmp_path: Path,
    template: str,
    tool_use: str | None,
) -> None:
    recipe, recorded = begun(template, tool_use=tool_use)
    check_unchanged(recorded, recipe, **where(tmp_path))
    check_published(recipe, **where(tmp_path), begun_with=recorded.fingerprints)
    found = prepared_in(recipe, begun_with=recorded.fingerprints)
    check_prepared(recorded, found)
    (source,) = found.sources
    assert source.reused
    assert source.train == recorded.sources[0].train
    # Other runs are on what this version makes of the same files.
    (fresh,) = prepared_in(recipe).sources
    assert fresh.fingerprint != source.fingerprint
    assert text_of(fresh) == text_of(source) == TEXT


WITH_TOOLS = {"messages": TALKS, "tools": [{"b": 1, "a": 2}]}
SORTED = "{% if tools %}{{ tools | tojson(sort_keys=true) }}{% endif %}" + TALK


@pytest.mark.parametrize(
    ("template", "options", "then", "now"),
    [
        (TALK, {"tool_use": "With tools: " + TALK}, TEXT * 2, TEXT + "With tools: " + TEXT),
        (
            "{% if tools is defined %}T{% endif %}" + TALK,
            {},
            f"{TEXT}T{TEXT}",
            f"T{TEXT}" * 2,
        ),
        (SORTED, {"malformed": "skip"}, TEXT, TEXT + '[{"a": 2, "b": 1}]' + TEXT),
        (HARMLESS, {}, TEXT * 2, TEXT * 2),
    ],
    ids=["tool_use", "is defined", "tojson", "harmless"],
)
def test_deleted_data_of_a_first_version_is_prepared_to_the_same_tokens_again(
    begun: Callable[..., tuple[Training, Prepared]],
    prepared_in: Prepare,
    tmp_path: Path,
    template: str,
    options: dict[str, Any],
    then: str,
    now: str,
) -> None:
    recipe, recorded = begun(template, {"messages": TALKS}, WITH_TOOLS, **options)
    shutil.rmtree(tmp_path / "prepared")
    check_unchanged(recorded, recipe, **where(tmp_path))
    with pytest.raises(DataError, match="Leave --require-prepared out once"):
        check_published(recipe, **where(tmp_path), begun_with=recorded.fingerprints)
    found = prepared_in(recipe, begun_with=recorded.fingerprints)
    check_prepared(recorded, found)
    assert found.sources[0].fingerprint == recorded.sources[0].fingerprint
    assert text_of(found.sources[0]) == then
    assert text_of(prepared_in(recipe).sources[0]) == now


def test_a_template_that_changed_since_a_first_version_is_refused(
    begun: Callable[..., tuple[Training, Prepared]], tmp_path: Path
) -> None:
    recipe, recorded = begun(HARMLESS, tool_use=TALK)
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text("Talk: " + HARMLESS)
    with pytest.raises(DataError, match="its rows would become other samples"):
        check_unchanged(recorded, recipe, **where(tmp_path))


def test_a_run_that_started_with_the_second_rule_continues_with_its_text(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    """Its fingerprint, as Evergrad at 10950962 computed it, of rows that the third rule reads otherwise."""
    rows = [
        {"messages": TALKS},
        {"messages": [TALKS[0], {**TALKS[1], "reasoning": "r", "name": None}]},
        {"messages": [TALKS[0], {"role": "assistant", "tool_calls": [1]}]},
    ]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{{ m.name }};{% endfor %}"
    recipe = training(
        recipe="sft",
        data={"sequenceLength": 64, "malformed": "skip"},
        rows={"chatTemplate": template},
    )
    begun = prepared_in(recipe, begun_with=("271ac6cb3000213c69ee8b6475c8bc7f",)).sources[0]
    assert begun.fingerprint == "271ac6cb3000213c69ee8b6475c8bc7f"
    assert text_of(begun) == "2+2?;4;2+2?;4None;"
    assert begun.skipped == {"noRow": 1}
    fresh = prepared_in(recipe).sources[0]
    assert text_of(fresh) == "2+2?;4;2+2?;r4;2+2?;;"


def test_rows_without_a_template_keep_their_fingerprint(
    training: Make, prepared_in: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = training(recipe="sft", data={"sequenceLength": 64}, rows={})
    assert prepared_in(recipe).sources[0].fingerprint == "f7ca4d395e05c0a0b148a7c555010e72"
