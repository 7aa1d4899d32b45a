"""An AdamW update whose result for an element does not depend on which part of its tensor a process holds.

torch's fused kernel on the CPU processes a tensor in vectors, and the remaining elements at its end one at a
time, with different rounding. If a tensor is cut in two, a few of 3 million results differ in the last bit:
tools/benchmarks/adamw_cuts.py measures this. ``foreach`` and the plain loop do not depend on cuts, but read
memory several times where the fused kernel reads it once, and their bits differ from those of existing runs.

The kernel's threads and vectors begin at multiples of a cache line. A part is therefore updated line by line.
Whole lines are updated in place. Lines at the ends, which other ranks hold partly, are updated as copies, at
the same offsets as in the whole tensor.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

_LINE_BYTES = 64


@dataclass(frozen=True)
class TensorPart:
    """Elements [begin, begin + n) of a tensor with ``total`` elements.

    Weights, gradient and moments are flat, with n elements each.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    begin: int
    total: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the four tensors in the order in which torch takes them."""
        return self.weights, self.gradient, self.exp_avg, self.exp_avg_sq


def update_parts(
    parts: Sequence[TensorPart],
    *,
    updates: int,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """Update weights and moments of all parts in place, on the CPU.

    ``updates``: number of earlier updates of the moments.
    """
    # The kernel takes four lists of equal length, which contain the lines of all parts.
    columns: tuple[list[torch.Tensor], ...] = ([], [], [], [])
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in parts:
        for start, end, line_begin, line_end in plan_lines(part):
            is_cut = end - start != line_end - line_begin
            place_in_line = part.begin + start - line_begin
            for index, (column, tensor) in enumerate(
                zip(columns, part.tensors, strict=True)
            ):
                own = tensor[start:end]
                if is_cut:
                    # Other ranks hold the rest of this line. Fill it with zeros, whose results are discarded.
                    line = torch.zeros(line_end - line_begin, dtype=tensor.dtype)
                    place = line[place_in_line : place_in_line + end - start]
                    place.copy_(own)
                    if index != 1:  # the gradient is not written
                        copies.append((own, place))
                    own = line
                column.append(own)
    # One call for all lines; the kernel counts the update for each of them.
    weights, gradients, exp_avgs, exp_avg_sqs = columns
    counts = [torch.tensor(float(updates)) for _ in weights]
    adamw(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
    # Copy back this part's elements of lines that other ranks hold partly.
    for own, place in copies:
        own.copy_(place)


def plan_lines(part: TensorPart) -> list[tuple[int, int, int, int]]:
    """Return (start, end, line_begin, line_end) for each range of elements that is updated together.

    ``start`` and ``end`` are offsets in the part. The lines around them, ``line_begin`` to ``line_end``, are
    offsets in the whole tensor. The remaining elements at the end of the whole tensor form a shorter line.
    """
    line = _LINE_BYTES // part.weights.element_size()
    begin = part.begin
    end = begin + part.weights.numel()
    rest = part.total - part.total % line
    first_line_end = -(-begin // line) * line
    last_line_begin = end // line * line
    # Split a part after its first line, before its last line, and where the remaining elements begin.
    borders = {begin, end, min(first_line_end, end), max(last_line_begin, begin)}
    if begin < rest < end:
        borders.add(rest)
    ordered = sorted(borders)
    planned = []
    for start, stop in itertools.pairwise(ordered):
        line_begin = start // line * line
        line_end = min(-(-stop // line) * line, part.total)
        planned.append((start - begin, stop - begin, line_begin, line_end))
    return planned
