"""Muon and Adafactor: torch's own optimizers, whose update of an element depends on its whole tensor.

They need the whole tensor on each rank. Gathering it would be a collective after the last one of the step,
where ranks no longer wait for each other: a rank that is lost there would leave an update half made. The
manifest therefore refuses these optimizers with fsdp2.
"""

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import nn

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.adamw import adamw_over
from evergrad_trainer.optim.groups import Group


class Several(torch.optim.Optimizer):
    """Combines optimizers of different kinds, each with its own groups, into one with one list of groups and
    one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        # Share the group objects, so that a rate that is set here is also set in the parts.
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            self.state.update(part.state)
            part.state = self.state
        self._parts = tuple(parts)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("several optimizers take no closure")
        for part in self._parts:
            part.step()
        return None


def build_muon(model: nn.Module, groups: Sequence[Group], settings: Optimizer) -> Several:
    """Build Muon (Jordan 2024) for the matrices inside ``model``, and AdamW for all other parameters:
    embeddings, heads, vectors, and tensors with more than two dimensions.

    The rate is scaled by 0.2 √(larger side), which makes an update as large as an AdamW update (Liu et al.
    2025, Muon is Scalable for LLM Training), so that one learning rate and one decay fit both.
    """
    # Weights of embeddings, and of the heads that transformers names: their rows are looked up or chosen
    # from, so they do not act as linear maps.
    tables: list[nn.Module] = [
        one for one in model.modules() if isinstance(one, nn.Embedding)
    ]
    for module in model.modules():
        find_head = getattr(module, "get_output_embeddings", None)
        head = find_head() if callable(find_head) else None
        tables += [head] if isinstance(head, nn.Module) else []
    outside = {parameter for table in tables for parameter in table.parameters()}

    inside: list[Group] = []
    rest: list[Group] = []
    for group in groups:
        matrices = [one for one in group["params"] if one.ndim == 2 and one not in outside]
        taken = set(matrices)
        others = [one for one in group["params"] if one not in taken]
        inside += [{**group, "params": matrices}] if matrices else []
        rest += [{**group, "params": others}] if others else []
    parts: list[torch.optim.Optimizer] = []
    if inside:
        muon = torch.optim.Muon(
            inside,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        for group in muon.param_groups:
            for parameter in group["params"]:
                muon.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        parts.append(muon)
    if rest:
        parts.append(adamw_over(rest, settings))
    return Several(parts)


def build_adafactor(groups: Sequence[Group], settings: Optimizer) -> torch.optim.Adafactor:
    """Build torch's Adafactor (Shazeer and Stern 2018) over ``groups``.

    It has no first moment. Its second moment has one number per row and one per column. The rate is relative
    to the root mean square of each tensor.
    """
    optimizer = torch.optim.Adafactor(groups, lr=settings.learning_rate, foreach=False)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Create the state that torch would create in the first step, because a checkpoint is loaded
            # earlier.
            state: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
            if parameter.ndim > 1:
                *rest, rows, columns = parameter.shape
                state["row_var"] = parameter.new_zeros((*rest, rows, 1))
                state["col_var"] = parameter.new_zeros((*rest, 1, columns))
            else:
                state["variance"] = torch.zeros_like(parameter)
            optimizer.state[parameter] = state
    return optimizer
