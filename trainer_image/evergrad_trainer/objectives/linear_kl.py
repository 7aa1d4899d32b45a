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
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradients else None
        own, its_weight = reference
        for begin in range(0, len(hidden), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            part, targets = hidden[rows], labels[rows]
            is_asked = targets != IGNORE_INDEX
            # A target that is to be ignored is no column: any one will do, since the row counts nothing.
            targets = targets.where(is_asked, 0)[:, None]
            log_p = _log_softmax(functional.linear(part, weight))
            log_q = _log_softmax(functional.linear(own[rows], its_weight))
            policy, other = -log_p.gather(1, targets)[:, 0], -log_q.gather(1, targets)[:, 0]
            chunk = _Chunk(log_p, log_q, policy - other, penalty)
            values = torch.stack([policy, other, chunk.penalties, chunk.divergence])
            # Not a product: what has no label may be anything, also not a number.
            sums += values.where(is_asked, 0.0).sum(dim=1)
            if grad_hidden is None or grad_weight is None:
                continue
            slope = chunk.slope(targets)
            slope.masked_fill_(~is_asked[:, None], 0.0)
            slope = slope.to(hidden.dtype)
            grad_hidden[rows] = slope @ weight
            grad_weight += slope.T @ part
        if grad_hidden is not None and grad_weight is not None:
            # Two tensors of the size of the inputs, and no logits.
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
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
        return scaled_hidden, grad_weight * slope, None, None, None


class _Chunk:
    """One chunk of tokens [n, V]: its penalties, KL(p ‖ q), and the slope of its part of the sum.

    ``log_p`` and ``log_q`` are written over: three tensors of this size exist at a time.
    """

    def __init__(
        self,
        log_p: torch.Tensor,
        log_q: torch.Tensor,
        difference: torch.Tensor,
        penalty: Penalty,
    ) -> None:
        """``difference``: of the two losses of each token."""
        self._settings = penalty
        is_forward = penalty.estimator == "forward"
        # log(p / q) takes the place of log q, unless q itself is needed.
        self._q = log_q.exp() if is_forward else None
        self._ratio = torch.sub(log_p, log_q, out=log_q)
        self._p = log_p.exp_()
        self.divergence = (self._p * self._ratio).sum(dim=1)
        if penalty.estimator == "nll_difference":
            self.penalties = difference
        elif self._q is not None:
            self.penalties = -(self._q * self._ratio).sum(dim=1)
        else:
            self.penalties = self.divergence

    def slope(self, targets: torch.Tensor) -> torch.Tensor:
        """Return d (loss + beta · penalty) / d logits; consumes what the chunk holds."""
        beta, slope = self._settings.beta, self._p
        ones = torch.ones_like(targets, dtype=slope.dtype)
        if self._settings.estimator == "nll_difference":
            return slope.scatter_add_(1, targets, -ones).mul_(1 + beta)
        if self._q is not None:
            slope.mul_(1 + beta).sub_(self._q, alpha=beta)
        else:
            # p · (1 + beta · (log(p / q) - KL)), in place.
            factor = self._ratio.sub_(self.divergence[:, None]).mul_(beta).add_(1.0)
            slope.mul_(factor)
        return slope.scatter_add_(1, targets, -ones)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In fp32, in the logits' own memory where they are fp32 already."""
    logits = logits.float()
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True))


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
