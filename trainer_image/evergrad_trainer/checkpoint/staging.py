"""A copy of the state by value, in host memory that is used again for the next save.

It is all that training waits for.
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
    """This rank's part of one tensor: ``data`` (contiguous, on the host) is the box at ``offsets`` of a
    tensor of ``shape``."""

    data: torch.Tensor
    offsets: tuple[int, ...]
    shape: torch.Size
    is_shard: bool


@dataclass(frozen=True)
class StagedState:
    """The tensors that this rank writes.

    ``signature`` names keys, dtypes and shapes of the whole state and is the same on every rank.
    """

    tensors: dict[str, StagedTensor]
    signature: str


def require_tensors(state: Mapping[str, object]) -> None:
    """Raise TypeError, naming the keys, if the state holds anything but dense tensors with memory behind
    them."""
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
    """The rank that writes each replicated tensor: largest first to the rank with the fewest bytes.

    The answer is the same on every rank.
    """
    # A heap of (bytes so far, rank), which also breaks ties: no rank's answer may differ.
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        load, rank = heapq.heappop(loads)
        owners[key] = rank
        heapq.heappush(loads, (load + sizes[key], rank))
    return owners


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor of any dtype, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # Strides of dimensions of length one may be anything, and a view as bytes wants them proper.
    return (
        tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
    )


class HostStager:
    """Copies what one rank will write into one host buffer, kept between saves (pinned where the source is an
    accelerator)."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def stage(
        self, state: Mapping[str, torch.Tensor], *, rank: int, world_size: int
    ) -> StagedState:
        """Snapshot ``state`` by value. The previous snapshot's memory is overwritten: its save must have
        ended.

        Replicated tensors are copied only by the rank that writes them. Raises MemoryError or RuntimeError if
        there is no memory for the copy.
        """
        # Who writes what follows from names and sizes alone: no exchange before the copy.
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
                # A rank outside the tensor's mesh holds no part of it.
                if value.device_mesh.get_coordinate() is not None:
                    sources[key], locals_[key] = value, value.to_local()
            elif owners[key] == rank:
                sources[key] = locals_[key] = value

        data = self._copy(locals_)
        tensors = {}
        for key, source in sources.items():
            # The box of the whole tensor; a DTensor's rank has one chunk of it.
            offsets, is_shard = (0,) * source.dim(), isinstance(source, DTensor)
            if is_shard:
                sharded: Any = source  # DCP's protocol for sharded tensors carries no types
                (chunk,) = sharded.__create_chunk_list__()
                offsets = tuple(chunk.offsets)
            tensors[key] = StagedTensor(data[key], offsets, source.shape, is_shard=is_shard)
        described = sorted(
            f"{key} {value.dtype} {tuple(value.shape)}" for key, value in state.items()
        )
        return StagedState(tensors, hash_bytes("\n".join(described).encode()))

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _copy(self, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Aligned as in the file, so that one layout of the buffer serves all dtypes.
        starts, total = {}, 0
        for key, source in sources.items():
            starts[key] = total
            total += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {source.device for source in sources.values() if source.is_cuda}

        # A smaller need (a larger world) gives the memory back only when more than half of it would lie idle.
        # Pinned memory costs seconds to get, and only copies from an accelerator gain by it.
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
                # One thread fills the memory bus; torch would gather its threads for every tensor and wait
                # for them on a busy machine.
                view_bytes(place)[:] = view_bytes(source)
            copies[key] = place
        # Copies from an accelerator are only begun by now; training may overwrite their sources next.
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies
