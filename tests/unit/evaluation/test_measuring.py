"""Loading a checkpoint for evaluation: a checkpoint that was removed, and a volume that fails temporarily."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_trainer.base.errors import CheckpointError, VolumeError
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate, InvalidCheckpointError
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.evaluation import measurement
from evergrad_trainer.evaluation.measurement import CheckpointEvaluator

MANIFEST: Any = SimpleNamespace(checksum="aa", version=Version(8, 1, 1))
CANDIDATE = Candidate("step-8", MANIFEST.version, MANIFEST)
EIO = OSError(errno.EIO, "Input/output error")


class LoadedError(Exception):
    """The checkpoint is read."""


@pytest.fixture
def evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointEvaluator:
    def load(*_: Any, **__: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measurement, "load_newest", load)
    opened = SimpleNamespace(
        session=SimpleNamespace(identity=None, world=None),
        machinery=SimpleNamespace(state=dict),
    )
    return CheckpointEvaluator(
        cast(Any, opened), open_store(tmp_path), lambda: False, lambda *_: None
    )


def answer(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Let reads of a manifest return these responses, and the last one permanently."""
    left = list(answers)

    def read_manifest(self: CheckpointReader, name: str, **_: Any) -> Any:
        one = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(CheckpointReader, "read_manifest", read_manifest)


def test_a_temporary_volume_error_is_retried(
    evaluator: CheckpointEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, EIO, EIO, MANIFEST)
    with pytest.raises(LoadedError):
        evaluator._load(CANDIDATE)


def test_a_lasting_volume_error_is_not_reported_as_a_missing_checkpoint(
    evaluator: CheckpointEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, EIO)
    with pytest.raises(VolumeError, match="step-8: the checkpoint cannot be read; Input"):
        evaluator._load(CANDIDATE)


@pytest.mark.parametrize(
    "now",
    [
        InvalidCheckpointError("file manifest.json: is missing"),
        SimpleNamespace(checksum="bb", version=MANIFEST.version),
    ],
    ids=["removed", "another one of its name"],
)
def test_a_missing_or_replaced_checkpoint_is_refused(
    evaluator: CheckpointEvaluator, monkeypatch: pytest.MonkeyPatch, now: Any
) -> None:
    answer(monkeypatch, now)
    with pytest.raises(CheckpointError, match="step-8: no longer exists; retention has"):
        evaluator._load(CANDIDATE)
