"""The chat template and the special tokens of a tokenizer's directory, as its files of any version have them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.row_format import row_format
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.tokenizers import load_directory


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
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("files", "template", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a", None),
        (
            {"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"},
            "b",
            None,
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
            "t",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "old"}]
                },
                "chat_template.jinja": "d",
                "additional_chat_templates/tool_use.jinja": "t",
                "additional_chat_templates/rag.jinja": "r",
            },
            "d",
            "t",
        ),
        ({"tokenizer_config.json": {}}, None, None),
        ({}, None, None),
    ],
)
def test_the_default_template_is_read_from_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], template: str | None, with_tools: str | None
) -> None:
    for name, value in files.items():
        write(tmp_path, name, value)
    found = row_format(sft(tmp_path), tmp_path)
    assert isinstance(found, RowFormat)
    assert (found.template, found.tool_template) == (template, with_tools)
    own = row_format(sft(tmp_path, chatTemplate="own"), tmp_path)
    assert isinstance(own, RowFormat)
    assert (own.template, own.tool_template) == ("own", None)


@pytest.mark.parametrize("has_files", [False, True], ids=["in the settings", "in files"])
def test_rows_with_tools_use_the_template_that_transformers_uses_for_them(
    tmp_path: Path, has_files: bool
) -> None:
    body = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    templates = {"default": body, "tool_use": "{{ tools | tojson }} " + body}
    backend = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template=templates
    ).save_pretrained(tmp_path, save_jinja_files=has_files)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))

    found = row_format(sft(tmp_path), tmp_path)
    assert isinstance(found, RowFormat)
    assert RowFormat.from_json(json.loads(json.dumps(found.to_json()))) == found
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    seen = set()
    for tools in ([{"type": "function"}], [], None):
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert found.render({"messages": messages, "tools": tools}) == text
        seen.add(text)
    assert found.render({"messages": messages}) == text
    assert len(seen) == 3

    # An export uses the same templates.
    load_directory(tmp_path).save_pretrained(tmp_path / "copy")
    copy = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "copy"))
    assert copy.chat_template == templates


def test_special_tokens_are_parsed_in_each_of_their_forms(tmp_path: Path) -> None:
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "old"})
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    write(tmp_path, "tokenizer_config.json", config)
    found = row_format(sft(tmp_path), tmp_path)
    assert isinstance(found, RowFormat)
    assert found.variables == (("bos_token", "<s>"), ("eos_token", "</s>"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("chat_template.jinja", "{% if %}", "is not a jinja template"),
        (
            "additional_chat_templates/tool_use.jinja",
            "{% if %}",
            r"\(tool_use\): is not a jinja template",
        ),
    ],
)
def test_a_damaged_file_is_reported(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    write(tmp_path, name, text)
    with pytest.raises(DataError, match=said) as refused:
        row_format(sft(tmp_path), tmp_path)
    assert str(tmp_path) in str(refused.value)
