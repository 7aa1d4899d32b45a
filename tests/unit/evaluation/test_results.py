"""Results of ``evergrad evaluate``: complete, written once, and distinguished by their measurement settings."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evergrad_trainer.evaluation.results import (
    ResultPlace,
    place_of,
    read_cut,
    read_result,
    remove_stale_cuts,
    write_cut,
    write_result,
)

FACTS = {"checkpoint": "step-8", "checksum": "aa", "name": "heldOut", "key": "bb"}


def place(directory: Path, **changes: str) -> ResultPlace:
    facts = {**FACTS, **changes}
    return place_of(
        directory,
        checkpoint=facts["checkpoint"],
        checksum=facts["checksum"],
        name=facts["name"],
        key=facts["key"],
    )


def refuse_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


@pytest.mark.capability("T-X9")
@pytest.mark.parametrize("has_links", [True, False])
def test_a_result_is_written_once_and_the_first_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    assert read_result(place(tmp_path)) is None
    first = write_result(place(tmp_path), {"loss": 0.1 + 0.2, "seconds": 1.0})
    assert first == {"format": 1, "loss": 0.1 + 0.2, "seconds": 1.0}
    assert write_result(place(tmp_path), {"loss": 9.0, "seconds": 2.0}) == first
    assert read_result(place(tmp_path)) == first
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == [
        place(tmp_path).name
    ]


@pytest.mark.parametrize(
    "change",
    [{"checkpoint": "step-8.g2"}, {"checksum": "ab"}, {"name": "other"}, {"key": "bc"}],
)
def test_a_measurement_with_other_settings_has_its_own_file(
    tmp_path: Path, change: dict[str, str]
) -> None:
    assert place(tmp_path, **change).path != place(tmp_path).path


def test_any_set_name_gives_a_valid_file_name(tmp_path: Path) -> None:
    one, other = place(tmp_path, name="a/../b ü"), place(tmp_path, name="a/../b ö")
    assert one.path.parent == tmp_path / "evaluations"
    assert one.name != other.name and one.name.startswith("step-8.a_b_.")
    write_result(one, {})
    assert one.path.is_file()


def test_a_non_finite_loss_is_null(tmp_path: Path) -> None:
    write_result(place(tmp_path), {"loss": float("nan")})
    assert json.loads(place(tmp_path).path.read_text())["loss"] is None


@pytest.mark.capability("O-43")
def test_partial_results_are_deleted_with_the_result_or_with_the_checkpoint(
    tmp_path: Path,
) -> None:
    done, going, stale = (
        place(tmp_path),
        place(tmp_path, name="other"),
        place(tmp_path, checkpoint="step-2"),
    )
    for one in (done, going, stale):
        assert read_cut(one) == {}
        write_cut(one, {"done": 3})
        assert read_cut(one) == {"done": 3}
    write_result(done, {"loss": 1.0})
    remove_stale_cuts(tmp_path, lambda: ["step-8"])
    assert [one.cut.exists() for one in (done, going, stale)] == [False, True, False]


def test_a_file_that_another_evaluator_is_writing_is_left_to_it(tmp_path: Path) -> None:
    """It was removed between its writing and its renaming, which ended that evaluator."""
    write_cut(place(tmp_path), {"done": 3})
    folder = place(tmp_path).cut.parent
    going, stale = (
        folder / f".{place(tmp_path, checkpoint=name).name}.7-ab.tmp"
        for name in ("step-8", "step-2")
    )
    for path in (going, stale):
        path.write_text("{")
    remove_stale_cuts(tmp_path, lambda: ["step-8"])
    assert going.exists() and not stale.exists()


def test_files_of_a_checkpoint_that_is_being_published_are_kept(
    tmp_path: Path,
) -> None:
    write_cut(place(tmp_path), {"done": 3})
    new = place(tmp_path, checkpoint="step-12")

    def list_names() -> list[str]:
        # Published after the list of checkpoints was read, and evaluated immediately.
        write_cut(new, {"done": 1})
        return ["step-8"]

    remove_stale_cuts(tmp_path, list_names)
    assert place(tmp_path).cut.exists() and new.cut.exists()


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_unreadable_partial_results_count_nothing(tmp_path: Path, text: str) -> None:
    write_cut(place(tmp_path), {"done": 3})
    place(tmp_path).cut.write_text(text)
    assert read_cut(place(tmp_path)) == {}
