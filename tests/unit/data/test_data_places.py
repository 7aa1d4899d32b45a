"""Start positions of the data of a run that continues another run in another mixture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import islice

import pytest
import torch

from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.data.batch import Rows, Stage
from evergrad_trainer.data.epochs import Order, PassMixture, exhausted_after
from evergrad_trainer.data.mixture import Mixture
from evergrad_trainer.data.order import Permutation, SampleId
from evergrad_trainer.data.start_positions import (
    DataStart,
    SourcePosition,
    StartRecord,
    place_sources,
)
from evergrad_trainer.data.stream import BatchShape, TrainingStream

BATCHING = BatchShape(global_batch_size=4, micro_batch_size=2)
BOTH = DataStart((SourcePosition("a", "A", 0), SourcePosition("b", "B", 1)))
LEFT = BOTH.go_on(6, cursor={"a": 18, "b": 7}, data_fingerprint="before")


class Items:
    """Items of the source ``content``, known by their numbers."""

    fill: Mapping[str, int] = {"number": -1}

    def __init__(self, content: str, count: int) -> None:
        self.fingerprint = content
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, items: Sequence[int]) -> Rows:
        return Rows({"number": torch.tensor(list(items))}, weight=len(items))

    def describe(self, item: int) -> str:
        return f"{self.fingerprint} {item}"


def stream_of(
    *sources: tuple[str, str, int, float],
    start: DataStart | None = None,
    passes: bool = False,
) -> TrainingStream:
    """A stream over sources by name, content, size and weight."""
    stage = Stage(
        {name: (Items(content, size), weight) for name, content, size, weight in sources},
        counts_passes=passes,
    )
    return TrainingStream([stage], seed=3, batching=BATCHING, start=start)


def samples(stream: TrainingStream, name: str, steps: range) -> list[tuple[int, int]]:
    """Pass and number of each item that the source of this name gives in some steps, in their order."""
    source = list(stream.stages[0].sources).index(name)
    return [
        (one.epoch, one.window)
        for step in steps
        for slot in range(stream.slots_per_step)
        for one in stream.slot(step, slot).samples
        if one.source == source
    ]


def test_a_new_run_has_each_source_at_its_first_item() -> None:
    assert place_sources(None, [("a", "A"), ("b", "B")]) == BOTH
    assert not BOTH.goes_on and LEFT.goes_on
    for start in (BOTH, LEFT, place_sources(LEFT, [("c", "C")])):
        assert DataStart.from_record(StartRecord.model_validate(start.to_json())) == start


def test_the_content_of_a_source_is_recorded_while_runs_omit_it() -> None:
    first = BOTH.go_on(
        6,
        cursor={"a": 18, "b": 7},
        data_fingerprint="one",
        contents={"a": "files", "b": "more"},
    )
    second = place_sources(first, [("b", "B")])
    # As an older version reads it, which takes every key of a place for a field.
    written = second.to_json()
    assert {*written["leftOut"][0]} == {"name", "fingerprint", "number", "taken"}
    third = DataStart.from_record(StartRecord.model_validate(written)).go_on(
        9, cursor={"b": 19}, data_fingerprint="two"
    )
    assert third.left_out == (SourcePosition("a", "A", 0, 18, "files"),)
    assert third.sources == (SourcePosition("b", "B", 1, 19, "more"),)


def test_a_source_is_identified_by_its_content_and_continues_under_any_name() -> None:
    placed = place_sources(LEFT, [("new", "C"), ("renamed", "B")])
    assert placed.sources == (
        SourcePosition("new", "C", 2, 0),
        SourcePosition("renamed", "B", 1, 7),
    )
    assert placed.left_out == (SourcePosition("a", "A", 0, 18),)
    assert (placed.after_step, placed.data_before) == (6, "before")
    # A name alone is nothing: other content under it is another source.
    assert place_sources(LEFT, [("b", "D")]).sources == (SourcePosition("b", "D", 2, 0),)


def test_a_resume_finds_the_source_positions_of_the_start() -> None:
    mixture = [("new", "C"), ("renamed", "B"), ("twin", "C")]
    placed = place_sources(LEFT, mixture)
    assert [one.number for one in placed.sources] == [2, 1, 3]
    assert place_sources(placed, mixture) == placed


def test_a_source_that_kept_its_name_continues_next_to_one_with_the_same_items() -> None:
    twins = DataStart(
        (SourcePosition("one", "A", 0, 5), SourcePosition("two", "A", 1, 9)),
        3,
        (),
        "before",
    )
    assert place_sources(twins, [("two", "A")]).sources == (
        SourcePosition("two", "A", 1, 9),
    )
    placed = place_sources(twins, [("other", "A"), ("two", "A"), ("third", "A")])
    assert [(one.number, one.taken) for one in placed.sources] == [(0, 5), (1, 9), (2, 0)]


def test_a_source_that_was_omitted_continues_in_a_later_run() -> None:
    second = place_sources(LEFT, [("b", "B"), ("c", "C")])
    third = second.go_on(9, cursor={"b": 13, "c": 6}, data_fingerprint="second")
    placed = place_sources(third, [("a", "A"), ("c", "C"), ("d", "D")])
    assert placed.sources == (
        SourcePosition("a", "A", 0, 18),
        SourcePosition("c", "C", 2, 6),
        SourcePosition("d", "D", 3, 0),
    )
    assert placed.left_out == (SourcePosition("b", "B", 1, 13),)


def test_a_cursor_of_other_sources_is_not_a_position() -> None:
    with pytest.raises(ValueError, match="the cursor has the sources a, x"):
        BOTH.go_on(6, cursor={"a": 18, "x": 7}, data_fingerprint="before")


@pytest.mark.parametrize("passes", [False, True])
def test_mixtures_with_start_positions_match_values_computed_by_hand(passes: bool) -> None:
    """B of 5 items has given 7: it continues with the third item of its second pass, keyed by its old
    number."""
    places = [SourcePosition("b", "B", 1, 7), SourcePosition("c", "C", 2, 0)]
    mixture: Order = Mixture([5, 4], weights=[1, 1], seed=3, places=places)
    if passes:
        mixture = PassMixture([5, 4], counts=[1, 1], seed=3, places=places)
    located = [mixture.locate(position) for position in range(8)]
    assert [one.source for one in located] == [0, 1] * 4
    kept = [(1, 2), (1, 3), (1, 4), (2, 0)]
    assert [one for one in located if one.source == 0] == [
        SampleId(0, epoch, Permutation(seed=3, source=1, epoch=epoch, size=5)(index))
        for epoch, index in kept
    ]
    new = Permutation(seed=3, source=2, epoch=0, size=4)
    assert [one.window for one in located if one.source == 1] == [
        new(at) for at in range(4)
    ]
    assert mixture.cursor(0) == [7, 0] and mixture.cursor(8) == [11, 4]


@pytest.mark.parametrize("passes", [False, True])
def test_a_kept_source_continues_exactly_and_a_new_source_starts_at_its_first_item(
    passes: bool,
) -> None:
    old = stream_of(("a", "A", 50, 3.0), ("b", "B", 11, 1.0), passes=passes)
    assert old.start is not None
    start = old.start.go_on(6, cursor=old.cursor(6), data_fingerprint=old.fingerprint)
    new = stream_of(("c", "C", 9, 1.0), ("bee", "B", 11, 2.0), start=start, passes=passes)

    # If the old run had continued, it would have given these items of B in this order.
    read = old.cursor(6)["b"]
    whole = samples(old, "b", range(1, 400))
    kept = samples(new, "bee", range(7, 30))
    assert kept == whole[read : read + len(kept)] and len(kept) > 20
    # C has a pass over all of its items first.
    begun = list(islice(samples(new, "c", range(7, 60)), 9))
    assert {epoch for epoch, _ in begun} == {0}
    assert Counter(number for _, number in begun) == Counter(range(9))
    assert new.cursor(6) == {"c": 0, "bee": read}
    assert new.cursor(29) == {"c": 23 * 4 - len(kept), "bee": read + len(kept)}


def test_steps_start_after_the_position() -> None:
    stream = stream_of(("b", "B", 11, 1.0), start=LEFT)
    assert (stream.first_step, stream_of(("b", "B", 11, 1.0)).first_step) == (7, 1)
    with pytest.raises(IndexError, match="steps count from 7"):
        stream.slot(6, 0)


def test_the_fingerprint_includes_the_position_and_is_unchanged_without_one() -> None:
    fresh = stream_of(("a", "A", 9, 1.0), ("b", "B", 11, 1.0))
    recorded = stream_of(("a", "A", 9, 1.0), ("b", "B", 11, 1.0), start=BOTH)
    assert recorded.fingerprint == fresh.fingerprint
    assert recorded.slot(2, 1).samples == fresh.slot(2, 1).samples
    starts = [
        LEFT,
        BOTH.go_on(7, cursor={"a": 18, "b": 7}, data_fingerprint="before"),
        BOTH.go_on(6, cursor={"a": 18, "b": 8}, data_fingerprint="before"),
    ]
    both = [("a", "A", 9, 1.0), ("b", "B", 11, 1.0)]
    found = {stream_of(*both, start=start).fingerprint for start in starts}
    assert len(found | {fresh.fingerprint}) == 4


def test_the_end_of_a_source_includes_the_samples_of_earlier_runs() -> None:
    # In turns from source 0 on, which has given 7 of its 10 items; the other has given all of its 4.
    places = [SourcePosition("b", "B", 0, 7), SourcePosition("a", "A", 1, 18)]
    mixture = Mixture([10, 4], weights=[1, 1], seed=0, places=places)
    assert exhausted_after(mixture, Fraction(1), "first") == 0
    assert exhausted_after(mixture, Fraction(1), "all") == 5
    # Samples of all steps, including those of the six earlier steps.
    stream = stream_of(("b", "B", 10, 1.0), ("a", "A", 4, 1.0), start=LEFT)
    assert stream.exhausted_after(Fraction(1), "first") == 24
    assert stream.exhausted_after(Fraction(1), "all") == 29


def test_a_position_in_several_stages_is_refused() -> None:
    stages = [
        Stage({"a": (Items("A", 9), 1.0)}, until=9),
        Stage({"b": (Items("B", 9), 1.0)}),
    ]
    with pytest.raises(ConfigurationError, match="position is that of one mixture"):
        TrainingStream(stages, seed=3, batching=BATCHING, start=LEFT)
    assert TrainingStream(stages, seed=3, batching=BATCHING).start is None
