"""torch.distributed.checkpoint on our own store: raw tensor bytes, one file a rank, metadata as JSON, never a
pickle."""

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
"""Most extra memory, in bytes, that reading into a strided or remote tensor takes (or one row of it, if that
is more)."""

Publish = Callable[[str, Table, tuple[FileEntry, ...]], dict[str, Any]]
"""A function that makes a checkpoint of an attempt whose shards are durable; its JSON values reach every
rank."""


class SnapshotPlanner(DefaultSavePlanner):
    """A plan of what a snapshot holds.

    A ``failure`` of staging here is raised where DCP makes it known to all ranks.
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
        """Ignore ``state_dict``: everything is in the snapshot."""
        if self._failure is not None:
            raise self._failure
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item a staged tensor."""
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
        """DCP's plan, unless ranks hold different states: then ValueError."""
        # The one place where all ranks' plans are side by side: states that differ in keys or shapes would
        # make a checkpoint that no rank can load.
        signatures = [plan.planner_data for plan in all_plans]
        strangers = [
            str(rank)
            for rank, signature in enumerate(signatures)
            if signature != signatures[0]
        ]
        if strangers:
            raise ValueError(f"ranks {', '.join(strangers)} hold other tensors than rank 0")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The staged part itself, not a copy."""
        return self._snapshot.tensors[write_item.index.fqn].data


def plan_snapshot(
    stager: HostStager, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int
) -> SnapshotPlanner:
    """Copy what this rank will write, and plan it. Never raises for want of memory: the plan carries that."""
    try:
        return SnapshotPlanner(stager.stage(state, rank=rank, world_size=world_size))
    except (MemoryError, RuntimeError) as error:
        # The others are already on their way into the exchange; it fails there, on all ranks alike.
        return SnapshotPlanner(StagedState({}, ""), failure=error)


class StoreWriter(StorageWriter):
    """Writes this rank's part into one file of an attempt; rank 0 opens the attempt and has it published."""

    def __init__(
        self, attempts: FilesystemAttempts, *, version: Version, rank: int, publish: Publish
    ) -> None:
        self._attempts = attempts
        self._version = version
        self._rank = rank
        self._publish = publish
        self.attempt: str | None = None
        """Rank 0: the attempt once it has been opened."""
        self.outcome: dict[str, Any] | None = None
        """Rank 0: what ``publish`` returned, known even if telling the other ranks of it fails."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a writer is used once."""

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: the attempt is opened with the global plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the attempt on rank 0 and let the plans carry its name to all ranks."""
        # The plans are the last thing that is sent before the ranks write: the directory is there by then.
        self.attempt = self._attempts.begin(self._version)
        return [dataclasses.replace(plan, storage_data=self.attempt) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors one after the other and make the file durable; no file for no tensors."""
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
            # Durable before the result is sent: rank 0 publishes as soon as it has all of them.
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
        """Publish. Called on rank 0 once every shard is durable."""
        written = [result for of_rank in results for result in of_rank]
        table = build_table(
            metadata, ((result.index.fqn, result.storage_data[0]) for result in written)
        )
        # One entry a file, however many tensors came from it.
        entries = {
            result.storage_data[1].name: result.storage_data[1] for result in written
        }
        self.outcome = self._publish(
            str(self.attempt), table, tuple(entries[name] for name in sorted(entries))
        )
        # DCP broadcasts the metadata when this returns: the way by which the outcome reaches every rank
        # without a collective of our own, in which a rank that failed would be missing.
        metadata.storage_data = self.outcome

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by path."""
        return False


class StoreReader(StorageReader):
    """Reads one published checkpoint into tensors that exist: whatever boxes they need, from whichever files
    hold them."""

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
        """Nothing to reset: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's view of the table."""
        return build_metadata(self._table)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planned boxes. Raises InvalidCheckpointError or OSError."""
        with ExitStack() as stack:
            shards: dict[str, ShardSource] = {}
            for item in plan.items:
                index = item.storage_index
                if index.offset is None:
                    raise InvalidCheckpointError(f"{index.fqn} is not a tensor")
                place = self._places[index.fqn, tuple(index.offset)]
                # Files are opened when the first tensor wants them: a rank of a sharded model needs a few.
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
        """Never chosen by path."""
        return False


def _read_box(
    shard: ShardSource,
    place: StoredChunk,
    *,
    dtype: torch.dtype,
    starts: tuple[int, ...],
    target: torch.Tensor,
) -> None:
    """Fill ``target`` with the box of its shape that begins at ``starts`` within the stored chunk
    ``place``."""
    if target.numel() == 0:
        return
    starts, sizes = starts or (0,), place.sizes or (1,)
    if target.dim() == 0:
        target = target.reshape(1)

    # Whole rows of the stored type go straight into the tensor's own memory.
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

    # All else goes through a slab of rows, which also narrows, converts and moves to the device: the extra
    # memory is bounded, however large the tensor is.
    rows = max(1, min(SLAB_BYTES // row_bytes, target.shape[0]))
    slab = torch.empty((rows, *sizes[1:]), dtype=dtype)
    for row in range(0, target.shape[0], rows):
        part = target[row : row + rows]
        box = slab[: part.shape[0]]
        shard.read_into(view_bytes(box), first + row * row_bytes)
        for dim in range(1, box.dim()):
            box = box.narrow(dim, starts[dim], part.shape[dim])
        part.copy_(box)
