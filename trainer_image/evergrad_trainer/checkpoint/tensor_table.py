"""``tensors.json``: the parts of all tensors, and the bytes of the files that hold them.

It is DCP's metadata as JSON, never as a pickle.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from evergrad_trainer.checkpoint.layout import TENSORS
from evergrad_trainer.checkpoint.manifest import InvalidCheckpointError


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: raw little-endian values in row-major order at ``offset`` (bytes) of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor; its chunks cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


Table = dict[str, StoredTensor]


def build_table(metadata: Metadata, stored: Iterable[tuple[str, StoredChunk]]) -> Table:
    """The table of what all ranks wrote: dtypes and shapes from DCP's global plan, places from the ranks'
    results."""
    # In the order of the ranks, so that equal states give equal tables.
    chunks: dict[str, list[StoredChunk]] = {key: [] for key in metadata.state_dict_metadata}
    for key, chunk in stored:
        chunks[key].append(chunk)
    table: Table = {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{key}: only tensors are stored")
        table[key] = StoredTensor(
            tensor.properties.dtype, tuple(tensor.size), tuple(chunks[key])
        )
    return table


def build_metadata(table: Table) -> Metadata:
    """DCP's view of a table, for its resharding."""
    # No offsets in files: DCP plans with boxes, and the reader finds the bytes of each box itself.
    tensors: dict[str, STORAGE_TYPES] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ],
        )
        for key, tensor in table.items()
    }
    return Metadata(tensors)


def encode_table(table: Table) -> bytes:
    """The bytes of ``tensors.json``."""
    tensors = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "chunks": [vars(chunk) for chunk in tensor.chunks],
        }
        for key, tensor in table.items()
    }
    return json.dumps(tensors, separators=(",", ":")).encode() + b"\n"


def decode_table(data: bytes) -> Table:
    """Read ``tensors.json``.

    Raises InvalidCheckpointError if it is not one or does not cover every tensor.
    """
    try:
        table: Table = {}
        for key, raw in json.loads(data).items():
            # Looked up by name in torch, where ``load`` and the like are found as well.
            dtype = getattr(torch, raw["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{raw['dtype']!r} is not a dtype")
            chunks = tuple(
                StoredChunk(
                    offsets=tuple(int(offset) for offset in chunk["offsets"]),
                    sizes=tuple(int(size) for size in chunk["sizes"]),
                    file=str(chunk["file"]),
                    offset=int(chunk["offset"]),
                    bytes=int(chunk["bytes"]),
                )
                for chunk in raw["chunks"]
            )
            shape = tuple(int(size) for size in raw["shape"])
            table[key] = StoredTensor(dtype, shape, chunks)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpointError(
            f"file {TENSORS}: is not a table of tensors ({error!r})"
        ) from error
    # A hole would leave memory as it was: random weights that nobody notices.
    for key, tensor in table.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(
            tensor.shape
        ):
            raise InvalidCheckpointError(
                f"file {TENSORS}: the chunks of {key} do not add up to its shape"
            )
    return table
