"""The loss over a fixed set: shared by ranks, unmoved by batch size, free of side effects."""

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from evergrad_trainer.base.errors import HostError, PeerLostError
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.distributed.world import World
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training import evaluation
from evergrad_trainer.training.evaluation import EvaluationResult, EvaluationRunner, Measure
from evergrad_trainer.training.evaluation_counts import EvaluationCounts


@dataclass
class Samples:
    """An evaluation set of ``labels`` rows in batches of b."""

    labels: torch.Tensor
    size: int
    name: str = "some"

    @property
    def num_batches(self) -> int:
        return -(-len(self.labels) // self.size)

    def batch(self, index: int) -> Batch:
        labels = self.labels[index * self.size : (index + 1) * self.size]
        valid = int((labels != IGNORE_INDEX).sum())
        inputs = (
            self.labels.clamp(min=0)[index * self.size : (index + 1) * self.size] + 1
        ) % 7
        return Batch(
            {"input_ids": inputs, "labels": labels}, weight=valid, samples=(), hash=0
        )


@dataclass
class Fingerprinted:
    """A set as the key of a tally sees it."""

    samples: Samples
    fingerprint: str = "same"

    @property
    def name(self) -> str:
        return self.samples.name


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 7)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.dropout(self.embedding(ids))
        return logits


def make(model: nn.Module, size: int, *, is_sharded: bool = False) -> EvaluationRunner:
    def loss_of(tensors: Tensors, stage: Stage) -> Loss:
        logits = model(tensors["input_ids"]).flatten(0, 1)
        labels = tensors["labels"].flatten()
        loss = functional.cross_entropy(
            logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return Loss(
            loss,
            {"right": ((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum()},
        )

    return EvaluationRunner(
        model=model,
        measures={"some": Measure(loss_of, ("right",))},
        is_sharded=is_sharded,
        autocast=nullcontext,
    )


def rows(count: int = 11) -> torch.Tensor:
    labels = torch.randint(0, 7, (count, 5), generator=torch.Generator().manual_seed(1))
    labels[-1, 2:] = IGNORE_INDEX
    return labels


def world(rank: int = 0, size: int = 1) -> World:
    return World(generation=1, rank=rank, size=size, device=torch.device("cpu"))


def run(
    evaluator: EvaluationRunner, samples: Any, where: World | None = None
) -> EvaluationResult:
    result = evaluator.run(
        samples,
        where or world(),
        EvaluationCounts("", ("right",)),
        stage=Stage({}),
        is_stopping=lambda: False,
        on_progress=lambda done, total: None,
    )
    assert result is not None
    return result


@pytest.mark.acceptance("number-A-73")
@pytest.mark.capability("A-73", "T-13")
@pytest.mark.parametrize("size", [1, 2, 4, 11, 16])
def test_the_loss_is_the_mean_over_valid_tokens_for_every_batch_size(size: int) -> None:
    model, labels = Table(), rows()
    inputs = (labels.clamp(min=0) + 1) % 7
    expected = functional.cross_entropy(
        model.eval()(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
    )
    result = run(make(model, size), Samples(labels, size))
    assert result.weight == 11 * 5 - 3
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.acceptance("8d-17c", "number-O-67")
@pytest.mark.capability("O-67")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_parts_of_any_world_size_sum_to_the_whole(size: int) -> None:
    """Without a group each rank returns its own part: together they are the whole set, each batch once."""
    model, samples = Table(), Samples(rows(), 2)
    whole = run(make(model, 2), samples)
    parts = [run(make(model, 2), samples, world(rank, size)) for rank in range(size)]
    assert sum(part.weight for part in parts) == whole.weight
    assert sum(part.loss * part.weight for part in parts) == pytest.approx(
        whole.loss * whole.weight, rel=1e-12
    )


@pytest.mark.acceptance("8d-17c")
def test_a_sharded_rank_without_a_batch_takes_part_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    freed: list[nn.Module] = []
    monkeypatch.setattr(evaluation, "reshard", freed.append)
    model = Table()
    model.register_forward_hook(lambda *_: calls.append(1))
    samples = Samples(rows(2), 2)
    idle = make(model, 2, is_sharded=True)
    result = run(idle, samples, world(1, 2))
    assert result is not None and result.weight == 0 and math.isnan(result.loss)
    assert calls == [1]
    assert freed == [model]


def test_evaluation_draws_no_random_numbers_and_restores_the_mode() -> None:
    model = Table()
    before = torch.random.get_rng_state()
    first = run(make(model, 2), Samples(rows(), 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert run(make(model, 2), Samples(rows(), 2)).loss == first.loss
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stop_ends_the_evaluation_without_a_result_and_restores_the_mode() -> None:
    model = Table()
    result = make(model, 1).run(
        Samples(rows(), 1),
        world(),
        EvaluationCounts("", ("right",)),
        stage=Stage({}),
        is_stopping=lambda: True,
        on_progress=lambda done, total: None,
    )
    assert result is None and model.training


def test_progress_counts_batches_of_all_ranks() -> None:
    told: list[tuple[int, int]] = []
    make(Table(), 2).run(
        Samples(rows(), 2),
        world(0, 4),
        EvaluationCounts("", ("right",)),
        stage=Stage({}),
        is_stopping=lambda: False,
        on_progress=lambda *one: told.append(one),
    )
    assert told == [(4, 6), (6, 6)]


def test_a_measure_that_calls_the_model_repeatedly_ends_at_the_call_after_the_group_ended() -> (
    None
):
    model = Table()
    interrupt: Any = SimpleNamespace(is_set=False)
    calls = []

    def measure(tensors: Tensors, stage: Stage) -> Loss:
        for number in range(100):
            calls.append(number)
            interrupt.is_set = number == 2
            model(tensors["input_ids"])
        raise AssertionError("it went on")

    own = Measure(measure, is_own=True)
    runner = replace(make(model, 2), measures={"some": own})
    ended = replace(world(), interrupt=interrupt)
    with pytest.raises(PeerLostError, match="the group was given up"):
        run(runner, Samples(rows(), 2), ended)
    assert len(calls) == 3
    # The hook is removed after the evaluation.
    model(torch.zeros(1, dtype=torch.int64))


def test_metrics_can_be_computed_from_the_means_of_the_parts() -> None:
    runner = make(Table(), 3)
    plain = run(runner, Samples(rows(), 3))
    loss_of = runner.measures["some"].loss_of
    measure = Measure(
        loss_of, ("right",), lambda means, stage: {"wrong": 1 - means["right"]}
    )
    found = run(replace(runner, measures={"some": measure}), Samples(rows(), 3))
    assert found.metrics == {"wrong": 1 - plain.metrics["right"]}


@pytest.mark.parametrize("is_own", [False, True])
def test_a_stage_without_a_part_has_no_value_for_it(is_own: bool) -> None:
    """The tally belongs to the stage, whose losses do not have the part."""
    samples = Samples(rows(), 3)
    runner = make(Table(), 3)
    whole, loss_of = run(runner, samples), runner.measures["some"].loss_of

    def without_parts(tensors: Tensors, stage: Stage) -> Loss:
        return Loss(loss_of(tensors, stage).total)

    measure = Measure(without_parts, ("right",), is_own=is_own)
    runner = replace(runner, measures={"some": measure})
    stage = Stage({}, without=("right",))
    tally = runner.open_tally(cast(Any, Fingerprinted(samples)), {}, stage=stage)
    found = runner.run(
        cast(Any, samples),
        world(),
        tally,
        stage=stage,
        is_stopping=lambda: False,
        on_progress=lambda done, total: None,
    )
    assert found is not None and found.metrics == {} and len(tally.sums) == 1
    assert (found.loss, found.weight) == (whole.loss, whole.weight)


@pytest.mark.parametrize(("is_own", "measured"), [(False, 4), (True, 1)])
def test_a_stop_is_checked_after_each_batch_of_a_custom_measure(
    is_own: bool, measured: int
) -> None:
    """One batch of it may take as long as many others."""
    runner = make(Table(), 1)
    measure = replace(runner.measures["some"], is_own=is_own)
    looks = iter(range(100))
    tally = EvaluationCounts("key", ("right",))
    found = replace(runner, measures={"some": measure}).run(
        cast(Any, Samples(rows(), 1)),
        world(),
        tally,
        stage=Stage({}),
        is_stopping=lambda: next(looks) >= 1,
        on_progress=lambda done, total: None,
    )
    assert found is None and tally.done == measured


@dataclass(frozen=True)
class Others(World):
    """A world whose other ranks report the tallies ``others``."""

    others: tuple[tuple[str, int], ...] = ()

    def gather_json(self, value: Any) -> list[Any]:
        rows = [list(one) for one in self.others]
        return [*rows[: self.rank], value, *rows[self.rank :]]


@pytest.mark.parametrize(
    ("others", "is_refused"),
    [
        ([("key", 3)], False),
        ([("other", 3)], True),
        ([("key", 0)], True),
        ([("other", 3), ("other", 3)], True),
        ([("other", 3), ("key", 3)], False),
    ],
    ids=["the same", "another set", "another place", "a majority", "a minority"],
)
def test_a_rank_whose_set_differs_from_the_other_ranks_measures_nothing(
    others: list[tuple[str, int]], is_refused: bool
) -> None:
    """The mean would be of parts of several sets, or of batches that are counted twice."""
    runner = make(Table(), 1)
    told: list[tuple[int, int]] = []
    where = Others(1, 0, 1 + len(others), torch.device("cpu"), others=tuple(others))

    def evaluate() -> None:
        runner.run(
            cast(Any, Samples(rows(), 1)),
            where,
            EvaluationCounts("key", ("right",), done=3),
            stage=Stage({}),
            is_stopping=lambda: False,
            on_progress=lambda *one: told.append(one),
        )

    if not is_refused:
        evaluate()
        return
    with pytest.raises(HostError, match="evaluation set some: its content here"):
        evaluate()
    assert told == []


@pytest.mark.capability("O-17", "O-18", "O-68")
@pytest.mark.parametrize("cut", [1, 5, 9])
def test_an_interrupted_evaluation_resumes_with_another_world_size_and_equal_bits(
    cut: int,
) -> None:
    """Cut by a stop after ``cut`` looks at it, through JSON, and ended by a world of another size."""
    model, samples = Table(), Samples(rows(61), 1)
    whole = run(make(model, 1), samples)
    looks = iter(range(100))
    tally = EvaluationCounts("key", ("right",))
    found = make(model, 1).run(
        samples,
        world(),
        tally,
        stage=Stage({}),
        is_stopping=lambda: next(looks) >= cut,
        on_progress=lambda done, total: None,
    )
    assert found is None and 0 < tally.done == 4 * cut < 61

    written = json.loads(json.dumps(tally.to_json()))
    again = EvaluationCounts.from_json(written, key="key", names=("right",))
    told: list[tuple[int, int]] = []
    ended = make(model, 1).run(
        samples,
        world(),
        again,
        stage=Stage({}),
        is_stopping=lambda: False,
        on_progress=lambda *one: told.append(one),
    )
    assert ended is not None and told[0][0] == tally.done + 1
    assert (ended.loss, ended.metrics, ended.weight) == (
        whole.loss,
        whole.metrics,
        whole.weight,
    )
