"""Greedy decoding, with and without the model's cache of earlier tokens."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_trainer.models import decoding
from evergrad_trainer.models.decoding import decode

END = 256
PROMPTS = [[*b"one two three"], [*b"4"], [*b"a longer prompt of some words"]]
CPU = torch.device("cpu")


def build(name: str, **further: Any) -> Any:
    torch.manual_seed(1)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if name == "mixtral":
        size |= {"num_local_experts": 2}
    if name == "gpt2":
        size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = AutoConfig.for_model(
        name,
        vocab_size=257,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        **size,
        **further,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@torch.no_grad()
def run(
    model: Any, prompts: list[list[int]] = PROMPTS, *, most: int = 12
) -> list[list[int]]:
    return decode(model, prompts, device=CPU, most=most, is_end=lambda ids: ids[-1] == END)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("qwen2", {}),
        ("mistral", {"sliding_window": 8}),
        ("mixtral", {"output_router_logits": True}),
    ],
)
def test_generated_ids_match_transformers(name: str, further: Any) -> None:
    model = build(name, **further)
    found = run(model)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        expected = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False
        )
        assert ids == expected[0, len(prompt) :].tolist()
    assert len({tuple(ids) for ids in found}) == 3


def test_the_key_value_cache_does_not_change_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    kept = run(model)
    monkeypatch.setattr(decoding, "_Cached", decoding._Whole)
    assert run(model) == kept


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_ends_at_the_last_position_of_the_model_and_the_others_continue(
    name: str,
) -> None:
    model = build(name)
    prompts = [[7] * 60, [8] * 3]
    long, short = run(model, prompts, most=30)
    assert len(long) <= 4
    assert short == run(model, prompts[1:], most=30)[0]


def test_an_empty_batch_generates_nothing() -> None:
    assert run(build("llama"), []) == []


@pytest.mark.parametrize("is_even", [True, False])
def test_every_rank_calls_the_model_the_maximum_number_of_times_if_others_take_part(
    is_even: bool,
) -> None:
    model = build("llama")
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        decode(
            model, [[1, 2]], device=CPU, most=5, is_end=lambda ids: True, is_even=is_even
        )
    assert len(calls) == (5 if is_even else 1)
