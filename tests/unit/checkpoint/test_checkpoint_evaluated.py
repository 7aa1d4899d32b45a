"""Retention leaves checkpoints that pods have not evaluated yet, up to a bound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad_trainer.checkpoint.evaluated_marks import (
    find_waiting,
    list_marks,
    write_marks,
)
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate, Identity, Manifest
from evergrad_trainer.checkpoint.store import open_store

MakeSolo = Callable[..., Any]


def candidate(
    name: str, step: int, *, generation: int = 1, is_readable: bool = True
) -> Candidate:
    version = Version(step, generation, 1)
    manifest = Manifest(version, 1, Identity("", "", ""), {}, False, (), {}, 0.0)
    return Candidate(name, version, manifest if is_readable else None)


def evaluate(directory: Path, *names: str) -> None:
    """Mark checkpoints as a pod does after their evaluation."""
    there = open_store(directory).catalog.scan()
    write_marks(directory, [one for one in there if one.name in names], there=there)


@pytest.mark.capability("C-2")
def test_a_checkpoint_is_kept_until_it_is_evaluated(make_solo: MakeSolo) -> None:
    solo = make_solo(keep=1, keep_waiting=4)
    for step in (1, 2, 3):
        solo.save(step)
    assert solo.names() == ["step-1", "step-2", "step-3"]
    evaluate(solo.directory, "step-1")
    solo.save(4)
    assert solo.names() == ["step-2", "step-3", "step-4"]
    evaluate(solo.directory, "step-2", "step-3", "step-4")
    solo.save(5)
    assert solo.names() == ["step-5"]


def test_the_newest_waiting_checkpoints_are_kept_and_none_without_evaluation_pods(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=1, keep_waiting=2)
    for step in (1, 2, 3, 4):
        solo.save(step)
    assert solo.names() == ["step-3", "step-4"]
    again = make_solo(keep=1)
    again.save(5)
    assert again.names() == ["step-5"]


def test_another_checkpoint_of_the_same_name_waits_for_its_own_evaluation(
    tmp_path: Path,
) -> None:
    one, other = candidate("step-1", 1), candidate("step-1", 1, generation=2)
    write_marks(tmp_path, [one], there=[one])
    assert find_waiting([one], list_marks(tmp_path)) == []
    assert find_waiting([other], list_marks(tmp_path)) == [other]


def test_the_oldest_step_waits_first_represented_by_its_newest_readable_checkpoint(
    tmp_path: Path,
) -> None:
    found = [
        candidate("step-9", 9),
        candidate("step-4.g3", 4, generation=3, is_readable=False),
        candidate("step-4.g2", 4, generation=2),
        candidate("step-4", 4),
    ]
    assert [one.name for one in find_waiting(found, set())] == ["step-4.g2", "step-9"]


def test_marks_of_deleted_checkpoints_are_removed(tmp_path: Path) -> None:
    first, second = candidate("step-1", 1), candidate("step-2", 2)
    write_marks(tmp_path, [first], there=[first])
    write_marks(tmp_path, [second], there=[second])
    assert {name.partition(".")[0] for name in list_marks(tmp_path)} == {"step-2"}
