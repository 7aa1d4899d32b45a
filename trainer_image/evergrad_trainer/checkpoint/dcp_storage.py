"""Connects torch.distributed.checkpoint (DCP) to Evergrad's store: one file of raw tensor bytes per rank, and
metadata as JSON instead of pickle."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from evergrad_trainer.checkpoint import layout
from evergrad_trainer.checkpoint.attempts import FilesystemAttempts
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import FileEntry, InvalidCheckpointError
from evergrad_trainer.checkpoint.reader import CheckpointReader, ShardSource
from evergrad_trainer.checkpoint.staging import HostStager, StagedState, view_bytes
from evergrad_trainer.checkpoint.tensor_table import (
    StoredChunk,
    Table,
    build_metadata,
    build_table,
)

SLAB_BYTES = 32 * 2**20
"""Maximum extra memory, in bytes, for a read into a strided tensor or a tensor on a device. If a single row
of the tensor is larger, the extra memory is one row."""

Publish = Callable[[str, Table, tuple[FileEntry, ...]], dict[str, Any]]
"""A function that publishes an attempt whose shards are durable. Every rank receives the JSON values that it
returns."""


class SnapshotPlanner(DefaultSavePlanner):
    """Plans the save of a snapshot.

    If staging has failed on this rank, ``failure`` is raised in a step in which DCP reports it to all ranks.
    """

    def __init__(self, snapshot: StagedState, *, failure: Exception | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._snapshot = snapshot
        self._failure = failure

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Raise the failure of staging, if any. ``state_dict`` is ignored; the snapshot has all tensors."""
        if self._failure is not None:
            raise self._failure
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one item for each staged tensor."""
        items = []
        for key, tensor in self._snapshot.tensors.items():
            chunk = ChunkStorageMetadata(torch.Size(tensor.offsets), tensor.data.size())
            properties = TensorProperties(dtype=tensor.data.dtype)
            item = WriteItem(
                index=MetadataIndex(key, tensor.offsets),
                type=WriteItemType.SHARD if tensor.is_shard else WriteItemType.TENSOR,
                tensor_data=TensorWriteData(
                    chunk, properties=properties, size=tensor.shape
                ),
            )
            items.append(item)
        return SavePlan(items, planner_data=self._snapshot.signature)

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """Return DCP's global plan. Raises ValueError if ranks hold different states."""
        # Only this method has the plans of all ranks. If the states differed in keys or shapes, no rank could
        # load the checkpoint.
        signatures = [plan.planner_data for plan in all_plans]
        strangers = [
            str(rank)
            for rank, signature in enumerate(signatures)
            if signature != signatures[0]
        ]
        if strangers:
            raise ValueError(f"ranks {', '.join(strangers)} have other tensors than rank 0")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the staged part itself, not a copy."""
        return self._snapshot.tensors[write_item.index.fqn].data


def plan_snapshot(
    stager: HostStager, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int
) -> SnapshotPlanner:
    """Copy the tensors that this rank will write, and return a plan.

    If there is not enough memory, this does not raise an error. The plan raises the error later.
    """
    try:
        return SnapshotPlanner(stager.stage(state, rank=rank, world_size=world_size))
    except (MemoryError, RuntimeError) as error:
        # The other ranks may already wait in DCP's collectives. The error is raised there, so that all ranks
        # receive it.
        return SnapshotPlanner(StagedState({}, ""), failure=error)


class StoreWriter(StorageWriter):
    """Writes this rank's part to one file of an attempt. Rank 0 creates the attempt and publishes it."""

    def __init__(
        self, attempts: FilesystemAttempts, *, version: Version, rank: int, publish: Publish
    ) -> None:
        self._attempts = attempts
        self._version = version
        self._rank = rank
        self._publish = publish
        self.attempt: str | None = None
        """On rank 0, the name of the attempt after it was created."""
        self.outcome: dict[str, Any] | None = None
        """On rank 0, the result of ``publish``. It is set even if the broadcast to the other ranks fails."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a writer is used only once."""

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because ``prepare_global_plan`` creates the attempt."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the attempt on rank 0, and add its name to the plans of all ranks."""
        # DCP sends the plans after this call and before the ranks write, so the directory exists by then.
        self.attempt = self._attempts.begin(self._version)
        return [dataclasses.replace(plan, storage_data=self.attempt) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors in order and make the file durable. Without tensors, create no file."""
        future: Future[list[WriteResult]] = Future()
        if not plan.items:
            future.set_result([])
            return future
        shard = self._attempts.create_shard(plan.storage_data, self._rank)
        try:
            places = []
            for item in plan.items:
                tensor, data = planner.resolve_data(item), item.tensor_data
                if (
                    not isinstance(tensor, torch.Tensor)
                    or data is None
                    or data.chunk is None
                ):
                    raise TypeError(f"{item.index.fqn}: only tensors are stored")
                offset = shard.append(view_bytes(tensor))
                name = layout.shard_name(self._rank)
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                places.append(StoredChunk(*box, name, offset, tensor.nbytes))
            # The file must be durable before the result is sent, because rank 0 publishes when it has the
            # results of all ranks.
            entry = shard.finish()
        finally:
            shard.abandon()
        results = [
            WriteResult(
                index=item.index, size_in_bytes=place.bytes, storage_data=(place, entry)
            )
            for item, place in zip(plan.items, places, strict=True)
        ]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the attempt. DCP calls this on rank 0 when every shard is durable."""
        written = [result for of_rank in results for result in of_rank]
        table = build_table(
            metadata, ((result.index.fqn, result.storage_data[0]) for result in written)
        )
        # One entry per file, however many tensors the file contains.
        entries = {
            result.storage_data[1].name: result.storage_data[1] for result in written
        }
        self.outcome = self._publish(
            str(self.attempt), table, tuple(entries[name] for name in sorted(entries))
        )
        # DCP broadcasts the metadata after this method returns. The outcome is sent with them, because a
        # failed rank would not take part in a separate collective.
        metadata.storage_data = self.outcome

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, because DCP never selects this class by a path."""
        return False


class StoreReader(StorageReader):
    """Reads one published checkpoint into existing tensors.

    Only the boxes that the tensors need are read, from the files that contain them.
    """

    def __init__(self, reader: CheckpointReader, name: str, table: Table) -> None:
        self._reader = reader
        self._name = name
        self._table = table
        self._places = {
            (key, chunk.offsets): chunk
            for key, tensor in table.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a reader is used only once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table as DCP metadata."""
        return build_metadata(self._table)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planned boxes. Raises InvalidCheckpointError if a file is damaged, or OSError."""
        with ExitStack() as stack:
            shards: dict[str, ShardSource] = {}
            for item in plan.items:
                index = item.storage_index
                if index.offset is None:
                    raise InvalidCheckpointError(f"{index.fqn} is not a tensor")
                place = self._places[index.fqn, tuple(index.offset)]
                # Open a file for the first tensor that needs it. A rank of a sharded model needs few files.
                if place.file not in shards:
                    shards[place.file] = stack.enter_context(
                        self._reader.open_shard(self._name, place.file)
                    )
                target = planner.resolve_tensor(item).detach()
                dtype = self._table[index.fqn].dtype
                _read_box(
                    shards[place.file],
                    place,
                    dtype=dtype,
                    starts=tuple(item.storage_offsets),
                    target=target,
                )
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, because DCP never selects this class by a path."""
        return False


def _read_box(
    shard: ShardSource,
    place: StoredChunk,
    *,
    dtype: torch.dtype,
    starts: tuple[int, ...],
    target: torch.Tensor,
) -> None:
    """Fill ``target`` from the stored chunk ``place``: the box of its shape that begins at ``starts``."""
    if target.numel() == 0:
        return
    starts, sizes = starts or (0,), place.sizes or (1,)
    if target.dim() == 0:
        target = target.reshape(1)

    # Whole rows of the stored type are read directly into the tensor's own memory.
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    first = place.offset + starts[0] * row_bytes
    whole_rows = tuple(target.shape[1:]) == sizes[1:]
    if (
        whole_rows
        and target.is_contiguous()
        and target.dtype == dtype
        and target.device.type == "cpu"
    ):
        shard.read_into(view_bytes(target), first)
        return

    # In all other cases, rows are read into a slab, which is then narrowed, converted and copied to the
    # device. The slab bounds the extra memory, however large the tensor is.
    rows = max(1, min(SLAB_BYTES // row_bytes, target.shape[0]))
    slab = torch.empty((rows, *sizes[1:]), dtype=dtype)
    for row in range(0, target.shape[0], rows):
        part = target[row : row + rows]
        box = slab[: part.shape[0]]
        shard.read_into(view_bytes(box), first + row * row_bytes)
        for dim in range(1, box.dim()):
            box = box.narrow(dim, starts[dim], part.shape[dim])
        part.copy_(box)
