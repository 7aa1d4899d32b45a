"""A rank's file: it contains what was appended, at aligned offsets, with the hash of the whole."""

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad_trainer.checkpoint import shard_file
from evergrad_trainer.checkpoint.faults import NoFaults
from evergrad_trainer.checkpoint.files import hash_file
from evergrad_trainer.checkpoint.shard_file import ShardFile


def open_shard(path: Path) -> ShardFile:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    return ShardFile(descriptor, path, rank=0, faults=NoFaults(), block_bytes=mmap.PAGESIZE)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3 * mmap.PAGESIZE), max_size=8), st.integers(0, 255))
def test_all_appended_data_is_found_at_its_aligned_offset(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], first: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "rank-00000.bin"
    parts = [
        bytes((first + index + position) % 251 for position in range(length))
        for index, length in enumerate(lengths)
    ]
    shard = open_shard(path)
    offsets = [shard.append(memoryview(part)) for part in parts]
    entry = shard.finish()
    shard.abandon()
    content = path.read_bytes()
    assert [
        content[offset : offset + len(part)]
        for offset, part in zip(offsets, parts, strict=True)
    ] == parts
    assert (
        all(offset % 64 == 0 for offset in offsets)
        and len(content) < sum(lengths) + 64 * len(lengths) + 1
    )
    assert (entry.name, entry.bytes, entry.hash) == (
        path.name,
        len(content),
        hash_file(path),
    )


def test_a_file_system_without_direct_writes_gets_ordinary_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def refuse_once(descriptor: int, data: memoryview) -> None:
        if not refused:
            refused.append(len(data))
            raise OSError(22, os.strerror(22))
        while data:
            data = data[os.write(descriptor, data) :]

    monkeypatch.setattr(shard_file, "write_all", refuse_once)
    shard = open_shard(tmp_path / "rank-00000.bin")
    shard._is_direct = True
    shard.append(memoryview(b"x" * 10_000))
    entry = shard.finish()
    shard.abandon()
    assert refused == [mmap.PAGESIZE]
    assert entry.bytes == 10_000 and entry.hash == hash_file(tmp_path / "rank-00000.bin")


def test_an_abandoned_file_is_closed_and_leaks_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for index in range(5):
        shard = open_shard(tmp_path / f"rank-{index:05d}.bin")
        shard.append(memoryview(b"x" * 5000))
        shard.abandon()
    assert len(os.listdir("/proc/self/fd")) == before
