"""Brings every member of a new world to the newest finished step, from the members that hold it.

Sources are the ranks with the newest step; straggler number i is fed by source i modulo their number, point to point. A source
only reads its state: if it dies while feeding, the other sources still hold theirs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evergrad_trainer.world import World

_CHUNK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Feeding:
    """``source`` gives its state to ``straggler``."""

    source: int
    straggler: int


def plan_feeding(steps: Sequence[int]) -> tuple[Feeding, ...]:
    """Who feeds whom, from every rank's finished step (-1: holds no state). Empty when nobody holds any."""
    newest = max(steps)
    if newest < 0:
        return ()
    sources = [rank for rank, step in enumerate(steps) if step == newest]
    stragglers = [rank for rank, step in enumerate(steps) if step != newest]
    return tuple(Feeding(sources[number % len(sources)], rank) for number, rank in enumerate(stragglers))


def feed(state: Mapping[str, torch.Tensor], feeding: Feeding, world: World) -> None:
    """Take part in one feeding, as source or as straggler. Raises PeerLostError; a straggler then holds half a state."""
    is_source = world.rank == feeding.source
    for chunk in _chunks(state):
        flat = torch.cat([tensor.flatten() for tensor in chunk]) if is_source else _buffer(chunk)
        if is_source:
            world.send(flat, to=feeding.straggler)
        else:
            world.receive(flat, source=feeding.source)
            for tensor, part in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _chunks(state: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in the order of their names, which is the same everywhere, in pieces of one type and about equal size."""
    chunk: list[torch.Tensor] = []
    size = 0
    for name in sorted(state):
        tensor = state[name]
        item = tensor.numel() * tensor.element_size()
        if chunk and (tensor.dtype != chunk[0].dtype or size + item > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += item
    if chunk:
        yield chunk


def _buffer(chunk: Sequence[torch.Tensor]) -> torch.Tensor:
    first = chunk[0]
    return torch.empty(sum(tensor.numel() for tensor in chunk), dtype=first.dtype, device=first.device)
