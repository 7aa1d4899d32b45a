"""Token losses of a model and its divergence from a reference, without the logits of all tokens of either.

For each token p is the model's distribution over the vocabulary and q the reference's; the label is y.

==================  ==========================  ======================================
estimator           penalty                     its gradient by the model's logits
==================  ==========================  ======================================
``nll_difference``  log q(y) - log p(y)         p - onehot(y)
``forward``         KL(q ‖ p) = Σ q log(q / p)  p - q
``reverse``         KL(p ‖ q) = Σ p log(p / q)  p · (log(p / q) - KL(p ‖ q))
==================  ==========================  ======================================

The first is the form that theseus publishes: the reference's part of it is a constant, so that its gradient
is that of the loss again, and nothing pulls towards the reference.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.objectives.linear_cross_entropy import kept_type

ESTIMATORS: Final = ("nll_difference", "forward", "reverse")


class KlSums(NamedTuple):
    """Sums over the tokens that have a label, float32 scalars.

    ``total`` is ``policy`` + beta · ``penalty``, and the only one with a gradient. ``divergence`` is
    KL(p ‖ q), whichever the penalty is.
    """

    total: torch.Tensor
    policy: torch.Tensor
    reference: torch.Tensor
    penalty: torch.Tensor
    divergence: torch.Tensor


@dataclass(frozen=True)
class Penalty:
    """Which penalty there is, and its weight."""

    estimator: str
    beta: float


class _ChunkedKl(torch.autograd.Function):
    """Gradients are computed with the sums, chunk by chunk, so that no logits are kept for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        reference: tuple[torch.Tensor, torch.Tensor],
        labels: torch.Tensor,
        settings: tuple[Penalty, int],
    ) -> tuple[torch.Tensor, ...]:
        penalty, chunk_tokens = settings
        needs_gradients = hidden.requires_grad or weight.requires_grad
        sums = torch.zeros(4, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if needs_gradients else None
        # Summed over chunks in fp32, whatever the products' type is.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if needs_gradients else None
        )
        own, its_weight = reference
        for begin in range(0, len(hidden), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            part = hidden[rows]
            log_p = _log_probabilities(part, weight)
            log_q = _log_probabilities(own[rows], its_weight)
            values, slope = _compare(
                log_p, log_q, labels[rows], penalty, needs_slope=needs_gradients
            )
            # Gone before the next chunk's are made.
            del log_p, log_q
            sums += values
            if slope is None or grad_hidden is None or grad_weight is None:
                continue
            slope = slope.to(hidden.dtype)
            grad_hidden[rows] = slope @ weight
            grad_weight += slope.T @ part
            del slope
        if grad_hidden is not None and grad_weight is not None:
            # Two tensors of the size of the inputs, and no logits.
            ctx.save_for_backward(grad_hidden, grad_weight.to(kept_type(weight)))
        ctx.dtype = weight.dtype
        policy, other, penalties, divergence = sums.unbind()
        total = policy + penalty.beta * penalties
        rest = (policy.clone(), other.clone(), penalties.clone(), divergence.clone())
        ctx.mark_non_differentiable(*rest)
        return total, *rest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A sum: what comes from above scales both.
        slope = gradients[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = grad_hidden * slope.to(grad_hidden.dtype)
        return scaled_hidden, (grad_weight * slope).to(ctx.dtype), None, None, None


def _log_probabilities(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, V], in fp32 at once, whatever the products' type is."""
    return functional.log_softmax(
        functional.linear(hidden, weight), dim=-1, dtype=torch.float32
    )


def _compare(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    labels: torch.Tensor,
    penalty: Penalty,
    *,
    needs_slope: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The four sums of one chunk of tokens [n, V], and d total / d logits where that is needed.

    Writes over ``log_p`` and ``log_q``: three tensors of their size exist at a time.
    """
    beta, is_forward = penalty.beta, penalty.estimator == "forward"
    is_asked = labels != IGNORE_INDEX
    # A target that is to be ignored is no column: any one will do, since the row counts nothing.
    targets = labels.where(is_asked, 0)[:, None]
    policy, other = -log_p.gather(1, targets)[:, 0], -log_q.gather(1, targets)[:, 0]

    # log(p / q) takes the place of log q, and p that of log p.
    q = log_q.exp() if is_forward else None
    ratio = torch.sub(log_p, log_q, out=log_q)
    p = log_p.exp_()
    divergence = (p * ratio).sum(dim=1)
    penalties = divergence
    if q is not None:
        penalties = -(q * ratio).sum(dim=1)
    elif penalty.estimator == "nll_difference":
        penalties = policy - other
    values = torch.stack([policy, other, penalties, divergence])
    # Chosen, and not multiplied by zero: what has no label may be anything.
    sums = values.where(is_asked, 0.0).sum(dim=1)
    if not needs_slope:
        return sums, None

    # p - onehot(y) of the loss, and beta times what the table above has of the penalty.
    slope, ones = p, torch.ones_like(targets, dtype=p.dtype)
    if penalty.estimator == "nll_difference":
        slope.scatter_add_(1, targets, -ones).mul_(1 + beta)
    else:
        if q is not None:
            slope.mul_(1 + beta).sub_(q, alpha=beta)
        else:
            slope.mul_(ratio.mul_(beta).add_(1.0 - beta * divergence[:, None]))
        slope.scatter_add_(1, targets, -ones)
    return sums, slope.masked_fill_(~is_asked[:, None], 0.0)


def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reference: tuple[torch.Tensor, torch.Tensor],
    labels: torch.Tensor,
    *,
    penalty: Penalty,
    chunk_tokens: int,
) -> KlSums:
    """Sums over the tokens of a batch: ``hidden`` [b, S, H] times ``weight`` [V, H] beside the
    ``reference``'s own, against ``labels`` [b, S].

    Logits of ``chunk_tokens`` tokens exist at a time, of the model and of the reference, whose tensors get no
    gradient. Raises ValueError for an estimator that there is not.
    """
    if penalty.estimator not in ESTIMATORS:
        raise ValueError(f"{penalty.estimator!r} is none of {', '.join(ESTIMATORS)}")
    own, its_weight = reference
    frozen = (own.detach().flatten(0, 1), its_weight.detach())
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    settings = (penalty, chunk_tokens)
    sums = _ChunkedKl.apply(hidden, weight, frozen, labels, settings)  # type: ignore[no-untyped-call]
    return KlSums(*sums)
