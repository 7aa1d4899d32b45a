"""The newest checkpoint is read before it is requested, if that can help."""

import json
from pathlib import Path

import pytest

from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.files import hash_bytes
from evergrad_trainer.checkpoint.read_ahead import read_ahead


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for name, size in (("step-1", 10), ("step-2", 3000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.bin").write_bytes(bytes(size))
        (tmp_path / name / "tensors.json").write_bytes(b"{}")
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    (tmp_path / "latest").write_text(json.dumps({"checkpoint": "step-2"}), "utf-8")
    return tmp_path


def test_the_files_of_the_newest_checkpoint_are_read_completely(
    checkpoints: Path,
) -> None:
    held = read_ahead(checkpoints, memory_bytes=2**20)
    assert held is not None
    held.wait()
    shard = checkpoints / "step-2" / "rank-00000.bin"
    assert held.has(shard) and held.has(checkpoints / "step-2" / "tensors.json")
    assert not held.has(checkpoints / "step-1" / "rank-00000.bin")
    assert held.matches(shard, hash_bytes(bytes(3000)))
    assert held.find(shard) == bytes(3000)


def test_the_manifest_is_not_read_ahead(checkpoints: Path) -> None:
    """The manifest is compared with everything else, and is read when the checkpoint is chosen."""
    held = read_ahead(checkpoints, memory_bytes=2**20)
    assert held is not None
    held.wait()
    assert not held.has(checkpoints / "step-2" / "manifest.json")


def test_a_file_that_vanishes_ends_the_read_ahead_without_an_error(
    checkpoints: Path,
) -> None:
    held = HeldFiles(limit_bytes=2**20)
    held.begin([checkpoints / "gone"])
    held.wait()
    assert not held.has(checkpoints / "gone")


def test_a_checkpoint_that_needs_too_much_memory_is_not_read_ahead(
    checkpoints: Path,
) -> None:
    assert read_ahead(checkpoints, memory_bytes=8192) is None
    assert read_ahead(checkpoints, memory_bytes=None) is None


@pytest.mark.parametrize("hint", [None, b"", b"{", b"[1]", b'{"checkpoint": "../step-1"}'])
def test_an_unreadable_hint_raises_no_error(checkpoints: Path, hint: bytes | None) -> None:
    (checkpoints / "latest").unlink()
    if hint is not None:
        (checkpoints / "latest").write_bytes(hint)
    assert read_ahead(checkpoints, memory_bytes=2**20) is None
