"""The newest checkpoint is read before it is asked for, where that can help."""

import json
from pathlib import Path

import pytest

from evergrad_trainer.checkpoint import ahead
from evergrad_trainer.checkpoint.ahead import read_ahead


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for name, size in (("step-1", 10), ("step-2", 3000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.bin").write_bytes(bytes(size))
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    (tmp_path / "latest").write_text(json.dumps({"checkpoint": "step-2"}), "utf-8")
    return tmp_path


def test_the_files_of_the_newest_checkpoint_are_read_to_their_ends(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(ahead, "_read", read.extend)
    thread = read_ahead(checkpoints, memory_bytes=2**20)
    assert thread is not None
    thread.join(30)
    folder = checkpoints / "step-2"
    assert sorted(read) == [folder / "manifest.json", folder / "rank-00000.bin"]


def test_a_file_that_vanishes_meanwhile_ends_the_reading_quietly(checkpoints: Path) -> None:
    ahead._read([checkpoints / "step-2" / "rank-00000.bin", checkpoints / "gone"])


def test_a_checkpoint_that_memory_would_not_keep_is_not_read(checkpoints: Path) -> None:
    assert read_ahead(checkpoints, memory_bytes=8192) is None
    assert read_ahead(checkpoints, memory_bytes=None) is None


@pytest.mark.parametrize("hint", [None, b"", b"{", b"[1]", b'{"checkpoint": "../step-1"}'])
def test_a_hint_that_cannot_be_read_is_no_error(checkpoints: Path, hint: bytes | None) -> None:
    (checkpoints / "latest").unlink()
    if hint is not None:
        (checkpoints / "latest").write_bytes(hint)
    assert read_ahead(checkpoints, memory_bytes=2**20) is None
