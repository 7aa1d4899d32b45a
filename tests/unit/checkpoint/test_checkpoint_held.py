"""A checkpoint is read once, and the loaded bytes are the hashed bytes."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evergrad_trainer.checkpoint import cached_files as held_module
from evergrad_trainer.checkpoint import files, restore
from evergrad_trainer.checkpoint import reader as reader_module
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.files import hash_bytes
from evergrad_trainer.checkpoint.manifest import InvalidCheckpointError
from evergrad_trainer.checkpoint.read_ahead import read_ahead
from evergrad_trainer.checkpoint.reader import CheckpointReader, FileSource, MemorySource
from evergrad_trainer.checkpoint.search import choose_together

MakeSolo = Callable[..., Any]
SHARD = "rank-00000.bin"
FILES = [SHARD, "tensors.json"]


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read by position, by file name: shards are read in this way."""
    counted: Counter[str] = Counter()
    preadv = os.preadv

    def count(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        num_bytes = preadv(descriptor, buffers, offset)
        counted[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += num_bytes
        return num_bytes

    monkeypatch.setattr(os, "preadv", count)
    return counted


def flip(path: Path, position: int = 70) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def sizes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in FILES}


def test_each_byte_of_a_restored_checkpoint_is_read_once(
    make_solo: MakeSolo, read_bytes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo()
    solo.save(10)
    monkeypatch.setattr(files, "hash_file", None)  # the path that reads a second time
    assert make_solo().restore() == 10
    assert dict(read_bytes) == sizes(solo.directory / "step-10")


def test_files_that_were_read_ahead_are_not_read_again(
    make_solo: MakeSolo, make_state: Callable[[int], Any], read_bytes: Counter[str]
) -> None:
    solo = make_solo()
    solo.save(10)
    ahead = read_ahead(solo.directory, memory_bytes=2**30)
    state = make_state(0)
    restored = make_solo().manager.restore(state, ahead=ahead)
    assert restored is not None and restored.step == 10
    assert all(value.equal(make_state(10)[key]) for key, value in state.items())
    assert dict(read_bytes) == sizes(solo.directory / "step-10")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_ahead", [True, False], ids=["read ahead", "read when chosen"])
def test_a_flipped_bit_is_detected_before_any_byte_of_the_file_is_loaded(
    make_solo: MakeSolo, make_state: Callable[[int], Any], name: str, is_ahead: bool
) -> None:
    solo = make_solo()
    solo.save(10)
    solo.save(20)
    flip(solo.directory / "step-20" / name)
    ahead = read_ahead(solo.directory, memory_bytes=2**30) if is_ahead else None
    again = make_solo()
    state = make_state(0)
    restored = again.manager.restore(state, ahead=ahead)
    assert restored is not None and restored.step == 10
    assert all(value.equal(make_state(10)[key]) for key, value in state.items())
    assert again.events[0][1]["reason"] == f"file {name}: checksum differs"


def test_a_checkpoint_that_changes_after_hashing_is_loaded_as_it_was_hashed(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo()
    solo.save(10)

    def change(*args: Any) -> Any:
        choice = choose_together(*args)
        for name in FILES:
            flip(solo.directory / "step-10" / name)
        return choice

    monkeypatch.setattr(restore, "choose_together", change)
    assert make_solo().restore() == 10  # compares every value bit for bit


def test_a_checkpoint_that_was_damaged_when_read_ahead_is_read_again(
    make_solo: MakeSolo, make_state: Callable[[int], Any]
) -> None:
    """A network volume may have shown an older state of a file."""
    solo = make_solo()
    solo.save(10)
    shard = solo.directory / "step-10" / SHARD
    flip(shard)
    ahead = read_ahead(solo.directory, memory_bytes=2**30)
    assert ahead is not None
    ahead.wait()
    flip(shard)
    restored = make_solo().manager.restore(make_state(0), ahead=ahead)
    assert restored is not None and restored.step == 10


def test_a_checkpoint_that_needs_too_much_memory_is_hashed_and_then_read(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo()
    solo.save(10)
    monkeypatch.setattr(restore, "room_for_files", lambda: 1000)
    opened: list[str] = []
    original = FileSource.__init__

    def note(self: FileSource, descriptor: int, name: str) -> None:
        opened.append(name)
        original(self, descriptor, name)

    monkeypatch.setattr(FileSource, "__init__", note)
    assert make_solo().restore() == 10
    assert opened == [SHARD]


def test_bytes_are_returned_only_after_their_hash_was_compared(tmp_path: Path) -> None:
    path = tmp_path / SHARD
    path.write_bytes(b"content")
    held = HeldFiles(limit_bytes=2**20)
    held.begin([path])
    held.wait()
    assert held.has(path) and held.find(path) is None
    assert not held.matches(path, "0" * 32) and not held.has(path)
    assert held.matches(path, hash_bytes(b"content")) and held.find(path) == b"content"


def test_memory_is_used_for_one_checkpoint_at_a_time(tmp_path: Path) -> None:
    held = HeldFiles(limit_bytes=10)
    for name in ("step-1", "step-2"):
        path = tmp_path / name / SHARD
        path.parent.mkdir()
        path.write_bytes(b"content")
        held.keep_only(path.parent)
        assert held.matches(path, hash_bytes(b"content")) and held.find(path) is not None
    assert not held.has(tmp_path / "step-1" / SHARD)
    held.release()
    assert not held.has(tmp_path / "step-2" / SHARD)


@pytest.mark.parametrize(
    ("begin", "size"), [(0, 100), (3, 64), (36, 64), (99, 1), (100, 0)]
)
def test_a_large_tensor_is_copied_in_pieces_so_that_other_threads_can_run(
    monkeypatch: pytest.MonkeyPatch, begin: int, size: int
) -> None:
    monkeypatch.setattr(reader_module, "COPY_BYTES", 32)
    moved: list[int] = []
    monkeypatch.setattr(reader_module, "MOVED", SimpleNamespace(note=moved.append))
    data = os.urandom(100)
    buffer = memoryview(bytearray(size))
    MemorySource(memoryview(data), SHARD).read_into(buffer, begin)
    assert buffer == data[begin : begin + size]
    assert sum(moved) == size and all(count <= 32 for count in moved)


def test_a_range_beyond_the_end_of_a_file_in_memory_is_damage() -> None:
    with pytest.raises(InvalidCheckpointError, match="ends at byte 10"):
        MemorySource(memoryview(bytes(10)), SHARD).read_into(memoryview(bytearray(4)), 7)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize("refuses", [True, False], ids=["through the cache", "directly"])
def test_files_of_any_length_are_read_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refuses: bool
) -> None:
    if refuses:
        monkeypatch.setattr(files, "set_direct", lambda descriptor, wanted: False)
    monkeypatch.setattr(held_module, "BLOCK_BYTES", 8192)
    data = os.urandom(size)
    path = tmp_path / SHARD
    path.write_bytes(data)
    held = HeldFiles(limit_bytes=2**20)
    assert held.matches(path, hash_bytes(data))
    assert held.find(path) == data


def test_a_reader_holds_no_bytes_outside_a_restore(make_solo: MakeSolo) -> None:
    solo = make_solo()
    solo.save(10)
    reader: CheckpointReader = solo.manager._store.reader
    held = HeldFiles(limit_bytes=2**20)
    with reader.holding(held):
        reader.validate("step-10", checksums=True)
        assert held.has(solo.directory / "step-10" / SHARD)
    with reader.open_shard("step-10", SHARD) as source:
        assert isinstance(source, FileSource)
