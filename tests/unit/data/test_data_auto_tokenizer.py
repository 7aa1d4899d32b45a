"""Tokenizer directories are read as AutoTokenizer reads them, and an export gives it the trained ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.auto_tokenizer import encoder_of, load_auto, probe_texts
from evergrad_trainer.data.tokenizers import (
    FOLLOWED,
    ByteTokenizer,
    check_saved,
    describe_reader,
    load_directory,
    load_json,
)

THINK = ["<think>", "</think>"]


def save(directory: Path, **config: Any) -> Path:
    """A byte-level BPE of a few merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["the quick brown fox 2023 650 "] * 20,
        trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def assert_same_ids(directory: Path) -> None:
    ours, theirs = load_directory(directory), encoder_of(load_auto(directory))
    # As the helpers of the preparation have it, too.
    helper = load_json(ours.to_json(), end_of_document=ours.end_of_document, identity="x")
    for text in probe_texts(directory):
        assert ours.encode_many([text])[0].tolist() == list(theirs(text)), text
        assert helper.encode_many([text])[0].tolist() == list(theirs(text)), text


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": THINK},
        {"extra_special_tokens": THINK},
        {"pad_token": "<|pad|>"},
        {
            "added_tokens_decoder": {
                "301": {"content": THINK[0], "special": False, "normalized": False},
                "302": {"content": THINK[1], "special": False, "normalized": False},
            }
        },
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    ],
)
def test_settings_that_only_other_files_have_are_respected(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    directory = save(tmp_path / "tokenizer", **config)
    assert_same_ids(directory)
    found = load_directory(directory)
    plain = load_directory(save(tmp_path / "plain"))
    assert found.identity != plain.identity
    assert found.vocab_size >= len(load_auto(directory))


def test_tokens_in_an_added_tokens_file_are_respected(tmp_path: Path) -> None:
    directory = save(tmp_path / "tokenizer")
    size = load_directory(directory).vocab_size
    tokens = {THINK[0]: size, THINK[1]: size + 1}
    (directory / "added_tokens.json").write_text(json.dumps(tokens))
    assert_same_ids(directory)


def test_a_directory_that_both_loaders_read_alike_keeps_its_identity(
    tmp_path: Path,
) -> None:
    found = load_directory(save(tmp_path / "tokenizer"))
    assert not found.identity.startswith(FOLLOWED)
    assert found.identity.startswith("files-")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_an_export_gives_the_trained_ids_next_to_any_model_configuration(
    tmp_path: Path, kind: str
) -> None:
    tokenizer = load_directory(
        save(tmp_path / "tokenizer", additional_special_tokens=THINK)
    )
    for number, one in enumerate((tokenizer, ByteTokenizer())):
        saved = tmp_path / str(number)
        one.save_pretrained(saved)
        (saved / "config.json").write_text(json.dumps({"model_type": kind}))
        difference = check_saved(one, saved)
        theirs = encoder_of(load_auto(saved))
        for text in probe_texts(saved):
            is_same = one.encode_with_offsets(text)[0] == list(theirs(text))
            # A class that composes characters, or cuts digits apart, is found and named.
            assert is_same or difference is not None, text


def test_a_class_that_changes_the_text_is_reported_with_a_text(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "tokenizer_class": "GemmaTokenizer"}))
    difference = check_saved(ByteTokenizer(), tmp_path / "saved")
    assert difference is not None
    assert difference.ours != difference.theirs and "with AutoTokenizer" in str(difference)


def test_ids_that_only_transformers_code_produces_are_refused(tmp_path: Path) -> None:
    # The setting is one of the object, which tokenizer.json does not have.
    directory = save(tmp_path / "tokenizer", split_special_tokens=True)
    assert len(encoder_of(load_auto(directory))("<|end|>")) > 1
    with pytest.raises(DataError, match="cannot be read as AutoTokenizer reads it"):
        load_directory(directory)


CODE_OF_ITS_OWN = {
    "tokenizer_class": "Mine",
    "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
}
"""Settings of a directory that AutoTokenizer loads only with code from it, which is never run."""


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (CODE_OF_ITS_OWN, "ValueError: The repository tokenizer contains custom code"),
        ({"extra_special_tokens": [5]}, "TypeError"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "TypeError"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "ValueError: invalid literal"),
    ],
)
def test_a_directory_that_auto_tokenizer_cannot_load_is_reported_with_the_reason(
    tmp_path: Path, config: dict[str, Any], error: str
) -> None:
    found = load_directory(save(tmp_path / "tokenizer", **config))
    assert found.auto_error.startswith(error)
    assert str(tmp_path) not in found.auto_error and "\n" not in found.auto_error
    assert describe_reader(found) == {
        "reader": "tokenizer.json alone",
        "autoTokenizer": found.auto_error,
    }
    # The ids are read from the only file that can be read.
    plain = load_directory(save(tmp_path / "plain"))
    assert plain.auto_error == "" and describe_reader(plain) == {"reader": "AutoTokenizer"}
    text = "the quick brown fox 2023<|end|>"
    assert found.encode_many([text])[0].tolist() == plain.encode_many([text])[0].tolist()


def test_an_export_that_auto_tokenizer_cannot_load_is_reported(tmp_path: Path) -> None:
    tokenizer = load_directory(save(tmp_path / "tokenizer", **CODE_OF_ITS_OWN))
    tokenizer.save_pretrained(tmp_path / "saved")
    with pytest.raises(DataError, match="AutoTokenizer cannot load an export") as raised:
        check_saved(tokenizer, tmp_path / "saved")
    (problem,) = raised.value.problems
    assert problem.path == "spec.training.tokenizer" and "save_pretrained" in problem.remedy
