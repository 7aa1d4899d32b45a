"""The states of two runs, compared tensor by tensor and bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.compare import compare_states
from evergrad_trainer.checkpoint.manifest import Identity

MakeSolo = Callable[..., Any]
MakeState = Callable[[int], dict[str, torch.Tensor]]


@pytest.fixture
def save(make_solo: MakeSolo, make_state: MakeState, tmp_path: Path) -> Callable[..., Path]:
    """Saves a state of one step as a run of the given name."""

    def save(name: str, step: int, **changes: torch.Tensor | None) -> Path:
        solo = make_solo(
            directory=tmp_path / name / "checkpoints",
            identity=Identity(name, "recipe", "data"),
        )
        state = {
            **make_state(20),
            **{key.replace("_", "."): it for key, it in changes.items()},
        }
        kept = {key: value for key, value in state.items() if value is not None}
        solo.manager.save(step, kept, extra={"step": step}, wait=True)
        return tmp_path / name

    return save


@pytest.mark.capability("G-72")
def test_equal_states_compare_equal_at_the_newest_step_of_the_first_run(
    save: Callable[..., Path],
) -> None:
    save("a", 10)
    a, b = save("a", 20), save("b", 20)
    save("b", 30)
    found = compare_states(a, b)
    assert found.is_equal
    assert found.step == 20 and found.num_tensors > 1


@pytest.mark.capability("G-72")
def test_each_differing_tensor_is_named_with_its_difference(
    save: Callable[..., Path], make_state: MakeState
) -> None:
    weight = make_state(20)["model.weight"]
    other = weight.clone()
    other[0, 0] += 0.5
    a = save("a", 20, extra=torch.zeros(2))
    b = save("b", 20, model_weight=other, model_half=torch.zeros(3), extra=-torch.zeros(2))
    found = {one.name: one for one in compare_states(a, b).differences}
    assert set(found) == {"model.weight", "model.half", "extra"}
    assert found["model.weight"].what == f"1 of {weight.numel()} values differ"
    assert found["model.weight"].largest == pytest.approx(0.5)
    assert found["model.half"].what == "(11,) bfloat16 in A, (3,) float32 in B"
    # The sign of a zero: equal numbers, and another state.
    assert (found["extra"].what, found["extra"].largest) == ("0 of 2 values differ", 0.0)


def test_a_tensor_missing_in_one_run_is_a_difference(save: Callable[..., Path]) -> None:
    a, b = save("a", 20, mine=torch.ones(1)), save("b", 20, yours=torch.ones(1))
    assert [(one.name, one.what) for one in compare_states(a, b).differences] == [
        ("mine", "only in A"),
        ("yours", "only in B"),
    ]


def test_a_step_that_the_second_run_has_not_saved_is_refused(
    save: Callable[..., Path],
) -> None:
    a, b = save("a", 20), save("b", 10)
    with pytest.raises(CheckpointError, match="contains no checkpoint of step 20"):
        compare_states(a, b)
