"""The loss of predicted states, and the numbers that tell a collapse; formulas of GenoLeWM.

A collapse is a predictor, or an encoder, that gives everything the same state: the loss alone may look well.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

RIDGE: Final = 1e-6
"""Added to the diagonal of a covariance, so that its determinant is not 0."""


def prediction_losses(
    predicted: Tensor, target: Tensor, mask: Tensor, *, alpha: float, beta: float
) -> Tensor:
    """alpha · (1 − cosine) + beta · squared distance / D of each edit, 0 where the mask is false.

    [B, K, D], [B, K, D], [B, K] → [B, K] in fp32.
    """
    # In fp32 whatever the model computes in: a cosine near 1 needs the digits.
    one = predicted.float()
    other = target.float()
    cosine = functional.cosine_similarity(one, other, dim=-1)
    distance = (one - other).square().sum(-1) / one.shape[-1]
    return (alpha * (1 - cosine) + beta * distance) * mask


@dataclass(frozen=True)
class Spread:
    """How the predictions and targets of a micro-batch lie, each a scalar.

    ``cosine``, ``squared_distance``: means over the edits. ``target_variance``, ``prediction_variance``:
    means over the dimensions of the variance (divided by N). ``correlation``: Pearson's, of all numbers.
    ``pairwise_distance``: mean over all pairs of predictions. ``gaussian_kl``: of the targets.
    """

    cosine: Tensor
    squared_distance: Tensor
    target_variance: Tensor
    prediction_variance: Tensor
    correlation: Tensor
    pairwise_distance: Tensor
    gaussian_kl: Tensor


def measure_spread(predicted: Tensor, target: Tensor, mask: Tensor) -> Spread:
    """The numbers of one micro-batch; those that need two edits are 0 with fewer.

    [B, K, D], [B, K, D], [B, K]. Shapes are those of the batch: nothing waits for a device.
    """
    # In float64, since variances are small differences of large sums. At least 1 of them: a micro-batch of
    # fill alone must not divide by 0.
    valid = mask.flatten().double()
    count = valid.sum().clamp(min=1)
    weight = valid[:, None]
    one, other = (states.flatten(0, 1).double() * weight for states in (predicted, target))

    cosines = functional.cosine_similarity(one, other, dim=-1) * valid
    distances = (one - other).square().sum(-1)
    one_mean = one.sum(0) / count
    other_mean = other.sum(0) / count
    # Masked once more: a row of fill is 0, and differs from the mean.
    one_centred = (one - one_mean) * weight
    other_centred = (other - other_mean) * weight

    numbers = count * one.shape[-1]
    one_all, other_all = (
        (states - states.sum() / numbers) * weight for states in (one, other)
    )
    spread = (one_all.square().sum() * other_all.square().sum()).sqrt()
    # Above the diagonal: each pair counts once, and no prediction beside itself.
    pairs = (valid[:, None] * valid[None, :]).triu(1)
    # Not of all differences, which would be as many numbers as pairs and dimensions.
    gaps = torch.cdist(one, one, compute_mode="donot_use_mm_for_euclid_dist")
    return Spread(
        cosine=cosines.sum() / count,
        squared_distance=distances.sum() / count,
        target_variance=other_centred.square().sum() / numbers,
        prediction_variance=one_centred.square().sum() / numbers,
        correlation=(one_all * other_all).sum() / spread.clamp(min=1e-30),
        pairwise_distance=(gaps * pairs).sum() / pairs.sum().clamp(min=1),
        gaussian_kl=gaussian_kl(other, mask.flatten()),
    )


def gaussian_kl(states: Tensor, mask: Tensor) -> Tensor:
    """KL of the Gaussian with the mean and covariance of ``states`` [N, D] from the standard one.

    ½ (|mean|² + trace − log det − D), of a covariance that is divided by N, with 1e-6 on the diagonal of the
    determinant. Few states of many dimensions have a large one: all but N directions have no spread.
    """
    weight = mask.double()[:, None]
    count, width = weight.sum().clamp(min=1), states.shape[1]
    values = states.double() * weight
    mean = values.sum(0) / count
    centred = (values - mean) * weight / count.sqrt()
    # The smaller of both products is used: they have the same eigenvalues besides 0.
    if centred.shape[0] < width:
        product, rest = centred @ centred.T, width - centred.shape[0]
    else:
        product, rest = centred.T @ centred, 0
    ridge = RIDGE * torch.eye(product.shape[0], dtype=product.dtype, device=product.device)
    determinant = torch.linalg.slogdet(product + ridge).logabsdet
    # Directions without any spread have the ridge alone, which the smaller product leaves out.
    of_rest = rest * torch.log(torch.full_like(determinant, RIDGE))
    determinant = determinant + of_rest
    found: Tensor = mean.square().sum() + centred.square().sum() - determinant - width
    return 0.5 * found
