"""An AdamW update whose result for an element does not depend on which part of its tensor a process holds.

torch's fused kernel on the CPU works through a tensor in vectors, and does what is left at its end one
element at a time, with other roundings. Cut a tensor in two and, of 3 million results, a few differ in the
last bit: tools/benchmarks/adamw_cuts.py measures it. ``foreach`` and the plain loop do not depend on cuts,
but take several passes over memory where the fused kernel takes one, and their bits are not those that runs
have had so far.

The kernel's threads and vectors begin at multiples of a cache line. A part is therefore updated line by line:
lines that are whole in place, and the two that others hold a part of as copies, at the same places as in the
whole tensor.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

_LINE_BYTES = 64


@dataclass(frozen=True)
class TensorPart:
    """Elements [begin, begin + n) of a tensor of ``total`` elements: its flat weights, gradient and moments,
    n elements each."""

    weights: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    begin: int
    total: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The four, in the order in which torch takes them."""
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

    ``updates``: how many the moments have seen before.
    """
    # The kernel takes four lists of equal length: lines of all parts go to it together.
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
                    # Others hold the rest of this line: zeros stand in for it, and their results are dropped.
                    line = torch.zeros(line_end - line_begin, dtype=tensor.dtype)
                    place = line[place_in_line : place_in_line + end - start]
                    place.copy_(own)
                    if index != 1:  # the gradient is not written
                        copies.append((own, place))
                    own = line
                column.append(own)
    # One call for all lines; it counts updates for each of them.
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
    # This part's elements of the lines that others hold a part of.
    for own, place in copies:
        own.copy_(place)


def plan_lines(part: TensorPart) -> list[tuple[int, int, int, int]]:
    """(start, end, line_begin, line_end): elements of the part that are updated together, and the lines of
    the whole around them.

    The kernel's rest, at the end of the whole tensor, is a line of its own: a shorter one.
    """
    line = _LINE_BYTES // part.weights.element_size()
    begin = part.begin
    end = begin + part.weights.numel()
    rest = part.total - part.total % line
    first_line_end = -(-begin // line) * line
    last_line_begin = end // line * line
    # A part is split after its first line, before its last one, and where the rest begins.
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
