"""Lion and SGD: optimizers whose update of an element depends only on that element.

Each operation rounds once: products and sums are separate operations. torch would fuse them in the middle of
a tensor but, depending on compiler and processor, perhaps not at its end. Separate operations give an element
the same bits however its tensor is sharded and whichever processor computes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import torch

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.groups import Group, parts_held

_LION = "exp_avg"
_SGD = "momentum_buffer"


class _Elementwise(torch.optim.Optimizer):
    """Loops over tensors, because a list of all updates would need as much additional memory as the
    weights."""

    def __init__(self, groups: Sequence[Group], slots: Sequence[str]) -> None:
        """``slots``: names of the tensors that are kept for each parameter; they begin as zeros."""
        super().__init__(groups, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    slot: torch.zeros_like(parameter) for slot in slots
                }

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for held in parts_held(self):
            rate, decay = held.group["lr"], held.group["weight_decay"]
            if decay:
                held.weights.mul_(1 - rate * decay)
            update = self.direction(held.gradient, held.state)
            held.weights.add_(update.mul_(-rate))
        return None

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the direction that is subtracted from the weights, in new memory, and update the state."""
        raise NotImplementedError


class Lion(_Elementwise):
    """Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2): the sign of a
    mean."""

    def __init__(self, groups: Sequence[Group], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, (_LION,))
        self._betas = betas

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return sign(β1 m + (1 - β1) g); then set m to β2 m + (1 - β2) g."""
        mean, (first, second) = state[_LION], self._betas
        update = mean.mul(first).add_(gradient.mul(1 - first)).sign_()
        mean.mul_(second).add_(gradient.mul(1 - second))
        return update


class Sgd(_Elementwise):
    """SGD with momentum as in torch (no dampening), and decoupled decay (Loshchilov and Hutter 2019,
    algorithm 1)."""

    def __init__(self, groups: Sequence[Group], *, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, (_SGD,) if momentum else ())
        self._momentum, self._nesterov = momentum, nesterov

    def direction(
        self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Set m to μ m + g; return m, or g + μ m with Nesterov momentum."""
        if not self._momentum:
            return gradient.clone()
        total = state[_SGD]
        total.mul_(self._momentum).add_(gradient)
        return total.mul(self._momentum).add_(gradient) if self._nesterov else total.clone()


def build_lion(groups: Sequence[Group], settings: Optimizer) -> Lion:
    """Build Lion over ``groups``."""
    return Lion(groups, betas=settings.betas)


def build_sgd(groups: Sequence[Group], settings: Optimizer) -> Sgd:
    """Build SGD over ``groups``."""
    return Sgd(groups, momentum=settings.momentum, nesterov=settings.nesterov)
