"""``tensors.json``: the chunks of all tensors and their location in the files of a checkpoint.

The table corresponds to DCP's metadata, but is stored as JSON and not as a pickle.
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
    """A box of a tensor, stored at byte ``offset`` of ``file``.

    The data are raw little-endian values in row-major order. ``offsets`` and ``sizes`` are the first index
    and the size of the box in each dimension of the tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor. Its chunks cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


Table = dict[str, StoredTensor]


def build_table(metadata: Metadata, stored: Iterable[tuple[str, StoredChunk]]) -> Table:
    """Build the table of the tensors that all ranks have written.

    ``metadata`` is DCP's global plan with dtypes and shapes. ``stored`` contains pairs of tensor name and
    chunk from the ranks' results. Raises TypeError if ``metadata`` contains anything but tensors.
    """
    # The chunks are in the order of the ranks, so that equal states produce equal tables.
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
    """Convert a table to DCP metadata, which DCP needs for resharding."""
    # The metadata have no file offsets: DCP plans with boxes, and StoreReader locates the bytes of each box.
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
    """Encode a table as ``tensors.json``."""
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
    """Decode ``tensors.json``.

    Raises InvalidCheckpointError if ``data`` is not a valid table or if the chunks do not cover every tensor.
    """
    try:
        table: Table = {}
        for key, raw in json.loads(data).items():
            # The name is looked up in torch, which also contains functions such as ``load``. The next check
            # rejects anything that is not a dtype.
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
    # If a chunk were missing, a part of the tensor would silently keep uninitialised values.
    for key, tensor in table.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(
            tensor.shape
        ):
            raise InvalidCheckpointError(
                f"file {TENSORS}: the chunks of {key} do not add up to its shape"
            )
    return table
