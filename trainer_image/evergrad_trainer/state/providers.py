"""Providers of tensors for the state registry: modules, optimizers, and tensors that a recipe
keeps besides."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from evergrad_trainer.state.registry import Values

_BASE: Final = "evergrad_base"
"""Attribute of a module: the names of its parameters that belong to a base."""


class ModuleState:
    """Registers a module's parameters and persistent buffers by their own names; tied weights appear once."""

    def __init__(
        self,
        module: nn.Module,
        *,
        initial: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """``initial`` computes the tensors before the first step, by the same names; it may take long."""
        self._module = module
        self._initial = initial

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors."""
        return module_tensors(self._module)

    def values(self) -> Values:
        """Return nothing: a module is tensors alone."""
        return {}

    def load_values(self, values: Values) -> None:
        """Take nothing."""

    def reset(self) -> None:
        """Copy the initial tensors over the live ones."""
        _copy_over(self.tensors(), self._initial())


class OptimizerState:
    """Registers any optimizer's state by its own names: ``<parameter>.<slot>``, such as
    ``head.weight.exp_avg``.

    Scalars that torch keeps for each parameter, such as Adam's ``step``, are values and not tensors: they are
    written as one number where all parameters have the same. The optimizer's state is allocated before it is
    registered, and its tensors are zero before the first step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """``parameters``: those the optimizer trains, under the names that checkpoints use for them."""
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
        """Return the scalars by slot: one number, or a number for each parameter where they differ."""
        # One number where all agree, because a number for each of thousands of parameters fills a manifest.
        scalars: dict[str, dict[str, float]] = {}
        for name, slot, value in self._slots():
            if self._is_scalar(name, slot, value):
                scalars.setdefault(slot, {})[name] = float(value)
        return {
            slot: next(iter(own.values())) if len(set(own.values())) == 1 else own
            for slot, own in scalars.items()
        }

    def load_values(self, values: Values) -> None:
        """Set the scalars, in place where they are tensors."""
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
        """Forget every step: zero tensors, and the scalars of the beginning."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.zero_()
        self.load_values(self._initial)

    def _slots(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, slot, value) of everything the optimizer remembers."""
        for name, parameter in self._parameters.items():
            # Asking would make an entry for a parameter that the optimizer does not train.
            if parameter in self._optimizer.state:
                for slot, value in self._optimizer.state[parameter].items():
                    yield name, slot, value

    def _is_scalar(self, name: str, slot: str, value: object) -> bool:
        """Whether a slot is one number.

        The moments of a parameter without dimensions have none either, and are tensors.
        """
        if not isinstance(value, torch.Tensor):
            return isinstance(value, int | float)
        return value.ndim == 0 and (slot == "step" or self._parameters[name].ndim > 0)


class KeptTensors:
    """Registers tensors that a recipe keeps besides its modules, such as an average of weights or a snapshot
    of them."""

    def __init__(
        self,
        kept: Mapping[str, torch.Tensor],
        *,
        initial: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """``kept`` is complete: names and shapes stay, contents change.

        ``initial``: the contents before the first step.
        """
        self._kept = dict(kept)
        self._initial = initial

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors."""
        return self._kept

    def values(self) -> Values:
        """Return nothing: these are tensors alone."""
        return {}

    def load_values(self, values: Values) -> None:
        """Take nothing."""

    def reset(self) -> None:
        """Copy the initial tensors over the live ones."""
        _copy_over(self._kept, self._initial())


def mark_base(module: nn.Module, names: Collection[str]) -> None:
    """Note which parameters of ``module`` are a base: frozen weights that adapters stand beside.

    They are no part of the state: every process makes them again, and the state has their hash.
    """
    # On the module and not on the parameters, which FSDP2 replaces.
    setattr(module, _BASE, frozenset(names))


def base_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters of ``module`` that belong to a base, its own or that of a part."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, one in module.named_modules()
        for name in vars(one).get(_BASE, ())
    )


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of ``module``, live and detached, by their names in it.

    Without the weights that adapters stand beside: see :func:`base_tensors`.
    """
    # Detached, so that loading into them is no step of autograd's graph.
    base = base_names(module)
    tensors = {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if name not in base
    }
    return tensors | module_buffers(module)


def module_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers of ``module``, live, by their names in it.

    Others, such as tables of positions, are no part of its state: each process computes them again.
    """
    persistent = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def base_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The frozen weights that adapters of ``module`` stand beside, by their names in it; mostly none."""
    base = base_names(module)
    return {name: one.detach() for name, one in module.named_parameters() if name in base}


def _copy_over(
    live: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
) -> None:
    # Here, since it takes a second that no run without shards should wait for.
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, tensor in live.items():
            whole = initial[name]
            if isinstance(tensor, DTensor):
                # Every rank has made the whole tensor and cuts its own part of it: nothing is sent.
                whole = whole.to(tensor.device, tensor.dtype)
                mesh, cut = tensor.device_mesh, tensor.placements
                whole = distribute_tensor(whole, mesh, cut, src_data_rank=None)
            tensor.copy_(whole)
