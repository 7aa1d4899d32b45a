"""The exchange between ranks that form a world, and the values that each rank has afterwards."""

import errno
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_common.contract import ErrorKind
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.training.progress import (
    TrainingProgress,
    choose_source,
    describe_rank,
)
from evergrad_trainer.training.progress import adopt as adopt_rows
from evergrad_trainer.worker.channel import Failed
from evergrad_trainer.worker.run import report_end

BEST = {"metric": "held/loss", "value": 2.0, "step": 6}
BEFORE = {"metric": "held/loss", "value": 3.0, "step": 4}


def checkpoints(*, published: int | None = None, failures: int = 0) -> CheckpointManager:
    newest = None if published is None else SimpleNamespace(step=published)
    return cast(CheckpointManager, SimpleNamespace(published=newest, failures=failures))


def row(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step, "failures": 0, "published": -1, "begun": -1, "evaluated_step": -1, "steps_here": step, "best": None,
        "best_before": None, "record": None, "is_tally_unsaved": False,
    }  # fmt: skip
    return {**base, **changes}


def adopt(*rows: dict[str, Any]) -> TrainingProgress:
    progress = TrainingProgress(
        finished_steps=99, saved_step=99, resumed_step=99, evaluated_step=99
    )
    source = rows[choose_source(list(rows))]
    values = ("step", "evaluated_step", "best", "best_before")
    progress.load_values({key: source[key] for key in values})
    adopt_rows(progress, list(rows))
    return progress


def test_a_rank_reports_the_newest_checkpoint_that_it_knows_as_published() -> None:
    progress = TrainingProgress(
        finished_steps=8, resumed_step=3, saved_step=6, steps_here=5, evaluated_step=4
    )
    told = describe_rank(progress, checkpoints(), held_step=8)
    assert (
        told["step"],
        told["published"],
        told["begun"],
        told["steps_here"],
        told["record"],
    ) == (
        8,
        3,
        6,
        5,
        None,
    )
    assert (
        describe_rank(progress, checkpoints(published=6, failures=2), held_step=-1)[
            "published"
        ]
        == 6
    )
    assert describe_rank(progress, checkpoints(failures=2), held_step=-1)["failures"] == 2


def test_all_ranks_adopt_the_memory_of_the_ranks_with_the_newest_step(
    synthetic: ModuleType,
) -> None:
    record = asdict(synthetic.step_record(8))
    progress = adopt(
        row(-1),
        row(7, evaluated_step=7, steps_here=50),
        row(8, evaluated_step=6, steps_here=8, record=record, best=BEST, published=6),
    )
    assert (progress.finished_steps, progress.evaluated_step, progress.steps_here) == (
        8,
        6,
        8,
    )
    assert progress.last_record is not None and asdict(progress.last_record) == record
    assert progress.best == BEST


def test_an_evaluation_that_only_some_ranks_have_finished_is_repeated() -> None:
    assert adopt(row(8, evaluated_step=8), row(8, evaluated_step=4)).evaluated_step == 4


@pytest.mark.parametrize(
    ("rows", "published", "is_lost"),
    [
        ([row(8, published=5, begun=5), row(8, published=5, begun=5)], 5, False),
        ([row(8, published=5, begun=8), row(8, published=5, begun=8)], 5, True),
        ([row(8, published=5, begun=8), row(8, published=8, begun=8)], 8, False),
        ([row(8, published=5, begun=5), row(-1, published=-1, begun=-1)], 5, False),
        ([row(8, published=-1, begun=-1), row(-1, published=3, begun=12)], 3, False),
    ],
    ids=[
        "all stands",
        "the save ended with its world",
        "one has seen it stand",
        "a newcomer",
        "a begun save of a rank without state",
    ],
)
def test_a_save_is_lost_if_no_rank_has_seen_it_published(
    rows: list[dict[str, Any]], published: int, is_lost: bool
) -> None:
    progress = adopt(*rows)
    assert progress.saved_step == progress.resumed_step == published
    assert progress.is_save_lost == is_lost


@pytest.mark.parametrize(
    ("step", "published", "is_kept"), [(8, 5, False), (8, 6, True), (6, 5, True)]
)
def test_a_best_step_whose_save_was_lost_is_replaced_unless_its_state_still_exists(
    step: int, published: int, is_kept: bool
) -> None:
    """Else the next one, even a worse one, would become the best and let go of the one before."""
    values = {"best": BEST, "best_before": BEFORE}
    progress = adopt(row(step, **values, published=published, begun=6))
    expected = (BEST, BEFORE) if is_kept else (BEFORE, None)
    assert (progress.best, progress.best_before) == expected


@pytest.mark.parametrize(
    ("of_the_newest", "of_an_older", "expected"),
    [(True, False, True), (False, True, False), (False, False, False)],
)
def test_a_joining_rank_knows_of_measurements_that_are_not_saved(
    of_the_newest: bool, of_an_older: bool, expected: bool
) -> None:
    """Ranks that do not agree would not all take part in the save."""
    progress = adopt(
        row(8, is_tally_unsaved=of_the_newest),
        row(7, is_tally_unsaved=of_an_older),
        row(-1),
    )
    assert progress.is_tally_unsaved == expected


def test_without_a_published_best_there_is_no_best() -> None:
    values = {"best": BEST, "best_before": BEFORE}
    progress = adopt(row(8, **values, published=2, begun=6))
    assert (progress.best, progress.best_before) == (None, None)


def test_an_unexpected_volume_error_is_reported_as_a_host_fault() -> None:
    end = report_end(None, OSError(errno.EIO, "Input/output error"), generation=3)
    assert (
        isinstance(end.last_words, Failed) and end.last_words.kind == ErrorKind.ENVIRONMENT
    )
    end = report_end(None, ValueError("a mistake"), generation=3)
    assert isinstance(end.last_words, Failed) and end.last_words.kind == ErrorKind.INTERNAL
