"""The loss of pairs: by hand, however they are cut into batches and filled up, and by chunks of tokens."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_manifest.derive import derive_steps
from evergrad_manifest.training import Preference, Training
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.heads import make_full_precision
from evergrad_trainer.models.memory import ModelFacts, memory_of
from evergrad_trainer.objectives.token_log_probs import row_log_probs, token_log_probs
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.preference import task as preference_task
from evergrad_trainer.recipes.preference.loss import LogProbs, pair_losses, pair_metrics
from evergrad_trainer.task import Loss, Modules, Source, Stage, Task
from evergrad_trainer.training.limits import build_limits

ROWS = [
    {"prompt": "ab", "chosen": "c", "rejected": "b"},
    {"prompt": "", "chosen": "abc", "rejected": "ccccca"},
    {"prompt": "abca", "chosen": "bb", "rejected": "c"},
]


class Bytes(nn.Module):
    """Gives the byte after a byte a probability of three quarters, and the 256 others the rest; with
    ``slope`` 0, all are equal."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 257)
        following = (input_ids + 1).clamp(max=256)
        logits.scatter_(-1, following[..., None], math.log(3 * 256))
        return SimpleNamespace(logits=logits * self.slope)


def settings(**values: Any) -> Preference:
    return Preference.model_validate(values)


def one_pair(*values: float) -> tuple[LogProbs, LogProbs]:
    """Log-probabilities of chosen and rejected under the model, then under the reference."""
    a, b, c, d = (torch.tensor([one]) for one in values)
    return LogProbs(a, b), LogProbs(c, d)


@pytest.mark.acceptance("number-A-80")
@pytest.mark.capability("A-80")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # log(1 + exp(-0.3)); with a tenth of log(1 + exp(0.3)); (1.5 - 1 / 0.4)²; 1 - 0.3.
        ({}, 0.5543552),
        ({"labelSmoothing": 0.1}, 0.5843552),
        ({"loss": "ipo"}, 1.0),
        ({"loss": "hinge"}, 0.7),
    ],
)
def test_the_loss_of_a_pair_matches_the_manual_calculation(
    values: dict[str, Any], expected: float
) -> None:
    # Log-ratios 1 and -0.5, their difference 1.5.
    pair = one_pair(-1.0, -3.0, -2.0, -2.5)
    found = pair_losses(*pair, settings(beta=0.2, **values))
    assert found.tolist() == pytest.approx([expected], rel=1e-6)


def test_a_hinge_loss_is_zero_beyond_its_margin_and_a_squared_loss_grows_on_both_sides() -> (
    None
):
    far = one_pair(-1.0, -21.0, -2.0, -2.0)
    assert pair_losses(*far, settings(beta=0.2, loss="hinge")).item() == 0.0
    assert pair_losses(*far, settings(beta=0.2, loss="ipo")).item() == 17.5**2


def test_rewards_are_log_ratios_times_beta() -> None:
    found = pair_metrics(*one_pair(-1.0, -3.0, -2.0, -2.5), settings(beta=0.2))
    assert {name: round(float(value), 6) for name, value in found.items()} == {
        "accuracy": 1.0,
        "margin": 0.3,
        "chosen_reward": 0.2,
        "rejected_reward": -0.1,
        "chosen_log_probability": -1.0,
        "rejected_log_probability": -3.0,
    }
    same = pair_metrics(*one_pair(-1.0, -3.0, -1.0, -3.0), settings())
    assert float(same["accuracy"]) == float(same["margin"]) == 0.0


def training(**changes: Any) -> Training:
    data = {"sources": [{"name": "pairs", "path": "pairs.jsonl"}], "sequenceLength": 12}
    values: dict[str, Any] = {
        "recipe": "preference",
        "model": {"config": {"model_type": "llama"}},
        "data": {**data, **changes.pop("data", {})},
        "batching": {"globalBatchSize": 2, "microBatchSize": 1},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 10},
    }
    return Training.model_validate({**values, **changes})


def open_task(folder: Path, recipe: Training) -> tuple[Task, Source, Stage]:
    """The task, and its only source over ROWS."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "pairs.jsonl").write_text(text)
    prepared = prepare(
        recipe, base_directory=folder, prepared_directory=folder / "prepared", workers=1
    )
    task, _ = load_task(recipe, folder)
    (stage,) = task.stages(prepared)
    ((source, _weight),) = stage.sources.values()
    return task, source, stage


@pytest.mark.acceptance("8d-13a:preference")
@pytest.mark.capability("A-80")
def test_only_tokens_of_the_completions_count(tmp_path: Path) -> None:
    task, source, stage = open_task(tmp_path, training(preference={"beta": 0.1}))
    model = Bytes()
    modules = Modules(trained={"model": model}, frozen={"reference": Bytes(0.0)})
    rows = source.read([0])
    found = task.loss(modules, rows.tensors, stage)
    # Chosen: c after b, then the end after c. Rejected: b after b, then the end after b.
    right, wrong = math.log(3 / 4), math.log(1 / 1024)
    assert float(found.parts["chosen_log_probability"]) == pytest.approx(right + wrong)
    assert float(found.parts["rejected_log_probability"]) == pytest.approx(2 * wrong)
    # The reference finds both completions, of two tokens each, equally likely.
    margin = 0.1 * (right - wrong)
    assert float(found.parts["margin"]) == pytest.approx(margin, rel=1e-5)
    assert float(found.total.detach()) == pytest.approx(
        math.log1p(math.exp(-margin)), rel=1e-6
    )
    assert rows.weight == 1


def small_models() -> Modules:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model, reference = (
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for _ in range(2)
    )
    return Modules(trained={"model": model}, frozen={"reference": reference})


def numbers(loss: Loss) -> list[float]:
    return [float(one.detach()) for one in (loss.total, *loss.parts.values())]


def test_the_sums_are_independent_of_batch_split_and_sample_length(
    tmp_path: Path,
) -> None:
    modules = small_models()
    task, source, stage = open_task(tmp_path, training())
    together = numbers(task.loss(modules, source.read([0, 1, 2]).tensors, stage))
    alone = [
        numbers(task.loss(modules, source.read([at]).tensors, stage)) for at in range(3)
    ]
    assert [sum(one) for one in zip(*alone, strict=True)] == pytest.approx(
        together, rel=1e-5
    )

    longer, its_source, its_stage = open_task(
        tmp_path, training(data={"sequenceLength": 40})
    )
    found = longer.loss(modules, its_source.read([0, 1, 2]).tensors, its_stage)
    assert numbers(found) == pytest.approx(together, rel=1e-5)


def test_padding_of_an_evaluation_batch_adds_nothing(tmp_path: Path) -> None:
    modules = small_models()
    task, source, stage = open_task(tmp_path, training())
    batch = EvaluationSet("pairs", [source], micro_batch_size=8).batch(0)
    assert batch.tensors["labels"].shape == (8, 2, 12) and batch.weight == 3
    assert not (batch.tensors["labels"][3:] != IGNORE_INDEX).any()
    whole = task.loss(modules, source.read([0, 1, 2]).tensors, stage)
    assert numbers(task.loss(modules, batch.tensors, stage)) == pytest.approx(
        numbers(whole), rel=1e-5
    )


def test_only_the_policy_model_gets_gradients_and_they_match_the_loss(
    tmp_path: Path,
) -> None:
    """By finite differences: the change after a step along the gradient."""
    modules = small_models()
    task, source, stage = open_task(tmp_path, training(preference={"beta": 0.5}))
    tensors = source.read([0, 1, 2]).tensors
    model, reference = (
        modules.trained["model"].double(),
        modules.frozen["reference"].double(),
    )
    reference.requires_grad_(False)
    task.loss(modules, tensors, stage).total.backward()
    slope = sum(
        float((one.grad**2).sum()) for one in model.parameters() if one.grad is not None
    )
    step = 1e-3
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for one in model.parameters():
                one += sign * step * one.grad
            values.append(float(task.loss(modules, tensors, stage).total))
            for one in model.parameters():
                one -= sign * step * one.grad
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
def test_chunked_log_probabilities_and_gradients_match_unchunked_ones(
    chunk: int,
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 5, 4), torch.randn(7, 4)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 3:] = labels[1, 0] = IGNORE_INDEX
    weights = torch.randn(2, 5)
    found = []
    for is_chunked in (False, True):
        own, its = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if is_chunked:
            values = token_log_probs(own, labels, head=its, chunk_tokens=chunk)
        else:
            values = token_log_probs(functional.linear(own, its), labels)
        (values * weights).sum().backward()
        found.append((values.detach(), own.grad, its.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert found[0][0][labels == IGNORE_INDEX].tolist() == [0.0] * 3


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_parameters_get_no_gradient_from_chunks_and_change_no_other(
    frozen: int,
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 6, 4), torch.randn(7, 4)
    labels = torch.randint(0, 7, (1, 6))
    found = []
    for is_frozen in (False, True):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        leaves[frozen].requires_grad_(not is_frozen)
        token_log_probs(leaves[0], labels, head=leaves[1], chunk_tokens=4).sum().backward()
        assert (leaves[frozen].grad is None) == is_frozen
        found.append(leaves[1 - frozen].grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_head_in_fp32_gives_fp32_log_probabilities_in_chunks_too(
    chunk: int | None,
) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", num_hidden_layers=1, vocab_size=32, **shape)
    found = []
    for precision in (None, "fp32"):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        if precision is not None:
            make_full_precision(model)
        inputs = torch.arange(8).view(1, 8)
        found.append(row_log_probs(model, inputs, inputs, chunk_tokens=chunk).detach())
    hidden = model.model(inputs).last_hidden_state.float()
    logits = functional.linear(hidden, model.lm_head.weight.float())
    expected = token_log_probs(logits, inputs).sum(dim=1)
    torch.testing.assert_close(found[1], expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_chunks_are_bit_equal_to_bf16_products_under_autocast_including_backward() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 6, 4), torch.randn(7, 4)
    labels = torch.randint(0, 7, (1, 6))
    found = []
    for is_chunked in (False, True):
        own, its = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if is_chunked:
                values = token_log_probs(own, labels, head=its, chunk_tokens=6)
            else:
                values = token_log_probs(functional.linear(own, its), labels)
        values.sum().backward()
        found.append((values.detach(), own.grad, its.grad))
    (whole, *_), (chunked, *_) = found
    assert torch.equal(whole, chunked) and whole.dtype == torch.float32
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_model_that_equals_its_reference_has_zero_reward_with_bf16_products(
    tmp_path: Path, chunk: int | None, dtype: torch.dtype
) -> None:
    """``dtype``: of the weights. Sums over tokens and the loss are fp32 in any case."""
    modules = small_models()
    model, reference = (
        modules.trained["model"].to(dtype),
        modules.frozen["reference"].to(dtype),
    )
    reference.load_state_dict(model.state_dict())
    task, source, stage = open_task(tmp_path, training(runtime={"lossChunk": chunk}))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        found = task.loss(modules, source.read([0, 1, 2]).tensors, stage)
    assert found.total.dtype == torch.float32
    assert found.total.item() == pytest.approx(3 * math.log(2), rel=1e-6)
    names = ("margin", "chosen_reward", "rejected_reward", "accuracy")
    assert [found.parts[name].item() for name in names] == [0.0] * 4
    found.total.backward()
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    assert bool(head.grad.abs().sum() > 0) and head.grad.dtype == dtype


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_chunked_loss_equals_the_unchunked_loss(
    tmp_path: Path, chunk: int | None
) -> None:
    modules = small_models()
    task, source, stage = open_task(tmp_path, training())
    whole = task.loss(modules, source.read([0, 1]).tensors, stage)
    other, _, _ = open_task(tmp_path, training(runtime={"lossChunk": chunk}))
    found = other.loss(modules, source.read([0, 1]).tensors, stage)
    assert numbers(found) == pytest.approx(numbers(whole), rel=1e-5)


def test_the_reference_has_the_step_at_which_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the newest checkpoint in that directory, with which the rewards would not start at 0."""
    asked: list[tuple[Path, int | None]] = []

    def load(path: Path, state: Any, *, step: int | None) -> SimpleNamespace:
        asked.append((path, step))
        return SimpleNamespace(step=step or 6, extra={})

    monkeypatch.setattr(preference_task, "load_weights", load)
    (tmp_path / "theirs").mkdir()
    begun = {"initFrom": {"path": "theirs", "step": 3}}
    for changes in (begun, {**begun, "preference": {"reference": "theirs"}}):
        task, _, _ = open_task(tmp_path, training(**changes))
        task.build(Bytes)
    # The named reference is not a part of the state that the run begins with.
    assert asked == [(tmp_path / "theirs", 3), (tmp_path / "theirs", None)]


def test_a_pair_counts_two_rows_of_the_token_horizon_and_of_the_memory() -> None:
    pairs = training(horizon={"tokens": 480})
    rows = training(recipe="sft")
    assert (pairs.sample_tokens, rows.sample_tokens) == (24, 12)
    # In the mean of a step, each pair counts once, but each token of a row counts.
    assert (pairs.sample_weight, rows.sample_weight) == (1, 12)
    # Steps of two pairs.
    assert derive_steps(pairs, num_samples=100).total_steps == 10
    saving = training(checkpoint={"every": {"tokens": 480}})
    saves = build_limits(saving, total_steps=20, stop_after_steps=None).save_every
    assert saves is not None
    assert [step for step in range(1, 21) if saves.is_due(step)] == [10, 20]

    facts = ModelFacts(
        parameters=10**6, hidden_size=64, num_layers=2, vocab_size=1000, max_positions=None
    )
    plan: dict[str, Any] = {"world_size": 1, "on_accelerator": False, "compiles": False}
    of_pairs = memory_of(facts, pairs, **plan)
    batching = {"globalBatchSize": 4, "microBatchSize": 2}
    of_rows = memory_of(facts, training(recipe="sft", batching=batching), **plan)
    assert (of_pairs.activations, of_pairs.logits) == (of_rows.activations, of_rows.logits)
    # The reference: its weights, and their copies in the type of the products.
    assert of_pairs.state - of_rows.state == (4 + 2) * facts.parameters
