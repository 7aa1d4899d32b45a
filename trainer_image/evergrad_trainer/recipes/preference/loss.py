"""The loss of pairs, computed from the log-probabilities of both completions under model and reference."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from evergrad_manifest.training import Preference


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities [pairs] of the chosen and the rejected completions, each summed over its tokens."""

    chosen: Tensor
    rejected: Tensor

    @staticmethod
    def of(rows: Tensor) -> "LogProbs":
        """Return the log-probabilities of rows [pairs, 2], in which the chosen completion comes first."""
        return LogProbs(rows[:, 0], rows[:, 1])


def pair_losses(model: LogProbs, reference: LogProbs, settings: Preference) -> Tensor:
    """Return the loss of each pair [pairs], from the difference h of its log-ratios log(model / reference).

    ``sigmoid`` is equation 7 of "Direct Preference Optimization" (arXiv 2305.18290), with the smoothing of
    its conservative form. ``ipo`` is equation 17 of "A General Theoretical Paradigm to Understand Learning
    from Human Preferences" (arXiv 2310.12036), of sums over tokens. ``hinge`` is SLiC's loss on DPO's
    rewards, as in "Statistical Rejection Sampling Improves Preference Optimization" (arXiv 2309.06657).
    """
    beta, smoothing = float(settings.beta), float(settings.label_smoothing)
    # The partition function of the implied reward is the same for both rows, so it cancels here.
    chosen = model.chosen - reference.chosen
    rejected = model.rejected - reference.rejected
    difference = chosen - rejected
    if settings.loss == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    margin = beta * difference
    if settings.loss == "hinge":
        return functional.relu(1 - margin)
    # Do not use log(sigmoid(…)), which is -inf for a pair that is clearly ranked wrongly.
    losses = -(1 - smoothing) * functional.logsigmoid(margin)
    return losses - smoothing * functional.logsigmoid(-margin)


def pair_metrics(
    model: LogProbs, reference: LogProbs, settings: Preference
) -> dict[str, Tensor]:
    """Return the metrics of each pair [pairs], by the names in METRICS."""
    beta = float(settings.beta)
    chosen = beta * (model.chosen - reference.chosen)
    rejected = beta * (model.rejected - reference.rejected)
    return {
        # Convert to a number, so that the mean is the share of pairs.
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "chosen_log_probability": model.chosen,
        "rejected_log_probability": model.rejected,
    }
