"""Hashes of frozen weights, which are never saved: frozen modules, and the base weights of adapters. They
must not change during a run, and a run resumes only with the same ones."""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.state.providers import base_tensors, module_tensors
from evergrad_trainer.state.replicas import hash_state, hash_sums, sum_words
from evergrad_trainer.task import Modules


class WholeHashes:
    """Hashes of whole modules, computed before this rank keeps only a part of each."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        bases: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        without: Collection[str] = (),
    ) -> None:
        """Create this before the modules are sharded. Weights that do not exist yet are added by :meth:`add`.

        ``bases``: base weights of adapters, by the names of :func:`find_bases`. ``without``: names of modules
        that get their weights later.
        """
        self._modules = {name: one for name, one in modules.items() if name not in without}
        whole = {name: _tensors(one) for name, one in self._modules.items()}
        self._sums = {
            name: {
                own: int(sum_words(tensor))
                for own, tensor in tensors.items()
                if not tensor.is_meta
            }
            for name, tensors in {**whole, **bases}.items()
        }
        self._made: dict[nn.Parameter, int] = {}

    def add(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Record the whole value of a parameter while it is being created."""
        # Trained parameters are created in the same way, but are hashed with the state.
        if not parameter.requires_grad:
            self._made[parameter] = int(sum_words(whole))

    def hashes(self) -> dict[str, str]:
        """Return the hash of each module, the same in every world."""
        for name, module in self._modules.items():
            for own, parameter in module.named_parameters():
                if own not in self._sums[name]:
                    self._sums[name][own] = self._made[parameter]
        return {name: written(hash_sums(sums)) for name, sums in self._sums.items()}


def find_bases(modules: Modules) -> dict[str, dict[str, torch.Tensor]]:
    """Return the base weights of adapters in trained modules, as ``<module>.base``."""
    found = {f"{name}.base": base_tensors(one) for name, one in modules.trained.items()}
    return {name: tensors for name, tensors in found.items() if tensors}


def hash_frozen(modules: Modules, names: Collection[str] | None = None) -> dict[str, str]:
    """Return a hash (16 hex digits) of the part of each frozen module that this rank holds.

    ``names``: by default, all whose weights come from the task's ``build``, and so no snapshots.
    """
    frozen = {name: _tensors(module) for name, module in modules.frozen.items()}
    frozen |= find_bases(modules)
    if names is None:
        names = frozen.keys() - modules.snapshots.keys()
    return {
        name: written(
            hash_state(
                {
                    own: tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    for own, tensor in tensors.items()
                }
            )
        )
        for name, tensors in frozen.items()
        if name in names
    }


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a frozen module, including the base weights of adapters."""
    return {**module_tensors(module), **base_tensors(module)}


def require_unchanged(modules: Modules, built: Mapping[str, str], *, code: Code) -> None:
    """Compare the frozen modules with the hashes that were computed when they were built.

    Raises TaskError if they differ: a task that changes a frozen module here does so on every rank.
    """
    if changed := _find_changed(modules, built):
        raise code.explain(_describe(changed))


def compare_frozen(
    modules: Modules, built: Mapping[str, str], world: World, *, code: Code
) -> None:
    """Check on every rank that its frozen modules, or its parts of them, still are as built or taken.

    All ranks call this. Raises TaskError on all ranks if the modules have changed on all of them. Raises
    HostError on a rank if only some ranks have changed modules and this rank is one of them. Raises
    PeerLostError.
    """
    if not built:
        return
    changed = _find_changed(modules, built)
    # Collective: a task that changes them does so on every rank, but faulty memory only on one host.
    if all(world.gather_integers(len(changed))):
        raise code.explain(_describe(changed))
    if changed:
        raise HostError(
            f"the frozen modules {', '.join(changed)} have changed since they were built here, and those of "
            "other ranks have not: memory or a device of this host may be faulty. Look at it if this comes "
            "again."
        )


def _find_changed(modules: Modules, built: Mapping[str, str]) -> list[str]:
    now = hash_frozen(modules, built)
    return [name for name in {**built, **now} if built.get(name) != now.get(name)]


def _describe(changed: list[str]) -> Problem:
    return Problem(
        "spec.training.recipe",
        f"the frozen modules {', '.join(changed)} have changed since they were built",
        "they are not saved, so that a newcomer or a resumed run would go on with others",
        "Keep what changes as tensors in Modules.kept",
    )


def written(number: int) -> str:
    """Return the text form of a hash: 16 hex digits."""
    return f"{number % 2**64:016x}"
