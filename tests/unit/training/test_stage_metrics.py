"""Metrics that a stage is without: not there in its steps and evaluations, and no shorter exchange between
ranks."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest
import torch

from evergrad_manifest.errors import InputError
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.distributed.world import World
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Loss
from evergrad_trainer.training.evaluation import Measure
from evergrad_trainer.training.exchange import NUM_FLAGS, Sums
from evergrad_trainer.training.task_adapter import build_loss

FIRST, SECOND = Stage({}, until=3, without=("kl",)), Stage({})
LENGTHS: list[int] = []


class Counting(World):
    """Notes how long the vectors are that ranks exchange."""

    def sum_integers(self, values: torch.Tensor) -> torch.Tensor:
        LENGTHS.append(len(values))
        return values


class Two:
    """Has a metric in each stage, and another in the second alone."""

    metrics: ClassVar[Mapping[str, str]] = {"error": "Error.", "kl": "Divergence."}

    def loss(self, modules: Any, batch: Any, stage: Stage) -> Loss:
        parts = {"error": torch.tensor(4.0)}
        if stage is SECOND or batch:
            parts["kl"] = torch.tensor(6.0)
        return Loss(torch.tensor(8.0, requires_grad=True), parts)


def metrics_of(stage: Stage) -> dict[str, float]:
    world = Counting(generation=1, rank=0, size=1, device=torch.device("cpu"))
    sums = Sums(
        1,
        world,
        (False,) * NUM_FLAGS,
        num_slots=1,
        names=tuple(Two.metrics),
        without=stage.without,
    )
    sums.add(0, Batch({}, weight=2, samples=(), hash=0), Two().loss(None, None, stage))
    totals = sums.exchange(torch.tensor(1.0), 0.0)
    outcome = totals.outcome(
        1, skipped=None, problems=(), learning_rate=0.1, grad_norm=1.0, seconds={}
    )
    return outcome.metrics


def test_a_step_has_the_metrics_of_its_stage_and_all_stages_exchange_equal_lengths() -> (
    None
):
    LENGTHS.clear()
    assert metrics_of(FIRST) == {"error": 2.0}
    assert metrics_of(SECOND) == {"error": 2.0, "kl": 3.0}
    assert len(LENGTHS) == 2 and len(set(LENGTHS)) == 1


def test_an_evaluation_has_the_metrics_of_its_stage() -> None:
    measure = Measure(lambda tensors, stage: Two().loss(None, None, stage), ("error", "kl"))
    assert measure.within(FIRST).names == ("error",)
    assert measure.within(SECOND).names == ("error", "kl")


def test_a_loss_with_a_part_that_its_stage_does_not_declare_is_refused() -> None:
    opened = cast(Opened, type("O", (), {"task": Two(), "code": Code(None)})())
    loss_of = build_loss(opened, cast(Any, None), should_compile=False)
    assert loss_of({}, FIRST).parts.keys() == {"error"}
    with pytest.raises(InputError, match="the loss has the parts error, kl"):
        loss_of({"more": torch.zeros(1)}, FIRST)
