"""Which tokens of a row are learned if a token crosses the border between prompt and completion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from evergrad_manifest.training import Generation, Training
from evergrad_trainer.data.chat_template import ChatTemplate
from evergrad_trainer.data.marked_text import MarkedSpan, MarkedText, marks_of
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.tokenizers import BackendTokenizer
from evergrad_trainer.recipes.sft.generation import PROMPT_LENGTH, PromptSource

Make = Callable[..., Training]
Prepare = Callable[..., Prepared]

END = "<end>"
WORD = "ĠParis"
MERGES = [("P", "a"), ("Pa", "r"), ("Par", "i"), ("Pari", "s"), ("Ġ", "Paris")]


def with_paris(*, trims: bool) -> Tokenizer:
    """Bytes, and a token for the word Paris with the preceding space. ``trims``: the token's offsets do not
    include the space."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    backend = Tokenizer(
        models.BPE(vocab={token: at for at, token in enumerate(vocabulary)}, merges=MERGES)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return backend


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion", "tokens", "prompt_length"),
    [
        ("is ", "Paris", [WORD, END], 2),
        ("is", " Paris", [WORD, END], 2),
        ("isP", "aris", ["Paris", END], 2),
        ("is Paris", " P", ["Ġ", "P", END], 3),
    ],
)
def test_a_token_that_overlaps_a_completion_is_learned_and_earlier_tokens_are_not(
    training: Make,
    prepared_in: Prepare,
    tmp_path: Path,
    prompt: str,
    completion: str,
    tokens: list[str],
    prompt_length: int,
    trims: bool,
) -> None:
    backend = with_paris(trims=trims)
    (tmp_path / "own").mkdir()
    backend.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    row = {"prompt": prompt, "completion": completion}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = training(
        recipe="sft",
        tokenizer={"type": "transformers", "path": "own"},
        data={"sources": [{"name": "rows", "path": "rows.jsonl"}]},
    )
    (source,) = prepared_in(recipe).sources
    reader = RowReader(source, source.train)
    found = reader.read(0)
    assert [backend.id_to_token(one) for one in found.ids[found.marks].tolist()] == tokens

    # The generated text begins with the first learned token, which is not a part of the prompt.
    prompts = PromptSource(
        reader, sequence_length=16, settings=Generation.model_validate({})
    )
    assert prompts.read([0]).tensors[PROMPT_LENGTH].tolist() == [prompt_length]


def test_the_marks_of_a_token_across_a_boundary_match_transformers() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}answer: "
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Paris"}]
    backend = with_paris(trims=False)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, chat_template=template
    )
    expected: Any = theirs.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    own = BackendTokenizer(backend, end_of_document=0, identity="own")
    text = ChatTemplate(template, (("eos_token", END),)).render(talk, {})
    ids, offsets = own.encode_with_offsets(text)
    assert ids == list(expected["input_ids"])
    assert marks_of(text, offsets).astype(int).tolist() == list(expected["assistant_masks"])
    assert sum(expected["assistant_masks"]) == 2


def test_tokens_of_partial_or_no_characters_are_marked_by_their_offset() -> None:
    text = MarkedText("aébc", (MarkedSpan(1, 2), MarkedSpan(2, 2), MarkedSpan(3, 4)))
    offsets = [(0, 0), (0, 1), (1, 2), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4)]
    assert marks_of(text, offsets).astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert marks_of(MarkedText("ab"), [(0, 1), (1, 2)]).tolist() == [False, False]
    assert marks_of(text, []).tolist() == []


def test_rows_are_prepared_again_for_another_rule_of_marks(
    training: Make, prepared_in: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "docs.jsonl").write_text('{"text": "a"}\n')
    rows = training(
        recipe="sft", data={"sources": [{"name": "rows", "path": "rows.jsonl"}]}
    )
    before = [prepared_in(one).sources[0].fingerprint for one in (rows, training())]
    monkeypatch.setattr("evergrad_trainer.data.preparation.publish.MARKS", 0)
    after = [prepared_in(one).sources[0].fingerprint for one in (rows, training())]
    # Texts have no marks.
    assert before[0] != after[0] and before[1] == after[1]
