"""Exported models, as plain transformers generates with them: they stop where their texts ended."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import DONE, Experiment, read_lines, recipe

from evergrad_manifest.identity import from_wire
from evergrad_trainer.data.tokenizers import load_directory
from evergrad_trainer.text_ends import find_export_ends

TEXT = "abcdefgh"
END = 256
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, **_HEADS}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "qwen2": _SIZES,
    "gemma2": {**_SIZES, "head_dim": 16},
    "mistral": _SIZES,
}


def train(
    experiment: Experiment, name: str, model: dict[str, Any], **sections: Any
) -> Path:
    """Train on one text until it is known by heart, and export the run."""
    base = {
        "optimizer": {"type": "adamw", "learningRate": 0.02},
        "schedule": {"type": "constant"},
        "horizon": {"steps": 60},
        "evaluation": None,
        "checkpoint": {"every": {"steps": 60}},
    }
    experiment.write({**recipe(**{**base, **sections}), "model": model}, name=name)
    experiment.run(name=name)
    return export(experiment, name)


def export(experiment: Experiment, name: str, *arguments: str, to: str = "") -> Path:
    output = experiment.path / (to or f"exported-{name}")
    experiment.command(
        "checkpoint", "export", f"runs/{name}", "--output", output.name, *arguments
    ).expect(DONE)
    return output


def generate(directory: Path, prompt: str, **options: Any) -> list[int]:
    """Return the text that plain transformers generates after ``prompt``, with only the directory's
    settings."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        found = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return [int(one) for one in found[0, ids["input_ids"].shape[1] :]]


def settings_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "generation_config.json").read_text())
    return found


@pytest.fixture
def texts(experiment: Experiment) -> Experiment:
    rows = [json.dumps({"text": TEXT})] * 64
    (experiment.path / "documents.jsonl").write_text("\n".join(rows) + "\n")
    return experiment


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_created_by_evergrad_stops_at_the_end_of_a_text(
    texts: Experiment, family: str
) -> None:
    config = {"model_type": family, **FAMILIES[family]}
    exported = train(texts, "made", {"config": config})
    generated = generate(exported, "abc")
    assert bytes(generated[:-1]).decode() == "defgh" and generated[-1] == END
    assert settings_of(exported)["eos_token_id"] == END
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == END


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 64}])
def test_every_export_of_a_base_keeps_its_settings_and_stops_at_the_learned_end(
    texts: Experiment, lora: dict[str, Any] | None
) -> None:
    base = train(texts, "base", {"config": {"model_type": "llama", **FAMILIES["llama"]}})
    (base / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": [7, 9], "max_new_tokens": 77, "repetition_penalty": 1.0}
        )
    )
    model = {"path": base.name, **({} if lora is None else {"lora": lora})}
    exported = train(texts, "tuned", model, tokenizer={"type": "byte"})
    kept = {"eos_token_id": [7, 9, END], "max_new_tokens": 77, "repetition_penalty": 1.0}
    assert settings_of(exported) == kept
    assert generate(exported, "abc")[-1] == END
    if lora is not None:
        adapter = export(texts, "tuned", "--adapter", to="adapter")
        assert settings_of(adapter) == kept
        from transformers import GenerationConfig

        options = {"generation_config": GenerationConfig.from_pretrained(adapter)}
        assert generate(adapter, "abc", **options)[-1] == END


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PROMPT = "u:hi<turn>a:"
DOCUMENT_END, TURN_END = 256, 257


@pytest.fixture
def chats(experiment: Experiment) -> Experiment:
    """Rows of one conversation, and a byte tokenizer whose template ends a turn with a special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [AddedToken(one, special=True, normalized=False) for one in ("<eos>", "<turn>")]
    backend.add_special_tokens(marks)
    folder = experiment.path / "tokenizer"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    row = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": TEXT},
        ]
    }
    (experiment.path / "documents.jsonl").write_text((json.dumps(row) + "\n") * 64)
    return experiment


def train_on_chats(
    chats: Experiment, name: str, model: dict[str, Any], **sections: Any
) -> Path:
    return train(
        chats,
        name,
        model,
        recipe="sft",
        tokenizer={"type": "transformers", "path": "tokenizer"},
        rows={"chatTemplate": TEMPLATE},
        data={"sequenceLength": 32, "heldOut": None},
        **sections,
    )


def test_a_conversation_model_stops_at_the_end_of_its_turns(chats: Experiment) -> None:
    config = {"model_type": "llama", **FAMILIES["llama"]}
    # The run's own evaluation ends its completions there, too.
    evaluation = {
        "sources": [{"name": "again", "path": "documents.jsonl"}],
        "generation": {"maxNewTokens": 24},
    }
    exported = train_on_chats(chats, "chat", {"config": config}, evaluation=evaluation)
    assert settings_of(exported)["eos_token_id"] == [DOCUMENT_END, TURN_END]
    generated = generate(exported, PROMPT)
    assert generated[-1] == TURN_END and len(generated) == len(TEXT) + 1
    last = read_lines(chats.at("chat") / "evaluation.jsonl")[-1]
    assert (last["name"], last["metrics"]["exact_match"]) == ("again-generated", 1.0)


def test_adapters_trained_on_conversations_stop_at_every_end(chats: Experiment) -> None:
    config = {"model_type": "llama", **FAMILIES["llama"], "vocab_size": 258}
    base = train_on_chats(chats, "base", {"config": config})
    given = {"eos_token_id": [7, 9], "max_new_tokens": 77}
    (base / "generation_config.json").write_text(json.dumps(given))
    lora = {"rank": 8, "alpha": 64}
    merged = train_on_chats(chats, "tuned", {"path": base.name, "lora": lora})
    adapter = export(chats, "tuned", "--adapter", to="adapter")
    for directory in (merged, adapter):
        kept = {**given, "eos_token_id": [7, 9, DOCUMENT_END, TURN_END]}
        assert settings_of(directory) == kept
    assert generate(merged, PROMPT)[-1] == TURN_END


@pytest.mark.parametrize("has_settings", [True, False])
def test_the_run_evaluates_with_the_end_tokens_of_its_export(
    chats: Experiment, has_settings: bool
) -> None:
    """The base names a letter of the learned text as an end: users of an export stop there."""
    config = {"model_type": "llama", **FAMILIES["llama"], "vocab_size": 258}
    base = train_on_chats(chats, "base", {"config": config})
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    ends = [tokenizer["model"]["vocab"]["d"]]
    (base / "generation_config.json").unlink()
    name = "generation_config.json" if has_settings else "config.json"
    values = {} if has_settings else json.loads((base / name).read_text())
    (base / name).write_text(json.dumps({**values, "eos_token_id": ends}))
    exported = train_on_chats(chats, "tuned", {"path": base.name})
    assert settings_of(exported)["eos_token_id"] == [*ends, DOCUMENT_END, TURN_END]
    assert generate(exported, PROMPT)[-1] == ends[0]
    record = json.loads((chats.at("tuned") / "run.json").read_text())
    training = from_wire(record["manifest"]).training
    tokens = load_directory(chats.path / "tokenizer")
    found = find_export_ends(training, chats.path, tokens)
    assert list(found) == [*ends, DOCUMENT_END, TURN_END]
