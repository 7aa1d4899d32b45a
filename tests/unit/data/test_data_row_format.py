"""The chat template and the special tokens of a tokenizer's directory, as its files of any version have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.data.preparation.row_format import row_format
from evergrad_trainer.errors import DataError


def sft(folder: Path, **rows: Any) -> Training:
    return Training.model_validate(
        {
            "recipe": "sft",
            "rows": rows,
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"type": "transformers", "path": str(folder)},
            "data": {
                "sources": [{"name": "rows", "path": "r.jsonl"}],
                "sequenceLength": 16,
            },
            "batching": {"globalBatchSize": 2, "microBatchSize": 1},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
        }
    )


def write(folder: Path, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        (
            {"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"},
            "b",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
        ),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_the_template_is_the_tokenizers(
    tmp_path: Path, files: dict[str, Any], template: str | None
) -> None:
    for name, value in files.items():
        write(tmp_path, name, value)
    found = row_format(sft(tmp_path), tmp_path)
    assert found is not None and found.template == template
    own = row_format(sft(tmp_path, chatTemplate="own"), tmp_path)
    assert own is not None and own.template == "own"


def test_special_tokens_are_read_in_each_of_their_forms(tmp_path: Path) -> None:
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "old"})
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    write(tmp_path, "tokenizer_config.json", config)
    found = row_format(sft(tmp_path), tmp_path)
    assert found is not None
    assert found.variables == (("bos_token", "<s>"), ("eos_token", "</s>"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("chat_template.jinja", "{% if %}", "is no jinja template"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    write(tmp_path, name, text)
    with pytest.raises(DataError, match=said) as refused:
        row_format(sft(tmp_path), tmp_path)
    assert str(tmp_path) in str(refused.value)
