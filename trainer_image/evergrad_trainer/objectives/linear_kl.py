"""Token losses of a model and its divergence from a reference model, computed in chunks of tokens, so that
the logits of all tokens never exist at the same time.

For each token, p is the model's distribution over the vocabulary, q the reference's, and y the label.

==================  ==========================  ======================================
estimator           penalty                     its gradient by the model's logits
==================  ==========================  ======================================
``nll_difference``  log q(y) - log p(y)         p - onehot(y)
``forward``         KL(q ‖ p) = Σ q log(q / p)  p - q
``reverse``         KL(p ‖ q) = Σ p log(p / q)  p · (log(p / q) - KL(p ‖ q))
==================  ==========================  ======================================

The form of ``nll_difference`` is from theseus. The reference's term is a constant, so the gradient of the
penalty equals the gradient of the loss, and nothing pulls the model towards the reference.
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

    ``total`` is ``policy`` + beta · ``penalty``; only ``total`` has a gradient. ``divergence`` is KL(p ‖ q)
    for every estimator.
    """

    total: torch.Tensor
    policy: torch.Tensor
    reference: torch.Tensor
    penalty: torch.Tensor
    divergence: torch.Tensor


@dataclass(frozen=True)
class Penalty:
    """The estimator of the penalty (one of ``ESTIMATORS``) and its weight ``beta``."""

    estimator: str
    beta: float


class _ChunkedKl(torch.autograd.Function):
    """Computes the gradients together with the sums, chunk by chunk, so that no logits are stored for the
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
        # Sum over chunks in fp32, independent of the dtype of the products.
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
            # Free these before the next chunk allocates its own.
            del log_p, log_q
            sums += values
            if slope is None or grad_hidden is None or grad_weight is None:
                continue
            slope = slope.to(hidden.dtype)
            grad_hidden[rows] = slope @ weight
            grad_weight += slope.T @ part
            del slope
        if grad_hidden is not None and grad_weight is not None:
            # Store two tensors of the size of the inputs, but no logits.
            ctx.save_for_backward(grad_hidden, grad_weight.to(kept_type(weight)))
        ctx.dtype = weight.dtype
        policy, other, penalties, divergence = sums.unbind()
        total = policy + penalty.beta * penalties
        rest = (policy.clone(), other.clone(), penalties.clone(), divergence.clone())
        ctx.mark_non_differentiable(*rest)
        return total, *rest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The output is a sum, so the incoming gradient scales both gradients.
        slope = gradients[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = grad_hidden * slope.to(grad_hidden.dtype)
        return scaled_hidden, (grad_weight * slope).to(ctx.dtype), None, None, None


def _log_probabilities(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return log probabilities [n, V]; the softmax is computed in fp32, independent of the dtype of the
    products."""
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
    """Return the four sums of one chunk of tokens [n, V], and d total / d logits if ``needs_slope``.

    Overwrites ``log_p`` and ``log_q``, so that at most three tensors of their size exist at a time.
    """
    beta, is_forward = penalty.beta, penalty.estimator == "forward"
    is_asked = labels != IGNORE_INDEX
    # An ignored label is not a valid column. Use column 0, because the row does not count.
    targets = labels.where(is_asked, 0)[:, None]
    policy, other = -log_p.gather(1, targets)[:, 0], -log_q.gather(1, targets)[:, 0]

    # log(p / q) overwrites log q, and p overwrites log p.
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
    # Select the rows instead of multiplying by zero, because rows without a label may be NaN or infinite.
    sums = values.where(is_asked, 0.0).sum(dim=1)
    if not needs_slope:
        return sums, None

    # The loss contributes p - onehot(y), and the penalty beta times its gradient in the table above.
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
    """Sum the losses, penalties and divergences over the tokens of a batch.

    ``hidden`` [b, S, H] and ``weight`` [V, H] give the model's logits, ``reference`` holds the same two
    tensors of the reference model, and ``labels`` is [b, S]. The logits of at most ``chunk_tokens`` tokens of
    each model exist at a time. The reference's tensors get no gradient. Raises ValueError if the estimator is
    unknown.
    """
    if penalty.estimator not in ESTIMATORS:
        raise ValueError(f"{penalty.estimator!r} is none of {', '.join(ESTIMATORS)}")
    own, its_weight = reference
    frozen = (own.detach().flatten(0, 1), its_weight.detach())
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    settings = (penalty, chunk_tokens)
    sums = _ChunkedKl.apply(hidden, weight, frozen, labels, settings)  # type: ignore[no-untyped-call]
    return KlSums(*sums)
