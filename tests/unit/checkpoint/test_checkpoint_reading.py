"""Boxes of stored tensors: any part of any chunking is read into any target, with copies only if necessary."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from evergrad_trainer.checkpoint import dcp_storage
from evergrad_trainer.checkpoint.dcp_storage import _read_box
from evergrad_trainer.checkpoint.manifest import InvalidCheckpointError
from evergrad_trainer.checkpoint.reader import FileSource
from evergrad_trainer.checkpoint.restore import open_table, read_state
from evergrad_trainer.checkpoint.staging import view_bytes
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.checkpoint.tensor_table import (
    StoredChunk,
    StoredTensor,
    build_metadata,
    decode_table,
    encode_table,
)


class MemoryShard:
    """A shard whose bytes are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and the start and lengths of a box inside it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(
        draw(st.integers(0, size - start))
        for size, start in zip(shape, starts, strict=True)
    )
    return shape, starts, lengths


@settings(deadline=None)
@given(
    boxes(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(8, 64),
)
def test_any_box_of_a_stored_chunk_is_read_into_dense_and_strided_targets(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    strided: bool,
    dtype: torch.dtype,
    slab: int,
) -> None:
    shape, starts, lengths = box
    stored = torch.from_numpy(np.arange(int(np.prod(shape))).reshape(shape)).to(dtype)
    data = b"\xff" * 64 + bytes(view_bytes(stored))
    target = torch.zeros([2 * size for size in lengths], dtype=dtype)[
        tuple(slice(None, None, 2) for _ in lengths)
    ]
    if not strided:
        target = torch.zeros(lengths, dtype=dtype)
    place = StoredChunk((0,) * len(shape), shape, "file", 64, stored.nbytes)
    before, dcp_storage.SLAB_BYTES = dcp_storage.SLAB_BYTES, slab
    try:
        _read_box(MemoryShard(data), place, dtype=dtype, starts=starts, target=target)
    finally:
        dcp_storage.SLAB_BYTES = before
    expected = stored[
        tuple(
            slice(start, start + size) for start, size in zip(starts, lengths, strict=True)
        )
    ]
    assert torch.equal(target, expected)


def test_floats_of_another_width_are_converted_while_reading() -> None:
    stored = torch.randn(5, 3)
    target = torch.zeros(5, 3, dtype=torch.bfloat16)
    place = StoredChunk((0, 0), (5, 3), "file", 0, stored.nbytes)
    _read_box(
        MemoryShard(bytes(view_bytes(stored))),
        place,
        dtype=torch.float32,
        starts=(0, 0),
        target=target,
    )
    assert torch.equal(target, stored.bfloat16())


def test_a_file_that_ends_too_early_is_damage_and_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.bin"
    path.write_bytes(b"12345")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(
            InvalidCheckpointError, match=r"file rank-00000\.bin: ends at byte 5"
        ):
            FileSource(descriptor, path.name).read_into(memoryview(bytearray(4)), 3)
    finally:
        os.close(descriptor)


def test_the_table_is_parsed_as_it_was_written() -> None:
    table = {
        "model.a": StoredTensor(
            torch.bfloat16,
            (4, 2),
            (
                StoredChunk((0, 0), (3, 2), "rank-00000.bin", 64, 12),
                StoredChunk((3, 0), (1, 2), "rank-00001.bin", 0, 4),
            ),
        ),
        "step": StoredTensor(
            torch.float32, (), (StoredChunk((), (), "rank-00000.bin", 0, 4),)
        ),
    }
    assert decode_table(encode_table(table)) == table
    assert set(build_metadata(table).state_dict_metadata) == set(table)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[1]",
        b'{"a": 1}',
        b'{"a": {"dtype": "no_such_type", "shape": [], "chunks": []}}',
        b'{"a": {"dtype": "load", "shape": [], "chunks": []}}',
        json.dumps({"a": {"dtype": "float32", "shape": [2], "chunks": []}}).encode(),
    ],
)
def test_a_missing_table_or_a_table_with_holes_is_damage(document: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"file tensors\.json"):
        decode_table(document)


@pytest.fixture
def third_of_four() -> Iterator[DeviceMesh]:
    """The mesh of rank 2 of 4, whose collectives do nothing."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_a_rank_of_a_sharded_model_reads_only_its_own_part(
    make_solo: Callable[..., Any],
    tmp_path: Path,
    third_of_four: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count the read bytes; the checkpoint was written by a world of one."""
    whole = {
        "model.a": torch.randn(64, 32),
        "model.b": torch.randn(40),
        "step": torch.ones(()),
    }
    solo = make_solo()
    solo.manager.save(10, whole, extra={}, wait=True)
    counted: list[int] = []
    read_into = FileSource.read_into

    def count(self: FileSource, buffer: memoryview, offset: int) -> None:
        counted.append(len(buffer))
        read_into(self, buffer, offset)

    monkeypatch.setattr(FileSource, "read_into", count)

    def shard(tensor: torch.Tensor) -> DTensor:
        local = torch.zeros(tensor.shape[0] // 4, *tensor.shape[1:])
        return DTensor.from_local(
            local, third_of_four, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )

    state = {"model.a": shard(whole["model.a"]), "model.b": shard(whole["model.b"])}
    wanted: dict[str, torch.Tensor] = {**state, "step": torch.zeros(())}
    reader = open_store(solo.directory).reader
    table = open_table(reader, "step-10", reader.read_manifest("step-10"))
    read_state(reader, "step-10", table, wanted)
    assert torch.equal(state["model.a"].to_local(), whole["model.a"][32:48])
    assert torch.equal(state["model.b"].to_local(), whole["model.b"][20:30])
    # A quarter of each matrix, and all replicated tensors.
    assert sum(counted) == (whole["model.a"].nbytes + whole["model.b"].nbytes) // 4 + 4
