"""Transfers the newest state to every member of a new world: from members that hold it, or from rank 0, which
reads it from a checkpoint.

The sources of a transfer are the ranks with the newest step. The i-th stale rank receives its state from the
source ``i % num_sources``, point to point. A source only reads its own state, so if a source fails during a
transfer, the state of the other sources is still valid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.distributed.world import World

_CHUNK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class StateTransfer:
    """A transfer in which the rank ``source`` sends its state to the rank ``stale_rank``."""

    source: int
    stale_rank: int


def plan_transfers(steps: Sequence[int]) -> tuple[StateTransfer, ...]:
    """Return the transfers that bring all ranks to the newest step.

    ``steps`` are the finished steps of each rank, or -1 for a rank without a state. For example, the plan for
    ``[5, -1, 5, 4]`` sends the state from rank 0 to rank 1 and from rank 2 to rank 3. The plan is empty if no
    rank has a state.
    """
    newest = max(steps)
    if newest < 0:
        return ()
    sources = [rank for rank, step in enumerate(steps) if step == newest]
    stale_ranks = [rank for rank, step in enumerate(steps) if step != newest]
    return tuple(
        StateTransfer(sources[number % len(sources)], rank)
        for number, rank in enumerate(stale_ranks)
    )


def transfer_state(
    state: Mapping[str, torch.Tensor], transfer: StateTransfer, world: World
) -> None:
    """Take part in one transfer as its source or as its stale rank.

    Raises PeerLostError if the other rank is gone. The state of the stale rank is then incomplete.
    """
    is_source = world.rank == transfer.source
    # Both ranks split the state into the same pieces, because the order depends only on the names.
    for piece in _pieces(state):
        if is_source:
            flat = _flatten(piece)
            world.send(flat, to=transfer.stale_rank)
            # The source reports its progress too, because it may make no other progress for minutes.
            MOVED.note(flat.numel() * flat.element_size())
        else:
            _receive(piece, world, source=transfer.source)


def pass_along(
    state: Mapping[str, torch.Tensor],
    world: World,
    *,
    fill: Callable[[Mapping[str, torch.Tensor]], bool],
) -> bool:
    """Fill ``state`` on rank 0 piece by piece, and pass each piece from each rank to the next rank.

    Returns whether the whole state has arrived. All ranks call this. ``fill`` is called only on rank 0, with
    a part of ``state``. If ``fill`` returns False, all ranks return False, and their state is incomplete.
    Raises PeerLostError.

    The ranks form a chain. Each rank sends the state only once, whatever the number of ranks, and all links
    transfer consecutive pieces at the same time. A rank waits for its neighbour at most as long as one piece
    takes to read, so the timeout of a wait does not limit the size of a state.
    """
    for piece in _pieces(state):
        is_filled = fill(piece) if world.is_main else True
        # Point to point, before each piece: a flag whether the piece was read. The flag reports a failure of
        # the volume along the chain, in order.
        word = torch.tensor([int(is_filled)], device=world.device)
        if not world.is_main:
            world.receive(word, source=world.rank - 1)
        is_last = world.rank == world.size - 1
        if not is_last:
            world.send(word, to=world.rank + 1)
        if not int(word):
            return False
        if not world.is_main:
            _receive(piece, world, source=world.rank - 1)
        if not is_last:
            world.send(_flatten(piece), to=world.rank + 1)
    # Collective: a rank may have failed while a piece was still in transit.
    world.confirm()
    return True


def _pieces(state: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in pieces of one type and of similar size.

    The tensors are ordered by name, so that the order is the same on every rank.
    """
    piece: dict[str, torch.Tensor] = {}
    dtype, size = None, 0
    for name in sorted(state):
        tensor = state[name]
        item = tensor.numel() * tensor.element_size()
        # A buffer has one type. The size of a piece bounds the memory in addition to the state.
        if piece and (tensor.dtype != dtype or size + item > _CHUNK_BYTES):
            yield piece
            piece, size = {}, 0
        piece[name], dtype = tensor, tensor.dtype
        size += item
    if piece:
        yield piece


def _flatten(piece: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in piece.values()])


def _receive(
    piece: Mapping[str, torch.Tensor],
    world: World,
    *,
    source: int,
) -> None:
    """Fill the tensors of ``piece`` with the data that the rank ``source`` sends."""
    sizes = [tensor.numel() for tensor in piece.values()]
    first = next(iter(piece.values()))
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    world.receive(flat, source=source)
    MOVED.note(flat.numel() * flat.element_size())
    for tensor, part in zip(piece.values(), flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
