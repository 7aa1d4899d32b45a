"""The task of two stages with a tiny model: its loss compared with all logits, its stages, and its
metrics."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_manifest.training.two_stage_kl import MEASURED
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.stream import BatchShape, TrainingStream
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.two_stage_kl import TwoStageKl
from evergrad_trainer.task import Modules

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
}


def training(**section: Any) -> Training:
    return Training.model_validate(
        {
            "recipe": "two_stage_kl",
            "model": {"config": LLAMA},
            "data": {
                "sources": [
                    {"name": "a", "path": "a.jsonl", "weight": 2.0},
                    {"name": "b", "path": "b.jsonl"},
                ],
                "sequenceLength": 8,
            },
            "batching": {"globalBatchSize": 4, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
            "runtime": {"precision": "fp32", "lossChunk": 5},
            "twoStageKl": {"stages": [{"tokens": 90}, {}], **section},
        }
    )


def task_of(**section: Any) -> TwoStageKl:
    return cast(TwoStageKl, load_task(training(**section), Path())[0])


class Windows:
    fill: Mapping[str, int] = {}

    def __init__(self, name: str, part: str) -> None:
        self.fingerprint = self.name = f"{name}/{part}"

    def __len__(self) -> int:
        return 5


def prepared(task: TwoStageKl, *, held_out: bool = True) -> Prepared:
    task.__dict__["tokenizer"] = SimpleNamespace(identity="bytes", end_of_document=256)
    task._open = lambda source, part: Windows(source.name, part)  # type: ignore[method-assign, assignment, return-value]
    sources = tuple(
        SimpleNamespace(name=name, train="train", held_out="held" if held_out else None)
        for name in "ab"
    )
    evaluation = (SimpleNamespace(name="book", train="train", held_out=None),)
    found = SimpleNamespace(
        sources=sources, evaluation=evaluation, tokenizer_identity="bytes"
    )
    return cast(Prepared, found)


def names_of(stage: Stage) -> dict[str, tuple[str, float]]:
    return {
        name: (cast(Windows, one).name, weight)
        for name, (one, weight) in stage.sources.items()
    }


@pytest.mark.capability("T-28", "T-29", "T-37")
def test_each_stage_has_its_mixture_and_the_second_stage_its_penalty() -> None:
    task = task_of(
        stages=[
            {"tokens": 90, "mixture": {"a": 1}},
            {"mixture": {"b": 0.7, "a": 0.3}, "beta": 2},
        ],
        estimator="forward",
    )
    first, second = task.stages(prepared(task))
    assert names_of(first) == {"a": ("a/train", 1.0)}
    assert names_of(second) == {"b": ("b/train", 0.7), "a": ("a/train", 0.3)}
    # Steps of 32 tokens.
    assert (first.until, second.until) == (3, None)
    assert first.options.penalty is None
    assert (second.options.penalty.estimator, second.options.penalty.beta) == (
        "forward",
        2.0,
    )


def test_the_key_order_of_a_mixture_has_no_effect() -> None:
    """A cluster's file is written with sorted keys, and the hash of the recipe is of sorted keys, too."""

    def opened(mixture: dict[str, float]) -> tuple[list[str], str]:
        task = task_of(stages=[{"tokens": 90}, {"mixture": mixture}])
        stages = task.stages(prepared(task))
        stream = TrainingStream(stages, seed=1, batching=BatchShape(4, 2))
        return list(stages[1].sources), stream.fingerprint

    names, fingerprint = opened({"b": 0.7, "a": 0.3})
    assert names == ["a", "b"]
    assert opened({"a": 0.3, "b": 0.7}) == (names, fingerprint)
    assert opened({"a": 0.7, "b": 0.3})[1] != fingerprint


@pytest.mark.acceptance("8d-8g", "input-T-29")
def test_a_share_that_is_too_small_is_reported_with_its_path_in_the_manifest() -> None:
    """It is the first of data.sources, and the second of the mixture."""
    task = task_of(
        stages=[{"tokens": 90, "mixture": {"b": 1}}, {"mixture": {"b": 1, "a": 1e-6}}]
    )
    where = (
        r"spec\.training\.twoStageKl\.stages\[1\]\.mixture\.a: 1e-06 is too small a share"
    )
    with pytest.raises(ConfigurationError, match=where):
        task.stages(prepared(task))


def test_the_metrics_that_a_manifest_may_name_are_the_measured_ones() -> None:
    assert tuple(TwoStageKl.measured) == MEASURED


def test_a_stage_without_a_mixture_has_all_sources_by_their_weights() -> None:
    task = task_of()
    first, second = task.stages(prepared(task))
    whole = {"a": ("a/train", 2.0), "b": ("b/train", 1.0)}
    assert names_of(first) == names_of(second) == whole
    assert (second.options.penalty.estimator, second.options.penalty.beta) == (
        "reverse",
        0.1,
    )


@pytest.mark.acceptance("8d-8j")
def test_a_beta_of_zero_is_zero_and_not_the_default() -> None:
    task = task_of(stages=[{"tokens": 90}, {"beta": 0}])
    assert task.stages(prepared(task))[1].options.penalty.beta == 0.0


def test_numbers_without_a_meaning_in_the_first_stage_are_absent() -> None:
    task = task_of()
    first, second = task.stages(prepared(task))
    assert set(first.without) == set(task.metrics) and not second.without


def test_each_stage_has_an_evaluation_set_of_its_own_sources() -> None:
    task = task_of(stages=[{"tokens": 90, "mixture": {"a": 1}}, {}])
    sets = {
        name: [cast(Windows, one).name for one in evaluator.sources]
        for name, evaluator in task.evaluators(prepared(task)).items()
    }
    assert sets == {
        "stage1": ["a/held"],
        "stage2": ["a/held", "b/held"],
        "book": ["book/train"],
    }
    assert list(task.evaluators(prepared(task, held_out=False))) == ["book"]


def models(task: TwoStageKl) -> Modules:
    """The model, and a reference that is not the same."""
    plan = plan_model(task.setup.training.model, base_directory=Path(), vocab_size=257)
    model = build_model(plan, seed=1, precision="fp32")
    modules = task.build(lambda: copy.deepcopy(model))
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in modules.frozen["reference"].parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    modules.frozen["reference"].requires_grad_(False).eval()
    return modules


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids[:, 1:].clone()
    labels[1, 5:] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1], "labels": labels}


def plainly(
    modules: Modules, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return sums of all logits of both models; ``loss`` and the divergences have gradients."""
    ids, labels = tensors["input_ids"], tensors["labels"].flatten()
    model: Any = modules.trained["model"]
    reference: Any = modules.frozen["reference"]
    is_asked = labels != IGNORE_INDEX
    log_p = model(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
    log_q = reference(input_ids=ids).logits.flatten(0, 1).log_softmax(-1)
    return {
        "loss": functional.nll_loss(
            log_p, labels, ignore_index=IGNORE_INDEX, reduction="sum"
        ),
        "reference": functional.nll_loss(
            log_q, labels, ignore_index=IGNORE_INDEX, reduction="sum"
        ),
        "forward": (log_q.exp() * (log_q - log_p)).sum(-1)[is_asked].sum(),
        "reverse": (log_p.exp() * (log_p - log_q)).sum(-1)[is_asked].sum(),
    }


def gradients(modules: Modules) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in modules.trained["model"].named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


@pytest.mark.capability("T-60", "T-62", "T-63", "T-68")
@pytest.mark.parametrize("estimator", ["nll_difference", "forward", "reverse"])
def test_the_loss_of_the_second_stage_equals_that_of_unchunked_logits(
    estimator: str,
) -> None:
    task = task_of(stages=[{"tokens": 90}, {"beta": 3}], estimator=estimator)
    modules, tensors = models(task), batch()
    stage = task.stages(prepared(task))[1]
    loss = task.loss(modules, tensors, stage)
    loss.total.backward()
    found = gradients(modules)

    known = plainly(modules, tensors)
    penalty = known.get(estimator, known["loss"] - known["reference"].detach())
    total = known["loss"] + 3 * penalty
    total.backward()
    expected = gradients(modules)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    parts = {name: value.item() for name, value in loss.parts.items()}
    assert parts == {
        "policy_loss": pytest.approx(known["loss"].item(), rel=1e-5),
        "reference_loss": pytest.approx(known["reference"].item(), rel=1e-5),
        "penalty": pytest.approx(penalty.item(), rel=1e-4, abs=1e-5),
        "kl": pytest.approx(known["reverse"].item(), rel=1e-4),
        # 16 positions, of which three have no label.
        "beta": 3.0 * 13,
    }
    assert parts.keys() == task.metrics.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.acceptance("8d-10d:two_stage_kl")
@pytest.mark.capability("T-62")
def test_the_published_form_has_the_gradient_of_the_loss_times_one_plus_beta() -> None:
    task = task_of(stages=[{"tokens": 90}, {"beta": 3}], estimator="nll_difference")
    modules, tensors = models(task), batch()
    first, second = task.stages(prepared(task))
    task.loss(modules, tensors, first).total.backward()
    plain = gradients(modules)
    task.loss(modules, tensors, second).total.backward()
    for name, gradient in gradients(modules).items():
        torch.testing.assert_close(gradient, 4.0 * plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.acceptance("8d-10f:two_stage_kl")
def test_an_evaluation_has_the_loss_of_the_model_without_the_penalty() -> None:
    task = task_of(stages=[{"tokens": 90}, {"beta": 3}])
    modules, tensors = models(task), batch()
    first, second = task.stages(prepared(task))
    measure = task.evaluators(prepared(task))["book"].measure
    assert measure is not None
    before, after = (measure(modules, tensors, stage) for stage in (first, second))
    assert before.parts == {} and after.parts.keys() == task.measured.keys()
    assert before.total.item() == pytest.approx(after.total.item(), rel=1e-6)
    known = plainly(modules, tensors)
    assert after.total.item() == pytest.approx(known["loss"].item(), rel=1e-5)
    assert after.parts["kl"].item() == pytest.approx(known["reverse"].item(), rel=1e-4)
