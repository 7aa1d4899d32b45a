"""Preparation is a function of its inputs: two processes make the same bytes of the same files."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.tokenizers import BackendTokenizer, load_directory

Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]


@pytest.fixture
def dropping(tmp_path: Path) -> Path:
    """A tokenizer with dropout of its merges saved in it, as training recipes leave it, and documents."""
    chance = random.Random(0)
    lines = ["".join(chance.choice("aeioubcdfg ") for _ in range(60)) for _ in range(200)]
    tokenizer = Tokenizer(models.BPE(dropout=0.5))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    rows = [json.dumps({"text": line}) + "\n" for line in lines]
    (tmp_path / "docs.jsonl").write_text("".join(rows))
    return tmp_path / "tok"


def ids_of(prepared: Prepared) -> list[int]:
    (source,) = prepared.sources
    found = [np.fromfile(shard.path, source.train.dtype) for shard in source.train.shards]
    return [int(one) for one in np.concatenate(found)]


@pytest.mark.usefixtures("small_chunks")
def test_dropout_that_is_saved_in_a_tokenizer_is_disabled(
    training: Recipe, prepared_in: Prepare, tmp_path: Path, dropping: Path
) -> None:
    recipe = training(tokenizer={"type": "transformers", "path": "tok"})
    here = prepared_in(recipe)
    # In helper processes, each with its own tokenizer.
    moved = training(
        tokenizer={"type": "transformers", "path": "tok"},
        data={"preparedDirectory": "other"},
    )
    there = prepared_in(moved, workers=2)
    assert ids_of(here) == ids_of(there)

    plain = json.loads((dropping / "tokenizer.json").read_text())
    plain["model"]["dropout"] = None
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_text(json.dumps(plain))
    (tmp_path / "plain" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    fixed = load_directory(tmp_path / "plain")
    text = "abcdefg aeiou bad cafe"
    assert load_directory(dropping).encode_with_offsets(text) == fixed.encode_with_offsets(
        text
    )
    load_directory(dropping).save_pretrained(tmp_path / "exported")
    exported = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    assert exported.model.dropout is None
    # Data that a version with dropout prepared are different data, and are not used.
    assert load_directory(dropping).identity.endswith("-no-dropout")
    assert not fixed.identity.endswith("-no-dropout")


def test_a_sample_is_prepared_twice_and_compared(
    training: Recipe,
    prepared_in: Prepare,
    dropping: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def random_ids(self: BackendTokenizer, texts: list[str]) -> Any:
        backend = Tokenizer.from_file(str(dropping / "tokenizer.json"))
        return [backend.encode(text, add_special_tokens=False).ids for text in texts]

    recipe = training(tokenizer={"type": "transformers", "path": "tok"})
    monkeypatch.setattr(BackendTokenizer, "_ids", random_ids)
    with pytest.raises(
        DataError, match="becomes different tokens each time it is prepared"
    ):
        prepared_in(recipe)
    monkeypatch.undo()
    assert prepared_in(recipe).sources[0].documents == 200


def test_a_sentencepiece_directory_requires_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as refused:
        load_directory(tmp_path)
    said = str(refused.value)
    assert "contains a SentencePiece model (tokenizer.model) and no tokenizer.json" in said
    assert "tiktoken" not in said and "sentencepiece is not installed" in said.replace(
        "the package sentencepiece, which reads it,", "sentencepiece"
    )


_RENDER = """
import json, sys
from evergrad_trainer.data.chat_template import ChatTemplate, ChatTemplateError
source, tools = json.loads(sys.argv[1])
talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
body = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
try:
    print(ChatTemplate(source + body).render(talk, {"tools": tools}))
except ChatTemplateError as error:
    print("refused:", error)
"""
_TOOLS = [{"properties": {"xs": {"items": {"type": "string"}}}}]


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("{{ tools[0].properties.xs.items }}", True),
        ("{{ tools[0].properties.xs.items ~ '' }}", True),
        ("{{ [tools[0].properties.xs.items] }}", True),
        ("{{ messages | selectattr('role') }}", True),
        ("{{ messages | random }}", True),
        ("{{ lipsum() }}", True),
        ("{{ tools[0].properties.xs['items'] }}", False),
        ("{{ tools[0].properties.xs.items() | list }}", False),
        ("{{ undefined_name }}{{ messages | map(attribute='role') | join(',') }}", False),
        ("<function f at 0x7f00aa11bb22>", False),
    ],
)
def test_a_template_with_different_text_in_two_processes_is_refused(
    source: str, is_refused: bool
) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", _RENDER, json.dumps([source, _TOOLS])],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2 if not is_refused else 1)
    ]
    assert len(set(said)) == 1
    assert said[0].startswith("refused: ") == is_refused
