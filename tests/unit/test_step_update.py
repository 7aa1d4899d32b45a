"""One step: which slots a rank runs, what is summed, and what is refused before any update."""

import math
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evergrad_manifest.training import Optimizer, Schedule
from evergrad_trainer.base import device_memory, torch_private
from evergrad_trainer.base.errors import DivergedError
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.order import SampleId
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.distributed.transports import GlooTransport
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.gradients import BucketedSum, ExactSum
from evergrad_trainer.optim.adamw import build_adamw
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training import exchange as exchange_module
from evergrad_trainer.training import step as step_module
from evergrad_trainer.training.exchange import NUM_FLAGS, as_signed
from evergrad_trainer.training.step import Stepper, share_slots
from evergrad_trainer.training.step_parts import StepParts, StepSettings

LENGTH = 6
QUIET = (False,) * NUM_FLAGS


def make_batch(
    ids: torch.Tensor,
    labels: torch.Tensor,
    samples: tuple[SampleId, ...] = (),
    sample_hash: int = 0,
) -> Batch:
    tensors = {"input_ids": ids, "labels": labels}
    return Batch(
        tensors, weight=int((labels >= 0).sum()), samples=samples, hash=sample_hash
    )


def is_learned_from(token: int, tensors: Tensors) -> bool:
    return bool(
        ((tensors["input_ids"] == token) & (tensors["labels"] != IGNORE_INDEX)).any()
    )


class Stream:
    """M slots of one sample each; the last position of slot 1 is never learned."""

    def __init__(self, slots: int) -> None:
        self.slots_per_step = slots
        self.asked: list[tuple[int, int]] = []

    def slot(self, step: int, slot: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + slot)
        tokens = torch.randint(0, 9, (1, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if slot == 1:
            labels[:, -1] = IGNORE_INDEX
        sample = SampleId(source=0, epoch=0, window=step * 100 + slot)
        return make_batch(tokens[:, :-1].clone(), labels, (sample,), 2**63 + slot)

    def stage(self, step: int) -> Stage:
        return Stage({})

    def describe(self, sample: SampleId) -> str:
        return f"docs/epoch 0/window {sample.window}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9)

    def loss_of(self, tensors: Tensors, stage: Stage) -> Loss:
        return Loss(self.loss_sum(tensors["input_ids"], tensors["labels"]))

    def loss_sum(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids))
        return functional.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )


def make_stepper(
    model: Model,
    *,
    slots: int = 4,
    clip: float = 0.0,
    exact: bool = False,
) -> Stepper:
    parameters = list(model.parameters())
    gradients: Any = BucketedSum(parameters, bucket_bytes=1024)
    if exact:
        gradients = ExactSum(parameters, bucket_bytes=1024, slots_per_step=slots)
    stream: Any = Stream(slots)
    parts = StepParts(
        model=model,
        loss_of=model.loss_of,
        optimizer=build_adamw(
            model, Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0})
        ),
        gradients=gradients,
        stream=stream,
        prefetcher=Prefetcher(stream),
        schedule=build_schedule(
            Schedule.model_validate({"type": "linear"}), peak=0.1, total_steps=10
        ),
        autocast=nullcontext,
    )
    settings = StepSettings(
        seed=0,
        slots_per_step=slots,
        nominal_weight=slots * LENGTH,
        clip_norm=clip,
        is_sharded=False,
    )
    return Stepper(parts, settings)


def world(rank: int = 0, size: int = 1) -> World:
    return World(generation=1, rank=rank, size=size, device=torch.device("cpu"))


def big_batch(slots: int = 4, step: int = 1) -> Batch:
    batches = [Stream(slots).slot(step, slot) for slot in range(slots)]
    ids, labels = (
        torch.cat([batch.tensors[name] for batch in batches])
        for name in ("input_ids", "labels")
    )
    return make_batch(ids, labels)


@pytest.mark.acceptance("8d-14a", "number-A-81", "number-T-43")
@pytest.mark.capability("C-14", "C-20", "O-25", "A-16", "A-17", "A-81", "T-10", "T-20")
@pytest.mark.parametrize("exact", [False, True])
def test_the_update_equals_one_big_batch_averaged_over_its_valid_tokens(
    exact: bool,
) -> None:
    model, plain = Model(), Model()
    outcome = make_stepper(model, exact=exact).run(1, world(), QUIET)
    batch = big_batch()
    loss = (
        plain.loss_sum(batch.tensors["input_ids"], batch.tensors["labels"]) / batch.weight
    )
    loss.backward()
    norm = nn.utils.get_total_norm(
        [p.grad for p in plain.parameters() if p.grad is not None]
    )
    optimizer = build_adamw(
        plain, Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0})
    )
    optimizer.step()
    assert outcome.weight == batch.weight == 4 * LENGTH - 1
    assert outcome.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7) for a, b in gradients)  # type: ignore[arg-type]


class Traced(torch.autograd.Function):
    """Passes a loss through, and keeps an object for as long as the graph is there."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, kept: object) -> torch.Tensor:
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def test_the_graph_of_a_slot_is_freed_before_the_next_one_starts() -> None:
    class Kept:
        pass

    graphs: list[weakref.ref[Kept]] = []
    alive: list[int] = []

    class TracedModel(Model):
        def loss_of(self, tensors: Tensors, stage: Stage) -> Loss:
            alive.append(sum(graph() is not None for graph in graphs))
            kept = Kept()
            graphs.append(weakref.ref(kept))
            total = Traced.apply(super().loss_of(tensors, stage).total, kept)
            return Loss(total)

    make_stepper(TracedModel()).run(1, world(), QUIET)
    # Its nodes would remain between the allocations of the next slot, and the heap would grow with each slot.
    assert alive == [0, 0, 0, 0]


@pytest.mark.acceptance("number-T-54")
def test_gradients_above_the_limit_are_clipped_and_the_unclipped_norm_is_reported() -> None:
    model, free = Model(), Model()
    told = make_stepper(free).run(1, world(), QUIET).grad_norm
    outcome = make_stepper(model, clip=told / 4).run(1, world(), QUIET)
    clipped = nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    assert outcome.grad_norm == told
    assert float(clipped) == pytest.approx(told / 4, rel=1e-4)
    below = Model()
    make_stepper(below, clip=told * 2).run(1, world(), QUIET)
    assert all(map(torch.equal, below.parameters(), free.parameters()))


@pytest.mark.acceptance("8d-12c", "number-A-58")
@pytest.mark.capability("C-56")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_slots_of_a_step_are_shared_without_remainder_by_every_world_size(
    size: int,
) -> None:
    shares = [list(share_slots(4, rank, size, is_sharded=False)) for rank in range(size)]
    assert sorted(slot for share in shares for slot, _, _ in share) == [0, 1, 2, 3]
    assert all(is_real for share in shares for _, is_real, _ in share)
    assert all(
        [is_last for _, _, is_last in share] == [False] * (len(share) - 1) + [True]
        for share in shares
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sharded_ranks_all_run_equally_many_slots_and_each_slot_counts_once(
    size: int,
) -> None:
    shares = [list(share_slots(4, rank, size, is_sharded=True)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(slot for share in shares for slot, is_real, _ in share if is_real) == [
        0,
        1,
        2,
        3,
    ]
    assert all(share[-1][2] for share in shares)


@pytest.mark.parametrize("size", [2, 3])
def test_the_exchanged_values_of_all_ranks_sum_to_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Hash and tokens of each rank's own part, without a group: their sums are the step's."""
    monkeypatch.setattr(exchange_module, "compare_steps", lambda steps: None)
    whole = make_stepper(Model()).run(1, world(), QUIET)
    parts = [make_stepper(Model()).run(1, world(rank, size), QUIET) for rank in range(size)]
    assert sum(part.weight for part in parts) == whole.weight
    assert sum(int(part.sample_hash, 16) for part in parts) % 2**64 == int(
        whole.sample_hash, 16
    )
    assert int(whole.sample_hash, 16) == (4 * 2**63 + 6) % 2**64


def test_a_slot_ends_when_its_device_has_run_it_and_not_when_it_was_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diary = Diary()
    monkeypatch.setattr(
        step_module, "mark_launched", lambda device: Noted(diary, "computed")
    )
    stepper = make_stepper(Model())
    stepper.heartbeat = diary
    stepper.run(3, world(), QUIET)
    assert diary.entries == ["slot 0", "slot 1", "slot 2", "slot 3", "computed", "rest"]


def test_device_memory_is_reported_after_each_step_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (3, 5, 4)
    monkeypatch.setattr(device_memory, "read_device_memory", lambda device: sizes)
    stepper = make_stepper(Model())
    stepper.run(1, world(), QUIET)
    held: list[tuple[int, int, int]] = []
    stepper.on_memory = held.append
    for step in (2, 3):
        stepper.run(step, world(), QUIET)
    assert held == [sizes, sizes]


class Diary(torch_private.TorchDispatchMode):
    """Heartbeats and, while it is entered, numbers that are read from a device, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[str] = []

    def beat(self, step: int, slot: int) -> None:
        self.entries.append(f"slot {slot}")

    def rest(self) -> None:
        self.entries.append("rest")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.entries.append("read")
        return func(*args, **(kwargs or {}))


class Noted:
    """Work of a device that is never done before it is waited for."""

    def __init__(self, diary: Diary, name: str) -> None:
        self._diary, self._name = diary, name

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._diary.entries.append(self._name)


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_waits_for_its_device_only_after_everything_is_launched(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    diary = Diary()

    class Launching(GlooTransport):
        is_stream_ordered = True

        def start_sum(self, values: torch.Tensor, group: Any) -> Any:
            return Noted(diary, "ordered")

        def mark_started(self) -> Any:
            return Noted(diary, "arrived")

    monkeypatch.setattr(exchange_module, "compare_steps", lambda steps: None)
    monkeypatch.setattr(
        step_module, "mark_launched", lambda device: Noted(diary, "computed")
    )
    group: Any = object()
    two = replace(world(0, 2), group=group, transport=Launching())
    stepper = make_stepper(Model(), exact=exact)
    stepper.heartbeat = diary
    # Created before: the test's stream counts labels, which must not affect the device.
    batches = [Stream(4).slot(1, slot) for slot in range(4)]
    stream: Any = stepper._parts.stream
    stream.slot = lambda step, slot: batches[slot]
    with diary:
        stepper.run(1, two, QUIET)
    launched, waited = diary.entries[:3], diary.entries[3:6]
    assert launched == ["slot 0", "slot 2", "ordered"], (
        "one bucket, summed behind the last slot"
    )
    assert waited == ["computed", "rest", "arrived"]
    assert set(diary.entries[6:]) == {"read"}


def test_a_rank_at_another_step_is_reported_on_all_ranks_and_nothing_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sum_integers(self: World, values: torch.Tensor) -> torch.Tensor:
        values[-self.size :] = torch.tensor([4, 31, 4])
        return values

    monkeypatch.setattr(World, "sum_integers", sum_integers)
    model, untouched = Model(), Model()
    with pytest.raises(
        DivergedError, match=r"rank 0: 4, rank 1: 31, rank 2: 4.*that of rank 1 is wrong"
    ) as raised:
        make_stepper(model).run(4, world(0, 3), QUIET)
    assert raised.value.ranks == (1,)
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_reported_with_step_slot_and_samples_and_nothing_is_updated(
    value: float, exact: bool
) -> None:
    model = Model()
    token = int(Stream(4).slot(3, 2).tensors["input_ids"][0, 0])
    with torch.no_grad():
        model.embedding.weight[token] = value
    batches = [Stream(4).slot(3, slot) for slot in range(4)]
    affected = [
        slot for slot, batch in enumerate(batches) if is_learned_from(token, batch.tensors)
    ]
    before = [parameter.clone() for parameter in model.parameters()]
    outcome = make_stepper(model, exact=exact).run(3, world(), QUIET)
    assert outcome.skipped == "loss" and outcome.is_non_finite and math.isnan(outcome.loss)
    assert [problem.path for problem in outcome.problems] == [
        f"step 3, slot {slot}" for slot in affected
    ]
    assert "docs/epoch 0/window 30" in str(outcome.problems[0]), (
        "it does not name the samples"
    )
    assert "Nothing was updated" in str(outcome.problems[0])
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(before, model.parameters(), strict=True)
    )


def test_an_overflowing_gradient_is_reported_and_nothing_is_updated() -> None:
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    stepper = make_stepper(model)
    model.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    outcome = stepper.run(2, world(), QUIET)
    assert outcome.skipped == "grad" and math.isfinite(outcome.loss)
    assert re.match(r"step 2: the gradient norm is (nan|inf)", str(outcome.problems[0]))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_without_loss_tokens_makes_no_update(exact: bool) -> None:
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    stepper = make_stepper(model, exact=exact)
    stream: Any = stepper._parts.stream
    slot = stream.slot
    stream.slot = lambda step, number: masked(slot(step, number))
    outcome = stepper.run(1, world(), QUIET)
    assert outcome.skipped == "empty" and not outcome.is_non_finite and outcome.weight == 0
    assert "no token carries a loss" in str(outcome.problems[0])
    assert all(map(torch.equal, before, model.parameters()))


def masked(batch: Batch) -> Batch:
    labels = torch.full_like(batch.tensors["labels"], IGNORE_INDEX)
    return replace(batch, tensors={**batch.tensors, "labels": labels}, weight=0)


def test_a_skipped_step_reads_and_computes_nothing_and_reports_its_flags() -> None:
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    stepper = make_stepper(model)
    flags = (True, *QUIET[1:])
    outcome = stepper.run(2, world(), flags, is_skipped=True)
    assert (
        outcome.skipped == "requested"
        and not outcome.is_non_finite
        and outcome.problems == ()
    )
    assert (
        outcome.flags == flags and outcome.weight == 0 and outcome.sample_hash == "0" * 16
    )
    assert (
        outcome.learning_rate == make_stepper(Model()).run(2, world(), QUIET).learning_rate
    )
    assert all(map(torch.equal, before, model.parameters()))


def test_the_step_after_a_refused_step_is_unaffected() -> None:
    """Neither gradients nor sums of a refused step are left over."""
    model, other = Model(), Model()
    stepper = make_stepper(model)
    hook = model.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    assert stepper.run(1, world(), QUIET).skipped == "grad"
    hook.remove()
    stepper.run(2, world(), QUIET)
    make_stepper(other).run(2, world(), QUIET)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_reported_learning_rate_matches_the_schedule() -> None:
    stepper = make_stepper(Model())
    assert [stepper.run(step, world(), QUIET).learning_rate for step in (1, 6)] == [
        0.1,
        pytest.approx(0.05),
    ]


@pytest.mark.parametrize(
    "flags",
    [tuple(place == raised for place in range(NUM_FLAGS)) for raised in range(NUM_FLAGS)],
)
def test_flags_are_exchanged_unchanged(flags: tuple[bool, ...]) -> None:
    assert make_stepper(Model()).run(1, world(), flags).flags == flags


def test_the_phases_of_a_step_sum_to_its_time() -> None:
    outcome = make_stepper(Model()).run(1, world(), QUIET)
    assert set(outcome.seconds) == {
        "data",
        "forward_backward",
        "communication",
        "optimizer",
    }
    assert all(seconds >= 0 for seconds in outcome.seconds.values())
    assert outcome.rank_skew_seconds == 0


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5])
def test_hashes_are_sent_as_signed_integers_and_restored(value: int) -> None:
    assert -(2**63) <= as_signed(value) < 2**63
    assert as_signed(value) % 2**64 == value % 2**64
