"""Stages: the stage of a step depends only on the step, and each stage has its own order."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch

from evergrad_trainer.data.batch import Rows, Stage
from evergrad_trainer.data.stream import BatchShape, TrainingStream

BATCHING = BatchShape(global_batch_size=4, micro_batch_size=2)


class Numbers:
    """Items that are their own numbers, above ``first``."""

    fill: Mapping[str, int] = {"number": -1}

    def __init__(self, first: int, count: int) -> None:
        self.fingerprint = f"{first}-{count}"
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, items: Sequence[int]) -> Rows:
        return Rows(
            {"number": torch.tensor([self._first + item for item in items])},
            weight=len(items),
        )

    def describe(self, item: int) -> str:
        return f"number {self._first + item}"


def numbers(stream: TrainingStream, step: int) -> list[int]:
    slots = range(stream.slots_per_step)
    return [
        int(value) for slot in slots for value in stream.slot(step, slot).tensors["number"]
    ]


def staged(*, until: int = 3, seed: int = 0) -> TrainingStream:
    first = Stage({"low": (Numbers(0, 12), 1.0)}, until=until, options="first")
    second = Stage(
        {"high": (Numbers(100, 8), 3.0), "low": (Numbers(0, 12), 1.0)}, options="second"
    )
    return TrainingStream([first, second], seed=seed, batching=BATCHING)


def test_a_step_belongs_to_the_first_stage_that_has_not_ended() -> None:
    stream = staged()
    assert [stream.stage(step).options for step in (1, 3, 4, 1000)] == [
        "first",
        "first",
        "second",
        "second",
    ]
    assert [stream.entered_after(step) for step in (0, 2, 4)] == [None, None, None]
    entered = stream.entered_after(3)
    assert entered is not None and entered.options == "second"


def test_each_stage_gives_every_item_of_its_sources_once_per_epoch() -> None:
    stream = staged()
    assert sorted(number for step in (1, 2, 3) for number in numbers(stream, step)) == list(
        range(12)
    )
    later = Counter(number for step in (4, 5) for number in numbers(stream, step))
    assert max(later.values()) == 1
    assert sum(number >= 100 for number in later) == 6, (
        "three of four are from the heavier source"
    )


def test_the_first_stage_has_the_order_of_a_run_without_stages_and_later_stages_do_not() -> (
    None
):
    alone = TrainingStream(
        [Stage({"low": (Numbers(0, 12), 1.0)})], seed=0, batching=BATCHING
    )
    twice = [
        Stage({"low": (Numbers(0, 12), 1.0)}, until=3),
        Stage({"low": (Numbers(0, 12), 1.0)}),
    ]
    both = TrainingStream(twice, seed=0, batching=BATCHING)
    order = [[numbers(stream, step) for step in range(1, 7)] for stream in (alone, both)]
    assert order[0][:3] == order[1][:3]
    assert order[1][3:] != order[1][:3]
    assert sorted(number for step in order[1][3:] for number in step) == list(range(12))


def test_the_cursor_counts_the_sources_of_each_stage_by_their_own_names() -> None:
    stream = staged()
    assert stream.cursor(0) == {"0/low": 0, "1/high": 0, "1/low": 0}
    assert stream.cursor(2) == {"0/low": 8, "1/high": 0, "1/low": 0}
    assert stream.cursor(5) == {"0/low": 12, "1/high": 6, "1/low": 2}


def test_samples_of_two_stages_have_different_ids_and_are_described_by_their_source() -> (
    None
):
    stream = staged()
    first, second = stream.slot(1, 0).samples[0], stream.slot(4, 0).samples[0]
    assert first.source == 0 and second.source in (1, 2)
    described = stream.describe(first)
    assert described == f"low/epoch 0/window {first.window} (number {first.window})"
    assert stream.slot(3, 1).hash != staged(until=2).slot(3, 1).hash


def test_the_end_of_a_stage_is_part_of_the_fingerprint() -> None:
    assert staged().fingerprint == staged().fingerprint
    assert (
        len({staged().fingerprint, staged(until=4).fingerprint, staged(seed=1).fingerprint})
        == 3
    )


def test_an_epoch_counts_a_source_once_for_any_number_of_stages() -> None:
    """A horizon in epochs is passes over the data: 12 items that both stages have, and 8 of the second alone."""
    assert staged().num_samples == 20
    # Two sources of one stage are two, also where their items are equal.
    twins = Stage({"one": (Numbers(0, 12), 1.0), "two": (Numbers(0, 12), 1.0)})
    assert TrainingStream([twins], seed=0, batching=BATCHING).num_samples == 24
    # Sources of two stages that share a name and no items are two as well.
    stages = [
        Stage({"one": (Numbers(0, 12), 1.0)}, until=3),
        Stage({"one": (Numbers(100, 8), 1.0)}),
    ]
    assert TrainingStream(stages, seed=0, batching=BATCHING).num_samples == 20


@pytest.mark.parametrize("ends", [(), (None, None), (5, 3), (0, None)])
def test_stages_that_are_not_consecutive_are_refused(
    ends: tuple[int | None, ...],
) -> None:
    stages = [Stage({"low": (Numbers(0, 12), 1.0)}, until=end) for end in ends]
    if ends and ends[-1] is not None:
        stages.append(Stage({"low": (Numbers(0, 12), 1.0)}))
    with pytest.raises(
        ValueError, match="stages end at steps that rise, and only the last one is open"
    ):
        TrainingStream(stages, seed=0, batching=BATCHING)
