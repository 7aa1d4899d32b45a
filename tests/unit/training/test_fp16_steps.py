"""Steps with products in fp16: the scale of their loss, gradients that overflow, and the same decision on all
ranks."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evergrad_manifest.training import Optimizer, Schedule
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.order import SampleId
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.gradients import BucketedSum, ExactSum
from evergrad_trainer.objectives.linear_cross_entropy import linear_cross_entropy
from evergrad_trainer.objectives.linear_kl import Penalty, linear_kl
from evergrad_trainer.optim.adamw import build_adamw
from evergrad_trainer.optim.loss_scale import GROWTH_INTERVAL, LossScale
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.state.registry import Registry
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training import exchange as exchange_module
from evergrad_trainer.training.exchange import NUM_FLAGS
from evergrad_trainer.training.step import Stepper
from evergrad_trainer.training.step_parts import StepOutcome, StepParts, StepSettings

CPU = torch.device("cpu")
SLOTS, LENGTH = 4, 6
QUIET = (False,) * NUM_FLAGS
NORMAL = SLOTS * LENGTH


class Stream:
    """Slots of one sample each, the same in every step, so that a step can be made again."""

    def slot(self, step: int, slot: int) -> Batch:
        tokens = torch.randint(
            0, 9, (1, LENGTH + 1), generator=torch.Generator().manual_seed(slot)
        )
        tensors = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
        sample = SampleId(source=0, epoch=0, window=slot)
        return Batch(tensors, weight=LENGTH, samples=(sample,), hash=slot)

    def stage(self, step: int) -> Stage:
        return Stage({})

    def describe(self, sample: SampleId) -> str:
        return f"window {sample.window}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9)

    def loss_of(self, tensors: Tensors, stage: Stage) -> Loss:
        logits = self.head(self.embedding(tensors["input_ids"])).float()
        total = functional.cross_entropy(
            logits.flatten(0, 1), tensors["labels"].flatten(), reduction="sum"
        )
        return Loss(total)


def make_stepper(
    model: Model,
    scale: LossScale | None,
    *,
    nominal: int = NORMAL,
    exact: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Stepper:
    """``nominal``: divisor of the loss before the backward pass."""
    parameters = list(model.parameters())
    gradients: Any = BucketedSum(parameters, bucket_bytes=1024)
    if exact:
        gradients = ExactSum(parameters, bucket_bytes=1024, slots_per_step=SLOTS)
    stream: Any = Stream()
    optimizer = Optimizer.model_validate({"learningRate": 0.01, "weightDecay": 0})
    parts = StepParts(
        model=model,
        loss_of=model.loss_of,
        optimizer=build_adamw(model, optimizer),
        gradients=gradients,
        stream=stream,
        prefetcher=Prefetcher(stream),
        schedule=build_schedule(
            Schedule.model_validate({"type": "constant"}), peak=0.01, total_steps=10
        ),
        autocast=functools.partial(
            torch.autocast, "cpu", dtype=dtype, enabled=dtype != torch.float32
        ),
        loss_scale=scale,
    )
    settings = StepSettings(
        seed=0,
        slots_per_step=SLOTS,
        nominal_weight=nominal,
        clip_norm=1.0,
        is_sharded=False,
    )
    return Stepper(parts, settings)


def run(stepper: Stepper, step: int = 1) -> StepOutcome:
    return stepper.run(step, World(generation=1, rank=0, size=1, device=CPU), QUIET)


def scale_of(value: float) -> LossScale:
    scale = LossScale(CPU)
    scale.tensors()["scale"].copy_(torch.tensor([value, 0.0]))
    scale.load_values({})
    return scale


@pytest.mark.acceptance("number-O-74")
@pytest.mark.capability("O-74")
def test_the_scale_starts_at_2_16_halves_at_an_overflow_and_doubles_after_2000_updates() -> (
    None
):
    scale = LossScale(CPU)
    assert (scale.value, GROWTH_INTERVAL) == (65536.0, 2000)
    scale.follow("overflow")
    for _ in range(1999):
        scale.follow(None)
    assert scale.value == 32768.0
    # The scale is unchanged: it neither restarts nor counts.
    for skipped in ("loss", "grad", "empty", "requested"):
        scale.follow(skipped)
    assert scale.value == 32768.0
    scale.follow(None)
    assert scale.value == 65536.0
    scale.follow("overflow")
    assert scale.tensors()["scale"].tolist() == [32768.0, 0.0]


def test_the_scale_stays_between_1_and_2_24() -> None:
    small, large = scale_of(2.0), LossScale(CPU, growth_interval=1)
    small.follow("overflow")
    assert (small.value, small.can_fall) == (1.0, False)
    for _ in range(20):
        large.follow(None)
    assert large.value == 2.0**24


def test_another_process_continues_with_scale_and_count_and_a_reset_clears_both() -> None:
    registries = [Registry(), Registry()]
    scales = [LossScale(CPU, growth_interval=3), LossScale(CPU, growth_interval=3)]
    for registry, scale in zip(registries, scales, strict=True):
        registry.register("loss_scale", scale)
    for skipped in ("overflow", None, None):
        scales[0].follow(skipped)
    for name, tensor in registries[0].tensors().items():
        registries[1].tensors()[name].copy_(tensor)
    registries[1].load_values(registries[0].values())
    assert scales[1].value == 32768.0
    for scale in scales:
        scale.follow(None)
    assert [scale.value for scale in scales] == [65536.0, 65536.0]
    registries[1].reset()
    assert scales[1].tensors()["scale"].tolist() == [65536.0, 0.0]


@pytest.mark.capability("O-74")
@pytest.mark.parametrize("exact", [False, True])
def test_an_update_and_its_norm_equal_fp32_for_any_scale(
    exact: bool,
) -> None:
    model, plain = Model(), Model()
    outcome = run(make_stepper(model, LossScale(CPU), nominal=2**18, exact=exact))
    whole = run(make_stepper(plain, None, dtype=torch.float32))
    assert outcome.skipped is None and outcome.loss_scale == 65536.0
    assert outcome.grad_norm == pytest.approx(whole.grad_norm, rel=5e-3)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (
            one.dtype == torch.float32 and one.grad is not None and other.grad is not None
        )
        assert torch.allclose(one.grad, other.grad, rtol=0.02, atol=2e-4)
    assert whole.loss_scale is None


def test_the_scale_preserves_gradients_that_would_underflow_in_fp16() -> None:
    without, with_scale = Model(), Model()
    nominal = 2**28
    lost = run(make_stepper(without, None, nominal=nominal))
    kept = run(make_stepper(with_scale, LossScale(CPU), nominal=nominal))
    whole = run(make_stepper(Model(), None, dtype=torch.float32))
    assert lost.grad_norm < 0.9 * whole.grad_norm
    assert kept.grad_norm == pytest.approx(whole.grad_norm, rel=0.02)


@pytest.mark.capability("O-74")
@pytest.mark.parametrize("exact", [False, True])
def test_overflowing_steps_change_nothing_and_lower_the_scale_until_gradients_fit(
    exact: bool,
) -> None:
    model, untouched = Model(), Model()
    # Gradients of the logits are up to 2**24 / 4 at the first of these scales.
    scale = scale_of(2.0**24)
    stepper = make_stepper(model, scale, nominal=4, exact=exact)
    first = run(stepper)
    assert (
        first.skipped == "overflow"
        and not first.is_non_finite
        and math.isfinite(first.loss)
    )
    assert first.loss_scale == 2.0**24 and scale.value == 2.0**23
    assert "at a loss scale of 1.67772e+07" in str(first.problems[0])
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))
    outcomes = [run(stepper, step) for step in range(2, 12)]
    skipped = [one.skipped for one in outcomes]
    num_skipped = skipped.index(None)
    assert skipped == ["overflow"] * num_skipped + [None] * (10 - num_skipped)
    assert scale.value == 2.0 ** (23 - num_skipped) >= 2.0**14
    whole = run(make_stepper(Model(), None, dtype=torch.float32))
    assert outcomes[num_skipped].grad_norm == pytest.approx(whole.grad_norm, rel=5e-3)


def test_a_gradient_that_overflows_at_the_smallest_scale_is_non_finite() -> None:
    model, untouched = Model(), Model()
    model.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    scale = scale_of(2.0)
    stepper = make_stepper(model, scale)
    assert [run(stepper, step).skipped for step in (1, 2, 3)] == [
        "overflow",
        "grad",
        "grad",
    ]
    assert scale.value == 1.0
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))


def test_a_non_finite_loss_does_not_change_the_loss_scale() -> None:
    model = Model()
    with torch.no_grad():
        model.embedding.weight.fill_(torch.inf)
    scale = LossScale(CPU)
    assert run(make_stepper(model, scale)).skipped == "loss"
    assert scale.value == 65536.0


@pytest.mark.capability("O-74")
def test_a_rank_with_finite_gradients_skips_the_step_that_another_rank_must_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sum_integers(self: World, values: torch.Tensor) -> torch.Tensor:
        # The other rank's flag that its norm is not finite.
        values[NUM_FLAGS + 2] += 1
        return values

    monkeypatch.setattr(exchange_module, "compare_steps", lambda steps: None)
    monkeypatch.setattr(World, "sum_integers", sum_integers)
    model, untouched = Model(), Model()
    scale = LossScale(CPU)
    outcome = run(make_stepper(model, scale))
    assert outcome.skipped == "overflow" and scale.value == 32768.0
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))


@pytest.mark.parametrize("kind", ["cross entropy", "divergence"])
def test_a_head_in_fp16_gets_the_gradient_of_many_tokens_in_chunks(kind: str) -> None:
    """Its sum over the tokens is beyond fp16 before it is divided by what the step weighs."""
    torch.manual_seed(0)
    num_tokens = 2**14
    hidden = torch.full((1, num_tokens, 4), 8.0, dtype=torch.float16)
    weight = torch.zeros(3, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(1, num_tokens, dtype=torch.int64)
    if kind == "cross entropy":
        total = linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=1024, ignore_index=-100
        )
    else:
        reference = (hidden, weight.detach().clone())
        penalty = Penalty("forward", 0.0)
        total = linear_kl(
            hidden, weight, reference, labels, penalty=penalty, chunk_tokens=1024
        ).total
    (total / num_tokens).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float16
    # (softmax - one-hot) times the hidden states: 1/3 - 1 and 1/3 of 8.
    expected = torch.tensor([-16 / 3, 8 / 3, 8 / 3])[:, None].expand(3, 4)
    assert torch.allclose(weight.grad.float(), expected, rtol=5e-3)
