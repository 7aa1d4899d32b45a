"""Providers of tensors for the state registry: modules, optimizers, and further tensors of a recipe."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from evergrad_trainer.state.registry import Values

_BASE: Final = "evergrad_base"
"""Attribute of a module that contains the names of its base parameters (see :func:`mark_base`)."""


class ModuleState:
    """Provides a module's parameters and persistent buffers by their own names. Tied weights appear once."""

    def __init__(
        self,
        module: nn.Module,
        *,
        initial: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """``initial`` computes the tensors before the first step, by the same names. It may be slow."""
        self._module = module
        self._initial = initial

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors."""
        return module_tensors(self._module)

    def values(self) -> Values:
        """Return an empty mapping, because a module has only tensors."""
        return {}

    def load_values(self, values: Values) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Copy the initial tensors to the live tensors."""
        _copy_over(self.tensors(), self._initial())


class OptimizerState:
    """Provides the state of any optimizer under the names ``<parameter>.<slot>``.

    For example, ``head.weight.exp_avg``. Scalars that torch keeps for each parameter, such as Adam's
    ``step``, are values and not tensors. If a scalar is equal for all parameters, it is stored as one number.
    Allocate the optimizer's state before you create this provider. The tensors must be zero before the first
    step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """``parameters`` are the parameters that the optimizer trains, by their names in checkpoints."""
        self._optimizer = optimizer
        self._parameters = dict(parameters)
        self._initial = self.values()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors."""
        return {
            f"{name}.{slot}": value
            for name, slot, value in self._slots()
            if isinstance(value, torch.Tensor) and not self._is_scalar(name, slot, value)
        }

    def values(self) -> Values:
        """Return the scalars by slot: one number, or a number per parameter if the parameters differ.

        For example, ``{"step": 1200.0}``.
        """
        # Equal numbers are stored once, because a number for each of thousands of parameters would fill a
        # manifest.
        scalars: dict[str, dict[str, float]] = {}
        for name, slot, value in self._slots():
            if self._is_scalar(name, slot, value):
                scalars.setdefault(slot, {})[name] = float(value)
        return {
            slot: next(iter(own.values())) if len(set(own.values())) == 1 else own
            for slot, own in scalars.items()
        }

    def load_values(self, values: Values) -> None:
        """Set the scalars. Scalars that are tensors are set in place."""
        for name, slot, value in self._slots():
            if slot not in values or not self._is_scalar(name, slot, value):
                continue
            stored = values[slot]
            number = stored[name] if isinstance(stored, Mapping) else stored
            if isinstance(value, torch.Tensor):
                value.fill_(float(number))
            else:
                self._optimizer.state[self._parameters[name]][slot] = type(value)(number)

    def reset(self) -> None:
        """Reset to the state before the first step: zero the tensors and restore the initial scalars."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.zero_()
        self.load_values(self._initial)

    def _slots(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the parameter name, slot and value of each entry of the optimizer's state."""
        for name, parameter in self._parameters.items():
            # Without this check, the access would create an entry for a parameter that is not trained.
            if parameter in self._optimizer.state:
                for slot, value in self._optimizer.state[parameter].items():
                    yield name, slot, value

    def _is_scalar(self, name: str, slot: str, value: object) -> bool:
        """Return whether a slot is a single number.

        The moments of a parameter without dimensions also have no dimensions, but they are tensors.
        """
        if not isinstance(value, torch.Tensor):
            return isinstance(value, int | float)
        return value.ndim == 0 and (slot == "step" or self._parameters[name].ndim > 0)


class KeptTensors:
    """Provides tensors that a recipe keeps in addition to its modules, such as averaged weights."""

    def __init__(
        self,
        kept: Mapping[str, torch.Tensor],
        *,
        initial: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """``kept`` contains all tensors by name. Only their contents change, not their names or shapes.

        ``initial`` computes the contents before the first step.
        """
        self._kept = dict(kept)
        self._initial = initial

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors."""
        return self._kept

    def values(self) -> Values:
        """Return an empty mapping, because this provider has only tensors."""
        return {}

    def load_values(self, values: Values) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Copy the initial tensors to the live tensors."""
        _copy_over(self._kept, self._initial())


def mark_base(module: nn.Module, names: Collection[str]) -> None:
    """Mark the parameters ``names`` of ``module`` as a base: frozen weights that have adapters.

    Base weights are not part of the state. Every process creates them again, and the state contains their
    hash.
    """
    # The names are stored on the module and not on the parameters, because FSDP2 replaces parameters.
    setattr(module, _BASE, frozenset(names))


def base_names(module: nn.Module) -> frozenset[str]:
    """Return the names of all base parameters of ``module`` and its submodules."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, one in module.named_modules()
        for name in vars(one).get(_BASE, ())
    )


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters (detached) and persistent buffers of ``module`` by their names in it.

    Base weights of adapters are not included, see :func:`base_tensors`.
    """
    # The parameters are detached, so that autograd does not record a load into them.
    base = base_names(module)
    tensors = {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if name not in base
    }
    return tensors | module_buffers(module)


def module_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live persistent buffers of ``module`` by their names in it.

    Other buffers, such as tables of positions, are not part of the state. Each process computes them again.
    """
    persistent = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def base_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the frozen base weights of ``module`` by their names in it; empty if it has no adapters."""
    base = base_names(module)
    return {name: one.detach() for name, one in module.named_parameters() if name in base}


def _copy_over(
    live: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
) -> None:
    # Imported here, because the import takes a second, which only a run with shards needs to spend.
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, tensor in live.items():
            whole = initial[name]
            if isinstance(tensor, DTensor):
                # Every rank has computed the whole tensor and takes its own shard, so no rank sends data.
                whole = whole.to(tensor.device, tensor.dtype)
                mesh, cut = tensor.device_mesh, tensor.placements
                whole = distribute_tensor(whole, mesh, cut, src_data_rank=None)
            tensor.copy_(whole)
