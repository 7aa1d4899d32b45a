"""Tokenizers: the byte one and its transformers form, directories, and their errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from evergrad_manifest.training import Tokenizer
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.tokenizers import (
    BYTE_END,
    ByteTokenizer,
    load_directory,
    load_json,
    load_tokenizer,
    replace_lone_surrogates,
)

ODD = [
    "",
    "plain",
    "  a\n\t b  ",
    "é ñ 漢字 😀\u200d👩‍🚀",
    "\x00\x01\x7f\x80\xa0\xad\xff",
    "\ufeffmark",
    "e\u0301 \u1100\u1161 ﬁ",
    "a\r\n\u2028b\u0085",
    "\U0010ffff\ufffd",
    "x" * 3000,
]


def train_bpe(directory: Path, *, eos: object = "<|endoftext|>") -> Path:
    """A small byte-level BPE directory, as transformers would save it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the quick brown fox and the lazy dog and the end"] * 20, trainer
    )
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"eos_token": eos} if eos is not None else {}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), max_size=6))
def test_byte_ids_are_the_utf8_bytes_and_decode_to_the_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_many(texts)
    assert [bytes(ids.tolist()) for ids in encoded] == [text.encode() for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet=st.characters(codec=None), max_size=20), max_size=6))
def test_joined_documents_equal_the_single_ones_each_with_its_end_token(
    texts: list[str],
) -> None:
    tokenizer = ByteTokenizer()
    tokens, lengths = tokenizer.encode_documents(texts)
    expected = [[*ids.tolist(), BYTE_END] for ids in tokenizer.encode_many(texts)]
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert tokens.dtype == np.uint16


def test_an_unpaired_surrogate_becomes_the_replacement_character() -> None:
    assert replace_lone_surrogates("a\ud800b") == "a\ufffdb"
    assert (
        ByteTokenizer().decode(ByteTokenizer().encode_many(["a\ud800b"])[0]) == "a\ufffdb"
    )


def test_the_saved_byte_tokenizer_gives_the_same_ids_in_transformers(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    ours = ByteTokenizer()
    ours.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.end_of_document)
    for text in ODD:
        ids = ours.encode_many([text])[0].tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


def test_a_transformers_directory_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = train_bpe(tmp_path / "bpe")
    ours, theirs = (
        load_directory(directory),
        AutoTokenizer.from_pretrained(str(directory), local_files_only=True),
    )
    assert (ours.vocab_size, ours.end_of_document) == (len(theirs), theirs.eos_token_id)
    texts = [*ODD, "the lazy end", "half \ud800"]
    for text, ids in zip(texts, ours.encode_many(texts), strict=True):
        assert (
            ids.tolist()
            == theirs(replace_lone_surrogates(text), add_special_tokens=False)["input_ids"]
        )
    tokens, lengths = ours.encode_documents(texts)
    ends = np.cumsum(lengths) - 1
    assert (tokens[ends] == ours.end_of_document).all()
    assert ours.decode(tokens[: lengths[:2].sum()]) == "plain"


def test_a_helper_process_gets_the_same_ids_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    ours = load_directory(train_bpe(tmp_path / "bpe"))
    helper = load_json(
        ours.to_json(), end_of_document=ours.end_of_document, identity=ours.identity
    )
    texts = [*ODD, "the lazy end", "half \ud800"] * 20
    for own, theirs in zip(
        ours.encode_documents(texts), helper.encode_documents(texts), strict=True
    ):
        assert np.array_equal(own, theirs)
    assert (helper.identity, helper.vocab_size, helper.dtype) == (
        ours.identity,
        ours.vocab_size,
        ours.dtype,
    )


def test_saving_a_directory_tokenizer_copies_all_its_files(tmp_path: Path) -> None:
    ours = load_directory(train_bpe(tmp_path / "bpe"))
    ours.save_pretrained(tmp_path / "copy")
    again = load_directory(tmp_path / "copy")
    assert again.identity == ours.identity
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_directory_with_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    directory = train_bpe(tmp_path / "bpe")
    expected = load_directory(directory).encode_many(["the quick end"])[0].tolist()
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
    )
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_directory(directory).encode_many(["the quick end"])[0].tolist() == expected


def test_saved_truncation_and_padding_never_apply_to_a_document(tmp_path: Path) -> None:
    directory = train_bpe(tmp_path / "bpe")
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=9)
    backend.save(str(directory / "tokenizer.json"))
    loaded = load_directory(directory)
    assert (
        loaded.decode(loaded.encode_many(["the quick brown fox"])[0])
        == "the quick brown fox"
    )


def test_identity_depends_on_the_content_and_not_on_the_location(tmp_path: Path) -> None:
    first, second = train_bpe(tmp_path / "a"), train_bpe(tmp_path / "b")
    assert load_directory(first).identity == load_directory(second).identity
    text = (second / "tokenizer.json").read_text()
    (second / "tokenizer.json").write_text(
        text.replace('"add_prefix_space":false', '"add_prefix_space":true', 1).replace(
            '"add_prefix_space": false', '"add_prefix_space": true', 1
        )
    )
    assert load_directory(first).identity != load_directory(second).identity


@pytest.mark.parametrize(
    "eos", [{"content": "<|endoftext|>", "special": True}, "<|endoftext|>"]
)
def test_the_end_token_of_a_document_may_be_spelled_either_way(
    tmp_path: Path, eos: object
) -> None:
    assert load_directory(train_bpe(tmp_path / "bpe", eos=eos)).end_of_document == 0


def message_of(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_directory(directory)
    return str(caught.value)


def test_problems_of_a_directory_are_reported_with_a_remedy(tmp_path: Path) -> None:
    assert message_of(tmp_path / "none").startswith(f"{tmp_path / 'none'}: does not exist")
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in message_of(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "contains no tokenizer; there is no tokenizer.json" in message_of(
        tmp_path / "empty"
    )
    assert "no eos_token is named there" in message_of(
        train_bpe(tmp_path / "noend", eos=None)
    )
    assert "its eos_token 'zzz' is not in the vocabulary" in message_of(
        train_bpe(tmp_path / "wrongend", eos="zzz")
    )
    assert message_of(tmp_path / "wrongend").endswith(
        "Set eos_token in tokenizer_config.json."
    )


@pytest.mark.parametrize(
    "content", ["{}", "no json", '{"version":"1.0","model":{"type":"Nonsense"}}', "\udcff"]
)
def test_a_broken_tokenizer_file_is_reported(tmp_path: Path, content: str) -> None:
    directory = train_bpe(tmp_path / "bpe")
    (directory / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert message_of(directory).startswith(f"{directory / 'tokenizer.json'}: ")


def test_a_broken_configuration_is_reported(tmp_path: Path) -> None:
    directory = train_bpe(tmp_path / "bpe")
    (directory / "tokenizer_config.json").write_text("{")
    assert message_of(directory).startswith(
        f"{directory / 'tokenizer_config.json'}: is not valid JSON"
    )


@pytest.mark.acceptance("input-4e-20")
def test_code_in_a_directory_is_never_executed(tmp_path: Path) -> None:
    directory = tmp_path / "remote"
    directory.mkdir()
    (directory / "vocab.json").write_text("{}")
    config = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "eos_token": "x",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n"
    )
    assert "transformers cannot load this tokenizer" in message_of(directory)
    assert not (tmp_path / "ran").exists()


def test_a_directory_is_loaded_once_per_process_until_its_files_change(
    tmp_path: Path,
) -> None:
    config = Tokenizer.model_validate({"type": "transformers", "path": "bpe"})
    train_bpe(tmp_path / "bpe")
    first = load_tokenizer(config, tmp_path)
    assert load_tokenizer(config, tmp_path) is first
    file = tmp_path / "bpe" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    other = load_tokenizer(config, tmp_path)
    assert other is not first and other.identity != first.identity


def test_a_manifest_refers_to_its_tokenizer_relative_to_its_own_directory(
    tmp_path: Path,
) -> None:
    train_bpe(tmp_path / "bpe")
    assert (
        load_tokenizer(
            Tokenizer.model_validate({"type": "transformers", "path": "bpe"}), tmp_path
        ).end_of_document
        == 0
    )
    assert load_tokenizer(Tokenizer(), tmp_path).identity == "byte-1"


def test_ids_without_a_token_are_omitted_from_a_text(tmp_path: Path) -> None:
    """The vocabulary of a model may be larger than its tokenizer's, up to a round number."""
    assert ByteTokenizer().decode([ord("a"), 319, BYTE_END, ord("b"), 257]) == "ab"
    own = load_directory(train_bpe(tmp_path / "own"))
    ids = own.encode_many(["the end"])[0].tolist()
    assert own.decode([own.vocab_size, *ids, own.vocab_size + 7]) == "the end"
