"""Snapshots: frozen modules that are copies of a trained module after a certain step.

Only the checkpoint of that step contains a snapshot, and this checkpoint is kept; the state contains the
hash. A process takes the copy at that step, or receives it from a member that has it, or reads it from the
kept checkpoint. All three ways give the same bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import CheckpointError, DivergedError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import Values
from evergrad_trainer.state.replicas import (
    describe_difference,
    find_suspects,
    hash_sums,
    sum_words,
)
from evergrad_trainer.state.transfer import plan_transfers, transfer_state
from evergrad_trainer.task import Modules, Snapshot, full_tensor
from evergrad_trainer.training.frozen import hash_frozen, written

Read = Callable[[Snapshot, Mapping[str, torch.Tensor], Callable[[], bool]], None]
"""Fills tensors, by their names in a checkpoint, from a checkpoint of the snapshot's step. Its last argument
returns whether the tensors are correct; if not, the next checkpoint is tried. All ranks call it. Raises
CheckpointError."""


class Snapshots:
    """The snapshots of one process, registered as a part of the run's state."""

    def __init__(self, modules: Modules, *, is_sharded: bool) -> None:
        self.hashes: dict[str, str] = {}
        """Hashes of the whole snapshots that belong to the state after the newest finished step, by name."""
        self.own_parts: dict[str, str] = {}
        """Hashes of the parts that this process holds."""
        self._modules = modules
        self._is_sharded = is_sharded
        self._held: dict[str, str] = {}

    @property
    def steps(self) -> frozenset[int]:
        """Return the steps whose checkpoints are kept."""
        return frozenset(one.after for one in self._modules.snapshots.values())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing, because the checkpoints of the snapshots' steps contain the tensors."""
        return {}

    def values(self) -> Values:
        """Return the step and hash of each snapshot that was taken."""
        planned = self._modules.snapshots
        return {
            name: {"after": planned[name].after, "hash": found}
            for name, found in self.hashes.items()
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Load the hashes of the snapshots that the state was trained with."""
        self.hashes = {name: str(one["hash"]) for name, one in values.items()}

    def reset(self) -> None:
        """Discard the hashes, because no snapshot exists before the first step."""
        self.hashes = {}

    @torch.no_grad()
    def take(self, step: int, world: World) -> dict[str, str]:
        """Take the snapshots that are due after ``step``; return their hashes by name.

        All ranks call this at the same step. Raises DivergedError on all ranks if their copies differ.
        """
        due = [name for name, one in self._modules.snapshots.items() if one.after == step]
        taken = {}
        for name in due:
            source = module_tensors(self._modules.trained[self._modules.snapshots[name].of])
            for own, tensor in module_tensors(self._modules.frozen[name]).items():
                live = source[own]
                # Snapshot and source are sharded alike, so each rank copies its own part. An unsharded copy
                # needs the whole.
                tensor.copy_(live if isinstance(tensor, DTensor) else full_tensor(live))
            taken[name] = self._note(name)
        if due:
            # Collective. If replicas differed, each would be trained against another reference from here on.
            rows = world.gather_json(taken)
            suspects = find_suspects([rows.index(row) for row in rows])
            if suspects:
                what = f"the snapshot after step {step}"
                message = describe_difference(suspects, size=world.size, what=what)
                raise DivergedError(message, suspects)
        self.hashes |= taken
        return taken

    def settle(self, step: int, world: World, read: Read) -> None:
        """Give all ranks, whose state is the state after ``step``, the snapshots that belong to it.

        All ranks call this. Raises CheckpointError on all ranks if neither a member nor a checkpoint has
        them. Raises PeerLostError.
        """
        planned = self._modules.snapshots
        due = sorted(name for name, one in planned.items() if one.after < step)
        # Drop snapshots that this process took in a state that no longer exists.
        self._held = {name: self._held[name] for name in due if name in self._held}
        self.own_parts = {name: self.own_parts[name] for name in self._held}
        for name in due:
            if name not in self.hashes:
                what = f"the state after step {step} has no snapshot {name!r}"
                why = f"it is that after step {planned[name].after}, and was not taken"
                remedy = "Go on with the task as it was, or give the changed run a name of its own"
                raise CheckpointError(Problem("spec.training.recipe", what, why, remedy))
            self._settle_one(name, world, read)

    def _settle_one(self, name: str, world: World, read: Read) -> None:
        snapshot, wanted = self._modules.snapshots[name], self.hashes[name]
        # Collective: each rank contributes one number.
        holders = world.gather_integers(int(self._held.get(name) == wanted))
        if all(holders):
            return
        tensors = {
            f"{snapshot.of}.{own}": tensor
            for own, tensor in module_tensors(self._modules.frozen[name]).items()
        }

        if any(holders) and not self._is_sharded:
            # Send from rank to rank, like the state: this is faster than a volume, and exact, too.
            for transfer in plan_transfers(holders):
                if world.rank in (transfer.source, transfer.stale_rank):
                    if world.rank == transfer.stale_rank:
                        self._held.pop(name, None)
                    transfer_state(tensors, transfer, world)
            # Collective: a source may have died while a part was still in transit.
            world.confirm()
            found = self._note(name)
            # Collective: if the hash is wrong on any rank, all ranks read from the volume instead.
            if world.all_agree(found == wanted):
                return
        self._held.pop(name, None)
        # Collective: rank 0 reads and distributes the tensors; shards are read by the ranks that hold them.
        read(snapshot, tensors, lambda: world.all_agree(self._note(name) == wanted))

    def _note(self, name: str) -> str:
        """Hash the current content of the frozen module, as a whole. Collective if the module is sharded."""
        module = self._modules.frozen[name]
        own = hash_frozen(self._modules, [name])[name]
        whole = own
        tensors = module_tensors(module)
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            sums = {key: int(sum_words(full_tensor(one))) for key, one in tensors.items()}
            whole = written(hash_sums(sums))
        self.own_parts[name] = own
        self._held[name] = whole
        return whole
