"""Brings every member of a new world to one state: from members that hold the newest step, or from the one
that reads it.

Sources of a transfer are the ranks with the newest step; stale rank number i gets its state from source i
modulo their number, point to point. A source only reads its state: if it dies during a transfer, the other
sources still hold theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.distributed.world import World

_CHUNK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class StateTransfer:
    """``source`` gives its state to ``stale_rank``."""

    source: int
    stale_rank: int


def plan_transfers(steps: Sequence[int]) -> tuple[StateTransfer, ...]:
    """Plan what brings all ranks to the newest step. ``steps``: finished ones of each rank (-1: no state).

    Empty when nobody holds any.
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
    """Take part in one transfer, as source or as stale rank.

    Raises PeerLostError; a stale rank then holds half a state.
    """
    is_source = world.rank == transfer.source
    # Both sides cut the state into the same pieces: their order follows from the names alone.
    for piece in _pieces(state):
        if is_source:
            flat = _flatten(piece)
            world.send(flat, to=transfer.stale_rank)
            # A source moves its state, too: it may have nothing else to show for minutes.
            MOVED.note(flat.numel() * flat.element_size())
        else:
            _receive(piece, world, source=transfer.source)


def pass_along(
    state: Mapping[str, torch.Tensor],
    world: World,
    *,
    fill: Callable[[Mapping[str, torch.Tensor]], bool],
) -> bool:
    """Fill ``state`` on rank 0 piece by piece, and give each piece from rank to rank; whether all of it has
    arrived.

    All ranks call this. ``fill`` is called on rank 0 only, with a part of ``state``; where it returns False,
    all ranks return False and hold a part of the state. A chain, because each rank then sends the state once,
    whatever their number is, and all links work at the same time on pieces that follow each other. Nobody
    waits longer for its neighbour than reading one piece takes, so that the timeout of a wait says nothing
    about the size of a state. Raises PeerLostError.
    """
    for piece in _pieces(state):
        is_filled = fill(piece) if world.is_main else True
        # Point to point, ahead of each piece: whether there is one. A volume that fails is known down the
        # chain, in order.
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
    # Collective: a rank may have gone with a piece still on its way.
    world.confirm()
    return True


def _pieces(state: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in the order of their names, which is the same everywhere, in pieces of one type and about
    equal size."""
    piece: dict[str, torch.Tensor] = {}
    dtype, size = None, 0
    for name in sorted(state):
        tensor = state[name]
        item = tensor.numel() * tensor.element_size()
        # One buffer holds one type; its size bounds the memory besides the state.
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
    """Fill the tensors of ``piece`` with what ``source`` sends."""
    sizes = [tensor.numel() for tensor in piece.values()]
    first = next(iter(piece.values()))
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    world.receive(flat, source=source)
    MOVED.note(flat.numel() * flat.element_size())
    for tensor, part in zip(piece.values(), flat.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
