"""Settings with which weights compute another function, and settings that change nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_manifest.training import Model
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.models.compatibility import compare_functions
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.state.providers import module_tensors

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def describe(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    settings = Model.model_validate({"config": {**config, **changes}})
    return plan_model(settings, base_directory=Path(), vocab_size=257).describe()


def compare(
    config: dict[str, Any], stored: dict[str, Any], own: dict[str, Any]
) -> tuple[list[str], list[str]]:
    problems, lines = compare_functions(
        describe(config, **stored), describe(config, **own), where="base", field="here"
    )
    return [one.what.split()[2] for one in problems], [line.split()[0] for line in lines]


@pytest.mark.parametrize(
    ("stored", "own", "key"),
    [
        (
            {},
            {"rope_parameters": {**ROPE, "rope_theta": 3.0}},
            "rope_parameters.rope_theta",
        ),
        ({}, {"hidden_act": "relu"}, "hidden_act"),
        ({}, {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({}, {"num_attention_heads": 8, "num_key_value_heads": 4}, "num_attention_heads"),
        ({}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_a_setting_that_changes_the_computation_of_stored_weights_is_refused_by_its_key(
    stored: dict[str, Any], own: dict[str, Any], key: str
) -> None:
    refused, _ = compare(LLAMA, stored, own)
    assert key in refused


@pytest.mark.parametrize(
    ("config", "stored", "own", "listed"),
    [
        (LLAMA, {}, {"attention_dropout": 0.1}, ["attention_dropout"]),
        (LLAMA, {}, {"max_position_embeddings": 64}, ["max_position_embeddings"]),
        (LLAMA, {"eos_token_id": 7}, {"eos_token_id": 256}, ["eos_token_id"]),
        # An architecture's default, which an export replaces by the tokenizer's id.
        (LLAMA, {}, {"eos_token_id": 256, "bos_token_id": None}, []),
        (GPT2, {"eos_token_id": 256, "bos_token_id": None}, {}, []),
        (LLAMA, {}, {"initializer_range": 0.1}, ["initializer_range"]),
        # Other spellings of the same settings.
        (LLAMA, {}, {"num_key_value_heads": 4, "head_dim": 8}, []),
        (LLAMA, {}, {"hidden_act": "swish"}, []),
        (LLAMA, {}, {"rope_parameters": {"rope_theta": 10000}}, []),
        (GPT2, {}, {"n_inner": 128, "resid_pdrop": 0.0}, ["resid_pdrop"]),
        (GPT2, {}, {"activation_function": "gelu_pytorch_tanh"}, []),
    ],
)
def test_a_setting_without_effect_is_listed_and_another_spelling_is_not(
    config: dict[str, Any], stored: dict[str, Any], own: dict[str, Any], listed: list[str]
) -> None:
    assert compare(config, stored, own) == ([], listed)


def test_more_positions_change_the_function_if_rotary_positions_depend_on_them() -> None:
    dynamic = {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}
    refused, _ = compare(LLAMA, dynamic, {**dynamic, "max_position_embeddings": 64})
    assert refused == ["max_position_embeddings"]


def save(directory: Path, **changes: Any) -> Any:
    settings = Model.model_validate({"config": {**LLAMA, **changes}})
    plan = plan_model(settings, base_directory=directory, vocab_size=257)
    model = build_model(plan, seed=1, precision="fp32")
    model.save_pretrained(directory)
    return model


def load(directory: Path, **changes: Any) -> tuple[Any, list[str]]:
    settings = Model.model_validate({"config": {**LLAMA, **changes}})
    plan = plan_model(settings, base_directory=directory, vocab_size=257)
    model = build_model(plan, seed=2, precision="fp32")
    state = {f"model.{name}": one for name, one in module_tensors(model).items()}
    lines = load_model_directory(directory, state, config=model.config)
    return model, lines


def test_weights_of_a_directory_are_loaded_only_into_an_equivalent_model(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path)
    loaded, lines = load(tmp_path, attention_dropout=0.5)
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
    assert [line.split()[0] for line in lines] == ["attention_dropout"]
    with pytest.raises(ModelError) as caught:
        load(tmp_path, rms_norm_eps=0.1)
    (problem,) = caught.value.problems
    assert problem.path == "spec.training.initFrom.path"
    assert problem.what == (
        f"{tmp_path} has rms_norm_eps 1e-06, and spec.training.model has 0.1"
    )


def contradict(directory: Path) -> Any:
    """Save a model whose configuration ties its head to its embeddings."""
    model = save(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": True})
    )
    return model


def test_a_head_that_differs_from_the_embeddings_is_trained_as_its_own_tensor(
    tmp_path: Path,
) -> None:
    from evergrad_trainer.models.build import build_empty_model
    from evergrad_trainer.models.deferred import defer_model

    model = contradict(tmp_path)
    plan = plan_model(
        Model.model_validate({"path": "."}), base_directory=tmp_path, vocab_size=257
    )
    assert plan.untied == ("lm_head.weight", "model.embed_tokens.weight")
    assert plan.describe()["config"]["tie_word_embeddings"] is False
    # Start, resume, export and shards build one model.
    built = build_model(plan, seed=0, precision="fp32")
    deferred = defer_model(plan, seed=0, precision="fp32")
    assert deferred is not None
    others = (
        build_model(plan, seed=0, precision="fp32", with_weights=False),
        build_empty_model(plan, precision="fp32"),
        deferred.model,
    )
    names = dict(built.named_parameters()).keys()
    assert all(dict(one.named_parameters()).keys() == names for one in others)
    assert torch.equal(built.lm_head.weight, model.lm_head.weight)
    assert torch.equal(dict(deferred.weights or ())["lm_head.weight"], model.lm_head.weight)


def test_a_head_that_equals_the_embeddings_stays_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    contradict(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plan = plan_model(
        Model.model_validate({"path": "."}), base_directory=tmp_path, vocab_size=257
    )
    assert plan.untied is None
    built = build_model(plan, seed=0, precision="fp32")
    assert built.lm_head.weight is built.model.embed_tokens.weight


def test_an_override_that_would_lose_a_head_is_refused(tmp_path: Path) -> None:
    contradict(tmp_path)
    settings = Model.model_validate(
        {"path": ".", "configOverrides": {"tie_word_embeddings": True}}
    )
    with pytest.raises(ModelError, match="one of them would be lost"):
        plan_model(settings, base_directory=tmp_path, vocab_size=257)
