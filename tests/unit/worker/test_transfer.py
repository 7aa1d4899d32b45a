"""Which rank sends its state to which, and that the received data equal the sent data, type by type and chunk
by chunk."""

import queue
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from evergrad_trainer.distributed.world import World
from evergrad_trainer.state import transfer
from evergrad_trainer.state.transfer import (
    StateTransfer,
    pass_along,
    plan_transfers,
    transfer_state,
)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([-1, -1], ()),
        ([5, 5, 5], ()),
        ([0, -1], (StateTransfer(0, 1),)),
        ([4, 5, -1], (StateTransfer(1, 0), StateTransfer(1, 2))),
        (
            [5, -1, 5, -1, -1, 3],
            (
                StateTransfer(0, 1),
                StateTransfer(2, 3),
                StateTransfer(0, 4),
                StateTransfer(2, 5),
            ),
        ),
    ],
)
def test_ranks_with_the_newest_step_share_the_state_transfer(
    steps: list[int], expected: tuple[StateTransfer, ...]
) -> None:
    assert plan_transfers(steps) == expected


@dataclass
class Wire:
    """Worlds whose ranks are threads' ends of queues: here used one after the other."""

    sent: "defaultdict[tuple[int, int], queue.Queue[torch.Tensor]]" = field(
        default_factory=lambda: defaultdict(queue.Queue)
    )

    def world(self, rank: int, *, of: int = 4) -> World:
        wire = self

        class Rank:
            def __init__(self) -> None:
                self.rank, self.size, self.is_main = rank, of, rank == 0
                self.device = torch.device("cpu")

            def confirm(self) -> None:
                """Everything has arrived."""

            def send(self, values: torch.Tensor, *, to: int) -> None:
                wire.sent[rank, to].put(values.clone())

            def receive(self, values: torch.Tensor, *, source: int) -> None:
                sent = wire.sent[source, rank].get_nowait()
                assert sent.dtype == values.dtype and sent.shape == values.shape
                values.copy_(sent)

        return cast(World, Rank())


def make_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {
        f"model.{index}": torch.randn(7, index + 1, generator=generator)
        for index in range(5)
    }
    made["model.half"] = torch.randn(9, generator=generator).to(torch.bfloat16)
    made["optimizer.step"] = torch.tensor(float(seed))
    made["optimizer.count"] = torch.tensor([seed, seed + 1])
    made["optimizer.none"] = torch.zeros(0)
    return made


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_a_receiving_rank_holds_the_bits_of_the_source(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", chunk_bytes)
    wire, source, stale_rank = Wire(), make_state(1), make_state(2)
    untouched = {name: tensor.clone() for name, tensor in source.items()}
    reversed_order = dict(reversed(stale_rank.items()))
    transfer_state(source, StateTransfer(0, 3), wire.world(0))
    transfer_state(reversed_order, StateTransfer(0, 3), wire.world(3))
    assert all(one.empty() for one in wire.sent.values())
    for name, tensor in untouched.items():
        assert torch.equal(source[name], tensor), "a source only reads"
        assert torch.equal(stale_rank[name], tensor), name


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_state_read_by_one_rank_is_forwarded_from_rank_to_rank(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", chunk_bytes)
    wire, stored = Wire(), make_state(1)
    filled: list[str] = []

    def fill(piece: Any) -> bool:
        for name, tensor in piece.items():
            tensor.copy_(stored[name])
        filled.extend(piece)
        return True

    states = [make_state(seed) for seed in (2, 3, 4)]
    assert all(
        pass_along(state, wire.world(rank, of=3), fill=fill)
        for rank, state in enumerate(states)
    )
    assert all(one.empty() for one in wire.sent.values())
    assert sorted(filled) == sorted(stored)
    assert all(
        torch.equal(state[name], stored[name]) for state in states for name in stored
    )


def test_a_read_that_fails_midway_is_reported_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", 1)
    wire, left = Wire(), [True, True, False]
    answers = [
        pass_along(make_state(rank), wire.world(rank, of=3), fill=lambda piece: left.pop(0))
        for rank in range(3)
    ]
    assert answers == [False, False, False]
    assert all(one.empty() for one in wire.sent.values())
