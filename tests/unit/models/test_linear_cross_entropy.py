"""The chunked loss of a linear head: equal to the whole one, with less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from evergrad_manifest.training import Model
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.objectives.linear_cross_entropy import find_head, linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 40, 16, 300


def leaves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[0, :7] = IGNORE_INDEX
    return hidden, weight, labels


def whole_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    logits = functional.linear(hidden, weight).flatten(0, 1).float()
    return functional.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS, 10 * TOKENS])
@pytest.mark.parametrize(("is_bf16", "tolerance"), [(False, 1e-5), (True, 2e-2)])
def test_loss_and_gradients_equal_those_of_unchunked_logits(
    chunk_tokens: int, is_bf16: bool, tolerance: float
) -> None:
    results = []
    for chunked in (False, True):
        hidden, weight, labels = leaves()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            loss = (
                linear_cross_entropy(
                    hidden,
                    weight,
                    labels,
                    chunk_tokens=chunk_tokens,
                    ignore_index=IGNORE_INDEX,
                )
                if chunked
                else whole_loss(hidden, weight, labels)
            )
        (loss * 0.25).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype
        assert float((one - other).norm() / one.norm()) < tolerance


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_weights_get_no_gradient_and_change_no_other(frozen: str) -> None:
    found = []
    for is_frozen in (False, True):
        hidden, weight, labels = leaves()
        if is_frozen:
            (hidden if frozen == "hidden" else weight).requires_grad_(False)
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=7, ignore_index=IGNORE_INDEX
        )
        loss.backward()
        found.append((loss.detach(), weight.grad if frozen == "hidden" else hidden.grad))
        assert ((hidden if frozen == "hidden" else weight).grad is None) == is_frozen
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that any operation gives back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_as_large_as_the_logits_of_all_tokens() -> None:
    hidden, weight, labels = leaves()
    with LargestTensor() as largest:
        linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=4, ignore_index=IGNORE_INDEX
        ).backward()
    assert largest.elements == VOCABULARY * WIDTH < VOCABULARY * TOKENS


def test_an_evaluation_computes_no_gradients() -> None:
    hidden, weight, labels = leaves()
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=4, ignore_index=IGNORE_INDEX
        )
    assert not loss.requires_grad and torch.allclose(
        loss, whole_loss(hidden, weight, labels)
    )


def make_model(**config: Any) -> Any:
    values = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Model.model_validate({"config": {"model_type": "llama", **values, **config}})
    return build_model(
        plan_model(model, base_directory=Path(), vocab_size=257), seed=0, precision="fp32"
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_trains_the_same_with_and_without_chunks(is_tied: bool) -> None:
    ids = torch.arange(24).reshape(2, 12)
    whole, chunked = (
        make_model(tie_word_embeddings=is_tied),
        make_model(tie_word_embeddings=is_tied),
    )
    causal_lm_loss(whole)(ids, ids).backward()
    causal_lm_loss(chunked, chunk_tokens=5)(ids, ids).backward()
    assert (
        chunked(input_ids=ids).logits.shape[-1] == 257
    )  # outside of the loss the model is as it was
    others = dict(chunked.named_parameters())
    for name, parameter in whole.named_parameters():
        assert torch.allclose(parameter.grad, others[name].grad, rtol=1e-4, atol=1e-6), name


def test_a_head_that_is_more_than_a_linear_layer_is_refused() -> None:
    model = make_model()
    model.config.model_type = "gemma2"  # its logits are capped
    with pytest.raises(ValueError, match="the head of gemma2 is not plain"):
        find_head(model)
