"""A model whose weights are created one by one has the same bits as a model that is built whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evergrad_manifest.training import Model
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import ModelPlan, build_model, plan_model
from evergrad_trainer.models.deferred import defer_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "a padding token, whose row is zero": {**LLAMA, "pad_token_id": 3},
    "tied embeddings": {**LLAMA, "tie_word_embeddings": True},
    "biases, norms with two weights, scaled projections": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
CPU = torch.device("cpu")


def plan(**model: Any) -> ModelPlan:
    return plan_model(Model.model_validate(model), base_directory=Path(), vocab_size=257)


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (one, other)
    )
    assert mine.keys() == theirs.keys()
    assert [
        name for name, value in mine.items() if not torch.equal(value, theirs[name])
    ] == []


@pytest.mark.capability("T-5")
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_initialised_one_by_one_are_bit_equal_to_a_whole_model(
    config: dict[str, Any], precision: str
) -> None:
    deferred = defer_model(plan(config=config), seed=7, precision=precision)
    assert deferred is not None and all(p.is_meta for p in deferred.model.parameters())
    deferred.materialise(CPU)
    assert_same_state(
        deferred.model, build_model(plan(config=config), seed=7, precision=precision)
    )


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_weights_of_a_directory_are_read_one_by_one(
    tmp_path: Path, shard_size: str
) -> None:
    whole = build_model(plan(config=LLAMA), seed=1, precision="fp32")
    whole.save_pretrained(tmp_path, max_shard_size=shard_size)
    deferred = defer_model(plan(path=str(tmp_path)), seed=7, precision="fp32")
    assert deferred is not None
    deferred.materialise(CPU)
    assert_same_state(deferred.model, whole)


def test_a_directory_with_other_tensor_names_is_loaded_completely(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_model(plan(config=LLAMA), seed=1, precision="fp32").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {f"other.{name}": value for name, value in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    assert defer_model(plan(path=str(tmp_path)), seed=7, precision="fp32") is None


def test_an_initialisation_that_cannot_be_replayed_builds_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    build: Any = LlamaRMSNorm.__init__

    def draws_for_itself(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        torch.rand(1)

    monkeypatch.setattr(LlamaRMSNorm, "__init__", draws_for_itself)
    assert defer_model(plan(config=LLAMA), seed=7, precision="fp32") is None


def two_saves(directory: Path) -> None:
    """A model in one file, and then another one in several, as two save_pretrained leave them."""
    for seed, size in ((1, "1GB"), (2, "20KB")):
        whole = build_model(plan(config=LLAMA), seed=seed, precision="fp32")
        whole.save_pretrained(directory, max_shard_size=size)


def test_a_directory_with_a_single_file_and_an_index_is_refused(tmp_path: Path) -> None:
    """One process would train one set of weights, and several processes the other."""
    two_saves(tmp_path)
    with pytest.raises(ModelError) as refused:
        plan(path=str(tmp_path))
    said = str(refused.value)
    assert "contains both model.safetensors and model.safetensors.index.json" in said
    assert said.startswith("spec.training.model.path: ")
    # Each of the two saves is a complete model.
    (tmp_path / "model.safetensors").unlink()
    deferred = defer_model(plan(path=str(tmp_path)), seed=7, precision="fp32")
    assert deferred is not None
    deferred.materialise(CPU)
    assert_same_state(
        deferred.model, build_model(plan(path=str(tmp_path)), seed=7, precision="fp32")
    )


def test_a_tensor_with_two_values_in_the_files_of_an_index_is_refused(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    whole = build_model(plan(config=LLAMA), seed=1, precision="fp32")
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: value.clone()}, last, metadata={"format": "pt"})
    assert plan(path=str(tmp_path)).weights == tmp_path
    save_file({**load_file(last), name: value + 1}, last, metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        plan(path=str(tmp_path))
    assert f"{name!r} has different values in {first.name} and {last.name}" in str(
        refused.value
    )
