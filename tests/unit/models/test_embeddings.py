"""Embeddings: more rows for a larger vocabulary, and noise that belongs to the slot."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_manifest.training import Model
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import (
    ModelPlan,
    build_empty_model,
    build_model,
    plan_model,
)
from evergrad_trainer.models.embeddings import padded_size
from evergrad_trainer.models.randomness import Purpose, seed_generators

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def plan(base: Path, *, vocab_size: int = 257, **model: Any) -> ModelPlan:
    return plan_model(
        Model.model_validate(model), base_directory=base, vocab_size=vocab_size
    )


def save(directory: Path, **config: Any) -> Any:
    one = plan(directory, vocab_size=20, config={**LLAMA, **config})
    model = build_model(one, seed=5, precision="fp32")
    model.save_pretrained(directory / "stored")
    return model


@pytest.mark.parametrize(
    ("rows", "multiple_of", "padded"), [(9, 1, 9), (9, 8, 16), (16, 8, 16)]
)
def test_rows_are_padded_to_a_multiple(rows: int, multiple_of: int, padded: int) -> None:
    assert padded_size(rows, multiple_of=multiple_of) == padded


@pytest.mark.capability("C-51")
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_of_a_stored_model_grow_to_the_vocabulary_of_the_tokenizer(
    tmp_path: Path, is_tied: bool
) -> None:
    stored = save(tmp_path, tie_word_embeddings=is_tied)
    one = plan(tmp_path, vocab_size=30, path="stored", resizeEmbeddings={"multipleOf": 8})
    assert one.config is not None and one.config.vocab_size == 32
    model = build_model(one, seed=0, precision="fp32")
    for table, before in (
        (model.get_input_embeddings(), stored.get_input_embeddings()),
        (model.get_output_embeddings(), stored.get_output_embeddings()),
    ):
        assert table.weight.shape == (32, 16)
        assert torch.equal(table.weight[:20], before.weight)
        mean = before.weight.detach().double().mean(dim=0).float()
        torch.testing.assert_close(
            table.weight[20:], mean.expand(12, 16), rtol=0, atol=1e-7
        )
    # The bits do not depend on the seed, and a checkpoint finds the same shapes.
    again = build_model(one, seed=9, precision="fp32")
    assert torch.equal(
        again.get_input_embeddings().weight, model.get_input_embeddings().weight
    )
    empty = dict(build_empty_model(one, precision="fp32").named_parameters())
    assert {name: value.shape for name, value in empty.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    assert one.describe()["config"]["vocab_size"] == 32


def test_embeddings_never_shrink_and_are_refused_if_too_small(
    tmp_path: Path,
) -> None:
    save(tmp_path)
    one = plan(tmp_path, vocab_size=4, path="stored", resizeEmbeddings={"multipleOf": 1})
    assert one.config is not None and one.config.vocab_size == 20
    assert (
        build_model(one, seed=0, precision="fp32").get_input_embeddings().weight.shape[0]
        == 20
    )
    with pytest.raises(ModelError, match=r"or model.resizeEmbeddings: \{multipleOf: 8\}"):
        plan(tmp_path, vocab_size=30, path="stored")


def disturbed(model: Any, *, step: int = 3, slot: int = 1) -> torch.Tensor:
    seed_generators(7, step, slot, Purpose.FORWARD)
    found: torch.Tensor = model.get_input_embeddings()(torch.arange(12).view(2, 6))
    return found.detach()


@pytest.mark.acceptance("number-C-37")
@pytest.mark.capability("C-37")
def test_noise_depends_on_step_and_slot_and_stays_within_its_bound(tmp_path: Path) -> None:
    plain = build_model(plan(tmp_path, config=LLAMA), seed=0, precision="fp32")
    noisy = build_model(
        plan(tmp_path, config=LLAMA, embeddingNoise=5), seed=0, precision="fp32"
    )
    noise = disturbed(noisy) - disturbed(plain)
    # Six tokens of sixteen values each.
    most = 5 / math.sqrt(6 * 16)
    assert 0.9 * most < float(noise.abs().max()) <= most * (1 + 1e-6)
    assert abs(float(noise.mean())) < 0.2 * most
    assert torch.equal(disturbed(noisy), disturbed(noisy))
    assert not torch.equal(disturbed(noisy), disturbed(noisy, slot=2))
    assert not torch.equal(disturbed(noisy), disturbed(noisy, step=4))
    assert torch.equal(disturbed(noisy.eval()), disturbed(plain))
