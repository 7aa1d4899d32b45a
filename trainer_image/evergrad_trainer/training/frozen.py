"""Hashes of frozen modules, which are never saved: a run goes on with the same ones only, and they stay as
they were built."""

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer.errors import HostError
from evergrad_trainer.recipes.own import Code
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.replicas import hash_state, hash_sums, sum_words
from evergrad_trainer.task import Modules
from evergrad_trainer.world import World


class WholeHashes:
    """Hashes of modules as they are whole, of which this rank is about to hold a part."""

    def __init__(
        self, modules: Mapping[str, nn.Module], *, without: Collection[str] = ()
    ) -> None:
        """Before they are cut. Weights that are not made yet come by :meth:`add`. ``without``: names of those
        that get their weights later."""
        self._modules = {name: one for name, one in modules.items() if name not in without}
        self._sums = {
            name: {
                own: int(sum_words(tensor))
                for own, tensor in module_tensors(module).items()
                if not tensor.is_meta
            }
            for name, module in self._modules.items()
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


def hash_frozen(modules: Modules, names: Collection[str] | None = None) -> dict[str, str]:
    """The content of frozen modules, as 16 hex digits: what this rank holds of each.

    ``names``: by default all those that ``build`` gives their weights.
    """
    if names is None:
        names = modules.frozen.keys() - modules.snapshots.keys()
    return {
        name: written(
            hash_state(
                {
                    own: tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    for own, tensor in module_tensors(module).items()
                }
            )
        )
        for name, module in modules.frozen.items()
        if name in names
    }


def require_unchanged(modules: Modules, built: Mapping[str, str], *, code: Code) -> None:
    """Compare with the hashes of the time of building.

    Raises TaskError: whoever changes a frozen module here does so on every rank.
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
