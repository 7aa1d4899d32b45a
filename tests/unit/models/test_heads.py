"""The output head in fp32 with a model that computes in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from evergrad_manifest.training import Model
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.models.heads import make_full_precision
from evergrad_trainer.objectives.causal_lm import causal_lm_loss

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IDS = torch.arange(24).view(2, 12) % 17


def build(precision: str, **model: Any) -> Any:
    settings = Model.model_validate({"config": LLAMA, **model})
    plan = plan_model(settings, base_directory=Path(), vocab_size=257)
    return build_model(plan, seed=0, precision=precision)


@pytest.mark.capability("C-52")
@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_logits_are_fp32_products_of_bf16_activations(
    precision: str,
) -> None:
    plain, model = build(precision), build(precision, headPrecision="fp32")
    is_autocast = precision == "bf16-autocast"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        hidden = model.model(IDS).last_hidden_state
        logits, rounded = model(IDS).logits, plain(IDS).logits
    assert logits.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    expected = functional.linear(hidden.float(), model.lm_head.weight.float())
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, rounded.float())
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_loss_and_gradients_are_computed_from_fp32_logits(
    chunk_tokens: int | None,
) -> None:
    found = []
    for chunk in (None, chunk_tokens):
        model = build("bf16-autocast", headPrecision="fp32")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = causal_lm_loss(model, chunk_tokens=chunk)(IDS, IDS)
        loss.backward()
        found.append((loss.detach(), model.lm_head.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_linear_head_is_refused() -> None:
    with pytest.raises(ModelError, match="has no linear layer as its output head"):
        make_full_precision(torch.nn.Linear(2, 2))
