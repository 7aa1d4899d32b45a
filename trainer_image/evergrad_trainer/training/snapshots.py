"""Frozen modules that a run makes itself: copies of a trained one as it was after a step.

No checkpoint but that step's holds them, which is kept; the state has their hashes. A process gets one of
three ways, and always the same bits: it takes the copy at the step itself, or gets it from a member that has
it, or reads it from the kept checkpoint.
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
"""Fills tensors, by their names in a checkpoint, from that of the snapshot's step for which the last argument
says that they are right. All ranks call it. Raises CheckpointError."""


class Snapshots:
    """The snapshots of one process, registered as a part of the run's state."""

    def __init__(self, modules: Modules, *, is_sharded: bool) -> None:
        self.hashes: dict[str, str] = {}
        """Hashes of the snapshots that belong to the state after the newest finished step, each as a
        whole."""
        self.own_parts: dict[str, str] = {}
        """Hashes of the parts that this process holds of them."""
        self._modules = modules
        self._is_sharded = is_sharded
        self._held: dict[str, str] = {}

    @property
    def steps(self) -> frozenset[int]:
        """The steps whose checkpoints are kept."""
        return frozenset(one.after for one in self._modules.snapshots.values())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: their tensors are in the checkpoints of their steps."""
        return {}

    def values(self) -> Values:
        """Return step and hash of each that was taken."""
        planned = self._modules.snapshots
        return {
            name: {"after": planned[name].after, "hash": found}
            for name, found in self.hashes.items()
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over which ones the state was trained with."""
        self.hashes = {name: str(one["hash"]) for name, one in values.items()}

    def reset(self) -> None:
        """Forget them: none was taken before the first step."""
        self.hashes = {}

    @torch.no_grad()
    def take(self, step: int, world: World) -> dict[str, str]:
        """Copy what is due after ``step`` from the trained modules; hashes by name.

        All ranks call this, all at that step. Raises DivergedError, on all, where their copies differ.
        """
        due = [name for name, one in self._modules.snapshots.items() if one.after == step]
        taken = {}
        for name in due:
            source = module_tensors(self._modules.trained[self._modules.snapshots[name].of])
            for own, tensor in module_tensors(self._modules.frozen[name]).items():
                live = source[own]
                # Cut alike, each rank copies its own part; a copy that is not cut needs the whole.
                tensor.copy_(live if isinstance(tensor, DTensor) else full_tensor(live))
            taken[name] = self._note(name)
        if due:
            # Collective: replicas that differ would be held to different references from here on.
            rows = world.gather_json(taken)
            suspects = find_suspects([rows.index(row) for row in rows])
            if suspects:
                what = f"the snapshot after step {step}"
                message = describe_difference(suspects, size=world.size, what=what)
                raise DivergedError(message, suspects)
        self.hashes |= taken
        return taken

    def settle(self, step: int, world: World, read: Read) -> None:
        """Bring all ranks, whose state is that after ``step``, to the snapshots that belong to it.

        All ranks call this. Raises CheckpointError, the same on all, where no member and no checkpoint has
        them; PeerLostError.
        """
        planned = self._modules.snapshots
        due = sorted(name for name, one in planned.items() if one.after < step)
        # Snapshots that this process took belong to a state that is gone.
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
        # Collective: one number of each rank.
        holders = world.gather_integers(int(self._held.get(name) == wanted))
        if all(holders):
            return
        tensors = {
            f"{snapshot.of}.{own}": tensor
            for own, tensor in module_tensors(self._modules.frozen[name]).items()
        }

        if any(holders) and not self._is_sharded:
            # Point to point, as the state itself: faster than a volume, and no less exact.
            for transfer in plan_transfers(holders):
                if world.rank in (transfer.source, transfer.stale_rank):
                    if world.rank == transfer.stale_rank:
                        self._held.pop(name, None)
                    transfer_state(tensors, transfer, world)
            # Collective: a source may have died with part of it still on its way.
            world.confirm()
            found = self._note(name)
            # Collective: whoever has got something else goes back with all to what is on the disk.
            if world.all_agree(found == wanted):
                return
        self._held.pop(name, None)
        # Collective: rank 0 reads, and gives each piece on; shards are read by those that hold them.
        read(snapshot, tensors, lambda: world.all_agree(self._note(name) == wanted))

    def _note(self, name: str) -> str:
        """Hash what the frozen module holds now, as a whole (collective where it is cut)."""
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
