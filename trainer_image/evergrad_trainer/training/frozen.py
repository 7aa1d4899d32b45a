"""Hashes of what is frozen and never saved: modules, and the weights beside adapters. A run goes on with the
same ones only, and they stay as they were built."""

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
    """Hashes of modules as they are whole, of which this rank is about to hold a part."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        bases: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        without: Collection[str] = (),
    ) -> None:
        """Before they are cut. Weights that are not made yet come by :meth:`add`. ``bases``: the weights that
        adapters stand beside, by the names of :func:`find_bases`. ``without``: names of modules that get
        their weights later."""
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
        """Note the whole value of a parameter that is being made."""
        # Trained ones are made in the same way, and hashed with the state.
        if not parameter.requires_grad:
            self._made[parameter] = int(sum_words(whole))

    def hashes(self) -> dict[str, str]:
        """The content of each module, the same in every world."""
        for name, module in self._modules.items():
            for own, parameter in module.named_parameters():
                if own not in self._sums[name]:
                    self._sums[name][own] = self._made[parameter]
        return {name: written(hash_sums(sums)) for name, sums in self._sums.items()}


def find_bases(modules: Modules) -> dict[str, dict[str, torch.Tensor]]:
    """The weights that adapters of trained modules stand beside, as ``<module>.base``."""
    found = {f"{name}.base": base_tensors(one) for name, one in modules.trained.items()}
    return {name: tensors for name, tensors in found.items() if tensors}


def hash_frozen(modules: Modules, names: Collection[str] | None = None) -> dict[str, str]:
    """The content of what is frozen, as 16 hex digits: what this rank holds of each.

    ``names``: by default all that ``build`` gives its weights.
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
    """All of a frozen module, which may have adapters too."""
    return {**module_tensors(module), **base_tensors(module)}


def require_unchanged(modules: Modules, built: Mapping[str, str], *, code: Code) -> None:
    """Compare with the hashes of the time of building.

    Raises TaskError: a task that changes a frozen module here does so on every rank.
    """
    if changed := _find_changed(modules, built):
        raise code.explain(_describe(changed))


def compare_frozen(
    modules: Modules, built: Mapping[str, str], world: World, *, code: Code
) -> None:
    """Look on every rank whether its frozen modules are what it has built or taken, in parts or whole.

    All ranks call this. Raises TaskError on all of them where all have changed, HostError on a rank whose
    alone have, or PeerLostError.
    """
    if not built:
        return
    changed = _find_changed(modules, built)
    # Collective: a task that changes them does so everywhere, and faulty memory on one host.
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
    """A hash as it is written down: 16 hex digits."""
    return f"{number % 2**64:016x}"
