"""Deterministic kernels: requested by the file, recorded, and refused with a message if they do not exist."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from evergrad_manifest.training.common import Reproducibility
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.determinism import (
    choose_determinism,
    describe_determinism,
    needs_deterministic_kernels,
    raise_if_not_deterministic,
)
from evergrad_trainer.models.randomness import Purpose, seed_generators

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


@pytest.mark.capability("O-12", "G-62", "G-63", "G-95")
def test_the_determinism_setting_is_applied_and_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    torch.use_deterministic_algorithms(False)
    choose_determinism(Reproducibility(), CPU)
    assert describe_determinism()["deterministicAlgorithms"] == "off"
    choose_determinism(Reproducibility(deterministic=True), CPU)
    assert describe_determinism() == {
        "deterministicAlgorithms": "on",
        "cudnnDeterministic": "on",
        "cudnnBenchmark": "off",
        "cublasWorkspace": ":4096:8",
        "pythonHashSeed": "unset",
    }


def test_a_choice_of_the_task_is_not_reverted() -> None:
    torch.use_deterministic_algorithms(True)
    choose_determinism(Reproducibility(), CPU)
    assert torch.are_deterministic_algorithms_enabled()


def test_exact_needs_the_kernels_on_accelerators_only() -> None:
    exact, asked = Reproducibility(elastic="exact"), Reproducibility(deterministic=True)
    assert not needs_deterministic_kernels(exact, on_accelerator=False)
    assert needs_deterministic_kernels(exact, on_accelerator=True)
    assert needs_deterministic_kernels(asked, on_accelerator=False)


def test_an_operation_without_a_deterministic_kernel_is_a_user_error() -> None:
    choose_determinism(Reproducibility(deterministic=True), CPU)
    weights = torch.ones(4)
    # In torch itself this one has no deterministic kernel on any device.
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(4).put_(
            torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False
        )
    with pytest.raises(ModelError) as explained:
        raise_if_not_deterministic(caught.value)
    (problem,) = explained.value.problems
    assert problem.path == "spec.training.reproducibility.deterministic"
    assert "put_" in problem.what and problem.remedy
    raise_if_not_deterministic(RuntimeError("sizes do not match"))
    assert weights.sum() == 4


@pytest.mark.capability("A-25")
def test_python_and_numpy_generators_are_seeded_per_slot_too() -> None:
    def draw(step: int, slot: int) -> tuple[float, float, float]:
        seed_generators(7, step, slot, Purpose.FORWARD)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first, again, other = draw(3, 1), draw(3, 1), draw(3, 2)
    assert first == again
    assert all(left != right for left, right in zip(first, other, strict=True))
