"""Copies the state to host memory, which is reused for the next save.

Training waits only for this copy. The rest of a save runs in the background.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from evergrad_trainer.checkpoint.files import hash_bytes
from evergrad_trainer.checkpoint.layout import ALIGNMENT


@dataclass(frozen=True)
class StagedTensor:
    """This rank's part of one tensor.

    ``data`` (contiguous, on the host) is the box at ``offsets`` of a tensor of the full ``shape``.
    """

    data: torch.Tensor
    offsets: tuple[int, ...]
    shape: torch.Size
    is_shard: bool


@dataclass(frozen=True)
class StagedState:
    """The tensors that this rank writes.

    ``signature`` is a hash of the keys, dtypes and shapes of the whole state. It is equal on every rank.
    """

    tensors: dict[str, StagedTensor]
    signature: str


def require_tensors(state: Mapping[str, object]) -> None:
    """Raise TypeError if ``state`` contains anything but dense tensors with allocated memory.

    The message names the keys.
    """
    wrong = [
        f"{key} ({type(value).__name__})"
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.is_meta
    ]
    if wrong:
        raise TypeError(f"a checkpoint holds dense tensors only, not {', '.join(wrong)}")


def assign_owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the rank that writes each replicated tensor. ``sizes`` are the tensors' bytes by name.

    The tensors are assigned from the largest to the smallest, each to the rank with the fewest bytes so far.
    The result is equal on every rank. For example, ``assign_owners({"a": 8, "b": 4, "c": 2}, 2)`` returns
    ``{"a": 0, "b": 1, "c": 1}``.
    """
    # A heap of (bytes so far, rank). The rank breaks ties, so that the result is equal on every rank.
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        load, rank = heapq.heappop(loads)
        owners[key] = rank
        heapq.heappush(loads, (load + sizes[key], rank))
    return owners


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor of any dtype, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Dimensions of length one may have any stride, but a view as bytes requires regular strides.
    return (
        tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    )


class HostStager:
    """Copies the tensors that one rank will write into one host buffer, which is kept between saves.

    The buffer is pinned if the source is an accelerator.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def stage(
        self, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int
    ) -> StagedState:
        """Copy the parts of ``state`` that this rank writes, and return the snapshot.

        The memory of the previous snapshot is overwritten, so its save must have ended. A replicated tensor
        is copied only by the rank that writes it. Raises MemoryError or RuntimeError if there is not enough
        memory for the copy.
        """
        # The assignment depends only on names and sizes, so ranks need no communication before the copy.
        replicated = {
            key: value.nbytes
            for key, value in state.items()
            if not isinstance(value, DTensor)
        }
        owners = assign_owners(replicated, world_size)
        sources: dict[str, torch.Tensor] = {}
        locals_: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if isinstance(value, DTensor):
                # A rank outside the tensor's device mesh holds no shard of it.
                if value.device_mesh.get_coordinate() is not None:
                    sources[key], locals_[key] = value, value.to_local()
            elif owners[key] == rank:
                sources[key] = locals_[key] = value

        data = self._copy(locals_)
        tensors = {}
        for key, source in sources.items():
            # The box within the whole tensor. For a DTensor, this rank has exactly one chunk.
            offsets, is_shard = (0,) * source.dim(), isinstance(source, DTensor)
            if is_shard:
                sharded: Any = source  # DCP's protocol for sharded tensors is not typed
                (chunk,) = sharded.__create_chunk_list__()
                offsets = tuple(chunk.offsets)
            tensors[key] = StagedTensor(data[key], offsets, source.shape, is_shard=is_shard)
        described = sorted(
            f"{key} {value.dtype} {tuple(value.shape)}" for key, value in state.items()
        )
        return StagedState(tensors, hash_bytes("\n".join(described).encode()))

    def release(self) -> None:
        """Release the memory."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _copy(self, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Align tensors as in the file, so that the buffer suits all dtypes.
        starts, total = {}, 0
        for key, source in sources.items():
            starts[key] = total
            total += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {source.device for source in sources.values() if source.is_cuda}

        # If less memory is needed (in a larger world), the buffer is replaced only if more than half of it
        # would be unused. Only copies from an accelerator benefit from pinned memory, which takes seconds to
        # allocate.
        fits = total <= self._buffer.numel() <= 2 * total
        if not fits or self._buffer.is_pinned() != (bool(devices) and total > 0):
            self.release()
            self._buffer = torch.zeros(total, dtype=torch.uint8, pin_memory=bool(devices))

        copies = {}
        for key, source in sources.items():
            place = (
                self._buffer[starts[key] : starts[key] + source.nbytes]
                .view(source.dtype)
                .view(source.shape)
            )
            if (
                source.device.type != "cpu"
                or not source.is_contiguous()
                or source.numel() == 0
            ):
                place.copy_(source, non_blocking=source.is_cuda)
            else:
                # One thread saturates the memory bus. For each tensor, torch would start its thread pool and,
                # on a busy machine, wait for it.
                view_bytes(place)[:] = view_bytes(source)
            copies[key] = place
        # Copies from an accelerator are asynchronous. Wait for them before training overwrites the sources.
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies
