"""A task's changes of its modules between two steps: the same on every rank, independently of earlier
computation."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Modules
from evergrad_trainer.training.step_parts import StepOutcome
from evergrad_trainer.training.task_adapter import build_finish, enter_first


class Noisy:
    """Draws random numbers at each place where kept tensors may change."""

    def after_update(self, modules: Modules, metrics: Any) -> None:
        modules.kept["noise"].normal_()

    def enter(self, modules: Modules, stage: Any) -> None:
        modules.kept["entered"].normal_()


def finish_as(
    last_slot: int, step: int, *, is_first: bool = False
) -> dict[str, torch.Tensor]:
    """The kept tensors of a rank whose own last slot of the step was that one."""
    data = SimpleNamespace(train=SimpleNamespace(stages=["first"]))
    opened = cast(Opened, SimpleNamespace(task=Noisy(), code=Code(None), data=data))
    modules = Modules({}, kept={"noise": torch.zeros(4), "entered": torch.zeros(4)})
    seed_generators(7, step, last_slot, Purpose.FORWARD)
    if is_first:
        enter_first(opened, modules, seed=7)
    else:
        outcome = StepOutcome(step, 1.0, {}, 4, "0" * 16, 0.1, 1.0, (), {}, 0.0)
        build_finish(opened, modules, seed=7, frozen={})(outcome, cast(Any, "second"))
    return modules.kept


@pytest.mark.parametrize("is_first", [False, True])
def test_random_numbers_of_a_finished_step_are_the_same_on_every_rank(
    is_first: bool,
) -> None:
    one, other = (finish_as(slot, 3, is_first=is_first) for slot in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_random_numbers_of_another_step_differ() -> None:
    assert not torch.equal(finish_as(0, 3)["noise"], finish_as(0, 4)["noise"])
