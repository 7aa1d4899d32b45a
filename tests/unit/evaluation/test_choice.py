"""Which checkpoint and which sets an argument means, and the message if there is none."""

import errno
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.base.errors import CheckpointError, VolumeError
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate, InvalidCheckpointError
from evergrad_trainer.evaluation.choice import choose_checkpoint, choose_sets


def version_of(name: str) -> Version:
    return Version(int(name.split("-")[1].split(".", maxsplit=1)[0]), 0, 0)


def store(*names: str, best: str | None = None, damaged: str = "", refused: int = 0) -> Any:
    """Names as a scan gives them, newest first. ``refused``: how often the volume refuses to be read."""
    left = [OSError(errno.EIO, "Input/output error")] * refused

    def validate(name: str, *, checksums: bool) -> Any:
        if name == damaged:
            raise InvalidCheckpointError("file rank-00000.bin: is missing")
        if left:
            raise left.pop()
        return SimpleNamespace(version=version_of(name))

    candidates = [Candidate(name, version_of(name), None) for name in names]
    return cast(
        Any,
        SimpleNamespace(
            catalog=SimpleNamespace(
                scan=lambda: candidates, read_pointer=lambda pointer: best
            ),
            reader=SimpleNamespace(
                locate=lambda name: f"run/checkpoints/{name}", validate=validate
            ),
        ),
    )


def sets(*names: str) -> Any:
    return cast(Any, [SimpleNamespace(name=name) for name in names])


@pytest.mark.parametrize(
    ("asked", "name"),
    [("last", "step-9"), ("best", "step-4"), ("4", "step-4.g7"), ("0009", "step-9")],
)
def test_a_checkpoint_is_chosen_as_last_best_or_newest_of_a_step(
    asked: str, name: str
) -> None:
    found = store("step-9", "step-4.g7", "step-4", best="step-4")
    assert choose_checkpoint(found, asked).name == name


def test_a_checkpoint_with_missing_files_is_skipped() -> None:
    found = store("step-9", "step-4", damaged="step-9")
    assert choose_checkpoint(found, "last").name == "step-4"
    with pytest.raises(CheckpointError, match="step-9: cannot be loaded; file rank-00000"):
        choose_checkpoint(found, "9")


def test_a_temporary_volume_error_does_not_choose_an_older_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    found = choose_checkpoint(store("step-9", "step-4", refused=2), "last")
    assert found.name == "step-9" and found.manifest is not None
    with pytest.raises(VolumeError, match="step-9: the checkpoint cannot be read; Input"):
        choose_checkpoint(store("step-9", "step-4", refused=1000), "last")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("5", "contains no checkpoint of step 5; .* Choose one of the existing ones: 4, 9"),
        ("best", "no checkpoint is the best; .* Name a step; there are 4, 9"),
    ],
)
def test_a_missing_choice_is_refused_with_the_available_ones(
    asked: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose_checkpoint(store("step-9", "step-4"), asked)


@pytest.mark.acceptance("8d-4h")
@pytest.mark.parametrize("asked", ["newest", "-3", "4.0", ""])
def test_an_invalid_step_is_refused(asked: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"is not a step; .* Use a step, best or last"
    ):
        choose_checkpoint(store("step-9"), asked)


def test_a_run_without_checkpoints_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match="contains no checkpoint; the run has not saved one"
    ):
        choose_checkpoint(store(), "last")


@pytest.mark.capability("T-30")
def test_sets_are_chosen_by_name_in_the_order_of_the_run() -> None:
    found = sets("heldOut", "wiki", "code")
    assert [one.name for one in choose_sets(found, [])] == ["heldOut", "wiki", "code"]
    assert [one.name for one in choose_sets(found, ["code", "heldOut"])] == [
        "heldOut",
        "code",
    ]


def test_all_unknown_sets_are_reported_together_with_the_available_ones() -> None:
    with pytest.raises(ConfigurationError) as refused:
        choose_sets(sets("heldOut", "wiki"), ["heldout", "zzz", "wiki"])
    assert [str(problem) for problem in refused.value.problems] == [
        "--set: 'heldout' is not an evaluation set; did you mean heldOut? Known: heldOut, wiki.",
        "--set: 'zzz' is not an evaluation set; the run's file has no such set. Known: heldOut, wiki.",
    ]


def test_a_run_without_sets_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the run has no evaluation set"):
        choose_sets(sets(), [])
