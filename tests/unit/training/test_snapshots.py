"""Snapshots of trained modules: taken at their step, sent to joining ranks, read from a kept checkpoint, and
always those with which the state was trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import nn

from evergrad_trainer.base.errors import CheckpointError, DivergedError, TaskInputError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.task import Modules, Snapshot
from evergrad_trainer.training.frozen import compare_frozen
from evergrad_trainer.training.snapshots import Snapshots

ALONE = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
AFTER = 3


def modules_of(seed: int) -> Modules:
    torch.manual_seed(seed)
    return Modules(
        {"model": nn.Linear(3, 2)},
        {"reference": nn.Linear(3, 2)},
        snapshots={"reference": Snapshot(of="model", after=AFTER)},
    )


def copies(modules: Modules) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in module_tensors(modules.frozen["reference"]).items()
    }


@dataclass
class Disk:
    """Checkpoints of the snapshot's step, newest first, each the state of a model."""

    stored: list[Modules] = field(default_factory=list)
    read: int = 0

    def __call__(
        self,
        snapshot: Snapshot,
        tensors: Mapping[str, torch.Tensor],
        is_right: Callable[[], bool],
    ) -> None:
        assert (snapshot.of, snapshot.after) == ("model", AFTER)
        for modules in self.stored:
            self.read += 1
            for name, tensor in module_tensors(modules.trained["model"]).items():
                tensors[f"model.{name}"].copy_(tensor)
            if is_right():
                return
        raise CheckpointError()


def taken(seed: int) -> tuple[Snapshots, Modules]:
    modules = modules_of(seed)
    snapshots = Snapshots(modules, is_sharded=False)
    snapshots.take(AFTER, ALONE)
    return snapshots, modules


@pytest.mark.acceptance("8d-10b:two_stage_kl")
def test_a_snapshot_is_taken_after_its_step_only() -> None:
    modules = modules_of(0)
    snapshots, before = Snapshots(modules, is_sharded=False), copies(modules)
    assert snapshots.steps == {AFTER}
    assert snapshots.take(AFTER - 1, ALONE) == snapshots.take(AFTER + 1, ALONE) == {}
    assert all(torch.equal(before[name], one) for name, one in copies(modules).items())
    assert snapshots.values() == {}

    found = snapshots.take(AFTER, ALONE)
    assert snapshots.values() == {"reference": {"after": AFTER, "hash": found["reference"]}}
    live = module_tensors(modules.trained["model"])
    assert all(torch.equal(live[name], one) for name, one in copies(modules).items())
    # A copy: it does not change while the model continues to train.
    with torch.no_grad():
        modules.trained["model"].weight.zero_()  # type: ignore[operator, union-attr]
    assert copies(modules)["weight"].any()
    assert len(found["reference"]) == 16


@pytest.mark.acceptance("8d-10b:two_stage_kl")
def test_the_hash_of_a_snapshot_is_the_hash_of_the_weights() -> None:
    assert taken(0)[0].hashes == taken(0)[0].hashes != taken(1)[0].hashes


def test_a_process_that_holds_the_snapshot_reads_nothing() -> None:
    snapshots, _ = taken(0)
    disk = Disk()
    snapshots.load_values(snapshots.values())
    snapshots.settle(AFTER + 1, ALONE, disk)
    assert disk.read == 0 and snapshots.own_parts == snapshots.hashes


def test_a_resumed_process_reads_the_snapshot_with_which_its_state_was_trained() -> None:
    first, trained = taken(0)
    modules = modules_of(5)
    resumed = Snapshots(modules, is_sharded=False)
    resumed.load_values(first.values())
    # The newest of that step is of another attempt.
    disk = Disk([modules_of(7), trained])
    resumed.settle(AFTER + 4, ALONE, disk)
    assert disk.read == 2
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            copies(modules).values(), copies(trained).values(), strict=True
        )
    )
    resumed.settle(AFTER + 5, ALONE, disk)
    assert disk.read == 2, "once it is there, it is not read again"


def test_a_run_does_not_continue_without_the_right_snapshot() -> None:
    first, _ = taken(0)
    resumed = Snapshots(modules_of(5), is_sharded=False)
    resumed.load_values(first.values())
    with pytest.raises(CheckpointError):
        resumed.settle(AFTER + 4, ALONE, Disk([modules_of(7)]))
    # A tensor that was read is not treated as the requested tensor.
    with pytest.raises(CheckpointError):
        resumed.settle(AFTER + 4, ALONE, Disk())


def test_a_state_from_before_the_snapshot_step_needs_none_and_takes_its_own() -> None:
    snapshots, modules = taken(0)
    old = dict(snapshots.hashes)
    # All went back to a checkpoint before the boundary, and trained to it again, to other bits.
    snapshots.load_values({})
    snapshots.settle(AFTER - 1, ALONE, Disk())
    with torch.no_grad():
        modules.trained["model"].bias.add_(1.0)  # type: ignore[operator, union-attr]
    snapshots.settle(AFTER, ALONE, Disk())
    snapshots.take(AFTER, ALONE)
    assert snapshots.hashes != old
    snapshots.settle(AFTER + 1, ALONE, Disk())


def test_a_state_from_after_the_snapshot_step_without_a_snapshot_is_refused() -> None:
    """As of a task that got its snapshot only after its run had begun."""
    snapshots = Snapshots(modules_of(0), is_sharded=False)
    snapshots.load_values({})
    with pytest.raises(CheckpointError, match="has no snapshot 'reference'"):
        snapshots.settle(AFTER + 1, ALONE, Disk())


def test_a_reset_to_the_start_forgets_the_snapshot() -> None:
    snapshots, _ = taken(0)
    snapshots.reset()
    assert snapshots.values() == {}


def test_a_snapshot_that_changes_in_memory_is_detected_by_the_replica_comparison() -> None:
    snapshots, modules = taken(0)
    compare_frozen(modules, snapshots.own_parts, ALONE, code=Code(None))
    with torch.no_grad():
        modules.frozen["reference"].bias.add_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(TaskInputError, match="reference have changed"):
        compare_frozen(modules, snapshots.own_parts, ALONE, code=Code(None))


class Pair:
    """The exchange between two ranks as seen by rank 0: the other rank always sends ``other``."""

    rank, size = 0, 2

    def __init__(self, other: Any) -> None:
        self._other = other

    def gather_json(self, own: Any) -> list[Any]:
        return [own, self._other]


def test_replicas_that_would_take_different_snapshots_have_diverged() -> None:
    snapshots = Snapshots(modules_of(0), is_sharded=False)
    world = cast(World, Pair({"reference": "0" * 16}))
    with pytest.raises(
        DivergedError, match="the snapshot after step 3 differs between ranks"
    ):
        snapshots.take(AFTER, world)
    assert snapshots.hashes == {}
