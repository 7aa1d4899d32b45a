"""Documents of one row do not see each other, in each architecture of the list."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_manifest.training import Data
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.documents import (
    MASKED,
    check_packing,
    keep_apart,
    why_not_apart,
)
from evergrad_trainer.objectives.causal_lm import causal_lm_loss

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_local_experts": 2,
}
DOCUMENTS = [[3, 4, 5, 6, 7], [8, 9, 3], [11, 12, 13, 14]]


def build(name: str, **further: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    known = AutoConfig.for_model(name).to_dict()
    attributes = {
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
    }
    values = {}
    for key, value in SMALL.items():
        for one in (key, attributes.get(key)):
            if one in known:
                values[one] = value
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if dropout in known:
            values[dropout] = 0.0
    config = AutoConfig.for_model(name, **values, **further)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def pack_by_hand(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: each document's tokens but its last, labelled with the next."""
    inputs, labels, positions = [], [], []
    for document in DOCUMENTS:
        inputs += document[:-1]
        labels += document[1:]
        positions += range(len(document) - 1)
    rest = size - len(inputs)
    inputs, labels = inputs + [0] * rest, labels + [IGNORE_INDEX] * rest
    rows = inputs, labels, [*positions, *[0] * rest]
    first, second, third = (torch.tensor([row]) for row in rows)
    return first, second, third


@pytest.mark.parametrize("name", sorted(MASKED))
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_loss_of_packed_documents_equals_the_sum_over_single_documents(
    name: str, chunk: int | None
) -> None:
    loss_sum = causal_lm_loss(build(name), chunk_tokens=chunk)
    alone = sum(
        loss_sum(torch.tensor([one[:-1]]), torch.tensor([one[1:]])) for one in DOCUMENTS
    )
    packed = loss_sum(*pack_by_hand(16))
    assert torch.isclose(packed, torch.as_tensor(alone), rtol=1e-5, atol=0)

    # The test would prove nothing if the model did not attend to earlier tokens.
    inputs, labels, _ = pack_by_hand(16)
    assert not torch.isclose(
        loss_sum(inputs, labels), torch.as_tensor(alone), rtol=1e-5, atol=0
    )


def test_a_mixture_of_experts_with_router_loss_keeps_documents_apart() -> None:
    model = build("mixtral", output_router_logits=True)
    loss_sum = causal_lm_loss(model)
    alone = sum(
        loss_sum(torch.tensor([one[:-1]]), torch.tensor([one[1:]])) for one in DOCUMENTS
    )
    # Without what fills the row up, on which nothing depends here and the router loss does.
    packed = loss_sum(*pack_by_hand(9))
    assert torch.isclose(packed, torch.as_tensor(alone), rtol=1e-5, atol=0)
    model.train()
    assert loss_sum(*pack_by_hand(9)) > packed


def test_a_router_loss_with_zero_weight_needs_no_mask() -> None:
    """transformers computes it nevertheless, but has no mask of documents."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.0).train()
    loss_sum = causal_lm_loss(model)
    alone = sum(
        loss_sum(torch.tensor([one[:-1]]), torch.tensor([one[1:]])) for one in DOCUMENTS
    )
    packed = loss_sum(*pack_by_hand(16))
    assert torch.isclose(packed, torch.as_tensor(alone), rtol=1e-5, atol=0)


def test_the_gradients_of_packed_documents_equal_those_of_single_documents() -> None:
    model = build("llama")
    loss_sum = causal_lm_loss(model)
    loss_sum(*pack_by_hand(16)).backward()
    packed = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    for one in DOCUMENTS:
        loss_sum(torch.tensor([one[:-1]]), torch.tensor([one[1:]])).backward()
    alone = [one.grad for one in model.parameters() if one.grad is not None]
    assert packed
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


def test_a_token_attends_only_to_earlier_tokens_of_its_document() -> None:
    mask = keep_apart(torch.tensor([[0, 1, 0, 1, 0]]))["attention_mask"]
    assert mask.int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [0, 0, 1, 0, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 0, 0, 1],
            ]
        ]
    ]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AutoConfig.for_model("mamba"), "the attention of mamba is not known"),
        (AutoConfig.for_model("mistral", sliding_window=8), "sees 8 tokens here"),
    ],
)
def test_a_model_that_cannot_keep_documents_apart_is_reported(
    config: object, said: str
) -> None:
    assert said in (why_not_apart(config, 16) or "")


@pytest.mark.parametrize(
    "config",
    [
        AutoConfig.for_model("llama"),
        AutoConfig.for_model("qwen2", sliding_window=8, use_sliding_window=False),
        AutoConfig.for_model("mistral", sliding_window=16),
        AutoConfig.for_model("mistral", sliding_window=None),
    ],
)
def test_a_model_that_keeps_documents_apart_is_accepted(config: object) -> None:
    assert why_not_apart(config, 16) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mixtral", "Set data.packing: documents, or router_aux_loss_coef: 0 in"),
        ("qwen3_moe", "Set router_aux_loss_coef: 0 in"),
    ],
)
def test_a_router_loss_over_padding_is_refused(name: str, remedy: str) -> None:
    def found(
        packing: str, *, coefficient: float = 0.1, has_loss: bool = True
    ) -> list[str]:
        config = AutoConfig.for_model(
            name, output_router_logits=has_loss, router_aux_loss_coef=coefficient
        )
        data = Data.model_validate(
            {
                "sources": [{"name": "rows", "path": "rows.jsonl"}],
                "sequenceLength": 16,
                "packing": packing,
            }
        )
        return [str(one) for one in check_packing(config, data, reads_rows=True)]

    (said,) = found("none")
    assert said.startswith(
        f"spec.training.data.packing: none cannot be combined with the router loss of {name}; it is"
    )
    assert remedy in said
    assert found("none", coefficient=0.0) == found("none", has_loss=False) == []
    assert len(found("documents")) == (name not in MASKED)
