"""The chat template and the special tokens of a tokenizer's directory that a run began with."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.prepare import check_prepared, check_unchanged
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.tokenizers import ByteTokenizer, load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
Make = Callable[..., Training]
Prepare = Callable[..., Prepared]


@pytest.fixture
def sft(training: Make, tmp_path: Path) -> Callable[..., Training]:
    """A recipe on rows with a tokenizer of bytes in a directory, which has a template."""
    row = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
        ]
    }
    (tmp_path / "docs.jsonl").write_text(json.dumps(row) + "\n")
    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)

    def make(path: str = "tokenizer", **rows: Any) -> Training:
        tokenizer = {"type": "transformers", "path": path}
        data = {"sequenceLength": 64}
        return training(recipe="sft", tokenizer=tokenizer, data=data, rows=rows)

    return make


def set_key(path: Path, key: str, value: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def change_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("Talk: " + TEMPLATE)


def move_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    set_key(directory / "tokenizer_config.json", "chat_template", "Talk: " + TEMPLATE)


def drop_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


def add_one_for_tools(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)


def change_tokens(directory: Path) -> None:
    set_key(directory / "tokenizer_config.json", "bos_token", "<s>")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_template, "/chat_template.jinja: the chat template changed"),
        (move_template, "/tokenizer_config.json: the chat template changed"),
        (drop_template, "/tokenizer_config.json: the chat template changed"),
        (add_one_for_tools, "/additional_chat_templates: the chat template changed"),
        (change_tokens, "/tokenizer_config.json: the special tokens changed"),
    ],
)
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "begun before"])
def test_a_changed_text_is_reported_before_the_preparation(
    sft: Callable[..., Training],
    prepared_in: Prepare,
    tmp_path: Path,
    change: Callable[[Path], None],
    said: str,
    is_recorded: bool,
) -> None:
    recorded = prepared_in(sft())
    assert Prepared.from_json(recorded.to_json()) == recorded
    if not is_recorded:
        recorded = replace(recorded, row_texts={})
        said = (
            "its rows would become other samples .* the chat template or the special tokens"
        )
    change(tmp_path / "tokenizer")
    folder = tmp_path / "prepared"
    before = sorted(folder.iterdir())
    if change is change_tokens and not is_recorded:
        # A token more is another tokenizer, which the comparison of the run's identity names.
        tokenizer = load_tokenizer(sft().tokenizer, tmp_path)
        assert tokenizer.identity != recorded.tokenizer_identity
        return
    with pytest.raises(DataError, match=said) as refused:
        check_unchanged(recorded, sft(), base_directory=tmp_path, prepared_directory=folder)
    assert "Restore the" in str(refused.value)
    assert sorted(folder.iterdir()) == before
    if change is change_template:
        with pytest.raises(DataError, match="its rows would become other samples"):
            check_prepared(recorded, prepared_in(sft()))


def test_the_same_texts_in_another_place_are_unchanged(
    sft: Callable[..., Training], prepared_in: Prepare, tmp_path: Path
) -> None:
    recorded = prepared_in(sft())
    shutil.move(tmp_path / "tokenizer", tmp_path / "moved")
    directory = tmp_path / "moved"
    (directory / "chat_template.jinja").unlink()
    set_key(directory / "tokenizer_config.json", "chat_template", TEMPLATE)
    set_key(directory / "tokenizer_config.json", "model_max_length", "64")
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(recorded, sft("moved"), **where)
    check_prepared(recorded, prepared_in(sft("moved")))


def test_the_tokenizer_template_may_change_if_the_manifest_sets_its_own(
    sft: Callable[..., Training], prepared_in: Prepare, tmp_path: Path
) -> None:
    own = sft(chatTemplate="Own: " + TEMPLATE)
    recorded = prepared_in(own)
    change_template(tmp_path / "tokenizer")
    where = {"base_directory": tmp_path, "prepared_directory": tmp_path / "prepared"}
    check_unchanged(recorded, own, **where)
    check_prepared(recorded, prepared_in(own))


def test_the_record_of_plain_texts_is_unchanged(
    training: Make,
    prepared_in: Prepare,
    tmp_path: Path,
    documents: Callable[..., Path],
) -> None:
    documents(tmp_path / "docs.jsonl", ["a"])
    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = {"type": "transformers", "path": "tokenizer"}
    recorded = prepared_in(training(tokenizer=tokenizer))
    assert "row_texts" not in recorded.to_json()
