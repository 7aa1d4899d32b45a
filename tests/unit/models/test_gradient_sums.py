"""Sums of gradients: equal to one big batch, and in exact mode free of order."""

import itertools

import pytest
import torch
from torch import nn

from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.gradients import BucketedSum, ExactSum, GradientSum, _partition

ALONE = World(generation=1, rank=0, size=1, device=torch.device("cpu"))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def slots(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def accumulate(
    model: nn.Module, gradients: GradientSum, batches: list[torch.Tensor]
) -> list[torch.Tensor]:
    gradients.begin(ALONE)
    for index, batch in enumerate(batches):
        gradients.before_backward(is_last=index == len(batches) - 1)
        model(batch).square().sum().backward()
        gradients.after_backward()
    gradients.finish()
    return [
        parameter.grad.clone()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]


def plain_gradients(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model = make_model()
    model(torch.cat(batches)).square().sum().backward()
    return [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


def exact_sum(model: nn.Module, slots_per_step: int = 4) -> ExactSum:
    return ExactSum(
        list(model.parameters()), bucket_bytes=64, slots_per_step=slots_per_step
    )


def test_bucketed_slots_sum_to_the_gradient_of_one_big_batch() -> None:
    model = make_model()
    sums = accumulate(
        model, BucketedSum(list(model.parameters()), bucket_bytes=64), slots(4)
    )
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(sums, plain_gradients(slots(4)), strict=True)
    )


@pytest.mark.acceptance("8d-14a")
def test_exact_slots_sum_to_the_gradient_of_one_big_batch() -> None:
    model = make_model()
    sums = accumulate(model, exact_sum(model), slots(4))
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(sums, plain_gradients(slots(4)), strict=True)
    )


def test_a_second_step_starts_from_zero() -> None:
    model = make_model()
    for gradients in (
        BucketedSum(list(model.parameters()), bucket_bytes=64),
        exact_sum(model),
    ):
        first = accumulate(model, gradients, slots(2))
        second = accumulate(model, gradients, slots(2))
        assert all(map(torch.equal, first, second))


def test_exact_sums_have_the_same_bits_in_any_order_of_the_slots() -> None:
    results = []
    for order in itertools.permutations(slots(4)):
        model = make_model()
        results.append(accumulate(model, exact_sum(model), list(order)))
    assert all(all(map(torch.equal, results[0], result)) for result in results)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_sums_of_the_ranks_of_any_world_size_equal_those_of_one_process(
    world_size: int,
) -> None:
    """The integers that each rank would send have the sum of the integers of a world of one."""
    batches = slots(4)
    model = make_model()
    alone = exact_sum(model)
    accumulate(model, alone, batches)
    totals = [torch.zeros_like(total) for total in alone._sums]
    for rank in range(world_size):
        model = make_model()
        own = exact_sum(model)
        accumulate(model, own, batches[rank::world_size])
        for total, part in zip(totals, own._sums, strict=True):
            total += part
    assert all(map(torch.equal, totals, alone._sums))


@pytest.mark.parametrize("value", [1e9, float("inf"), float("nan")])
def test_a_gradient_outside_the_exact_range_is_refused(value: float) -> None:
    model = make_model()
    gradients = exact_sum(model)
    gradients.begin(ALONE)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    # It is raised on all ranks when they receive the result, not on the rank that overflows.
    gradients.after_backward()
    gradients.finish()
    assert "outside the range of exact sums" in str(gradients.problem())


def test_the_largest_gradients_of_all_slots_of_a_step_stay_within_the_exact_range() -> None:
    model = make_model()
    gradients = exact_sum(model, slots_per_step=8)
    gradients.begin(ALONE)
    largest = gradients._largest * 0.999
    for _ in range(8):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, largest)
        gradients.after_backward()
    gradients.finish()
    assert all(
        bool((p.grad > 7.9 * largest).all())
        for p in model.parameters()
        if p.grad is not None
    )


def test_an_unused_parameter_has_a_zero_gradient_in_exact_mode() -> None:
    model = make_model()
    unused = nn.Parameter(torch.ones(3))
    gradients = ExactSum([*model.parameters(), unused], bucket_bytes=64, slots_per_step=2)
    accumulate(model, gradients, slots(2))
    assert unused.grad is not None and not unused.grad.any()


def test_buckets_contain_every_parameter_once_in_reverse_order_split_by_size_and_type() -> (
    None
):
    parameters = [nn.Parameter(torch.zeros(size)) for size in (4, 4, 4, 40)]
    parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    parts = _partition(parameters, 32)
    assert [parameter for part in parts for parameter in part] == parameters[::-1]
    assert [len(part) for part in parts] == [1, 1, 2, 1]


def with_unused(seed: int = 0) -> nn.Module:
    """A model of which nothing reaches the last layer."""
    model = make_model(seed)
    model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    return model


class _InGroup(World):
    """A world of one that sums in buckets, like a world of several, without another process."""

    def start_sum(self, values: torch.Tensor) -> torch.distributed.Work:  # type: ignore[override]
        return None  # type: ignore[return-value]

    def wait(self, work: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["alone", "in a group", "exact"])
def test_a_parameter_without_a_gradient_gets_zero_for_any_world_size(kind: str) -> None:
    """The optimizer would pass over a parameter without one, and decay one with: worlds of one and of two
    would part."""
    model = with_unused()
    parameters = list(model.parameters())
    sums: GradientSum = BucketedSum(parameters, bucket_bytes=64)
    if kind == "exact":
        sums = ExactSum(parameters, bucket_bytes=64, slots_per_step=4)
    world = ALONE
    if kind == "in a group":
        world = _InGroup(
            generation=1, rank=0, size=2, device=torch.device("cpu"), group=object()
        )  # type: ignore[arg-type]
    sums.begin(world)
    sums.before_backward(is_last=True)
    nn.Sequential(*list(model.children())[:3])(slots(1)[0]).square().sum().backward()
    sums.after_backward()
    sums.finish()
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    assert [bool(gradient.any()) for gradient in gradients if gradient is not None] == [
        True
    ] * 4 + [False] * 2
