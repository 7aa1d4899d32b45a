"""Three penalties relative to a reference: values and gradients as calculated by hand, in chunks of any
size."""

import math

import pytest
import torch
from torch.nn import functional

from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.objectives.linear_kl import ESTIMATORS, KlSums, Penalty, linear_kl

IDENTITY = torch.eye(2)
P, Q = [0.75, 0.25], [0.5, 0.5]
"""The model's distribution of one token over a vocabulary of two, and the reference's. The label is 0."""
FORWARD = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
REVERSE = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
NLL_DIFFERENCE = -math.log(0.75) + math.log(0.5)
BETA = 3.0

GRADIENTS = {
    # By hand: the gradient of the loss is p - onehot = (-1/4, 1/4).
    "nll_difference": (1 + BETA) * -0.25,
    "forward": -0.25 + BETA * (0.75 - 0.5),
    "reverse": -0.25 + BETA * 0.75 * (math.log(0.75 / 0.5) - REVERSE),
}
PENALTIES = {"nll_difference": NLL_DIFFERENCE, "forward": FORWARD, "reverse": REVERSE}


def sums_of_one_token(estimator: str) -> tuple[KlSums, torch.Tensor]:
    """With an identity for the heads, hidden states are logits."""
    hidden = torch.tensor([[P]]).log().requires_grad_()
    reference = (torch.tensor([[Q]]).log(), IDENTITY)
    sums = linear_kl(
        hidden,
        IDENTITY,
        reference,
        torch.tensor([[0]]),
        penalty=Penalty(estimator, BETA),
        chunk_tokens=4,
    )
    return sums, hidden


@pytest.mark.acceptance("8d-10c:two_stage_kl", "number-T-62", "number-T-63", "number-5e-1")
@pytest.mark.capability("T-62", "T-63")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_token_matches_the_manual_calculation(estimator: str) -> None:
    sums, hidden = sums_of_one_token(estimator)
    assert sums.policy.item() == pytest.approx(-math.log(0.75), abs=1e-6)
    assert sums.reference.item() == pytest.approx(math.log(2), abs=1e-6)
    assert sums.penalty.item() == pytest.approx(PENALTIES[estimator], abs=1e-6)
    assert sums.divergence.item() == pytest.approx(REVERSE, abs=1e-6)
    total = -math.log(0.75) + BETA * PENALTIES[estimator]
    assert sums.total.item() == pytest.approx(total, abs=1e-6)

    sums.total.backward()
    assert hidden.grad is not None
    first = GRADIENTS[estimator]
    assert hidden.grad.flatten().tolist() == pytest.approx([first, -first], abs=1e-6)


def batch(
    *, vocabulary: int = 13, width: int = 5, tokens: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and a head of the model and of the reference, and labels of which some are none."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, weight = draw(2, tokens, width), draw(vocabulary, width)
    other, its_weight = draw(2, tokens, width + 2), draw(vocabulary, width + 2)
    labels = torch.randint(0, vocabulary, (2, tokens), generator=generator)
    labels[0, 3:5] = labels[1, -4:] = IGNORE_INDEX
    return hidden, weight, other, its_weight, labels


def plainly(estimator: str, beta: float) -> tuple[KlSums, torch.Tensor, torch.Tensor]:
    """Return the same sums of all logits at the same time, with autograd's gradients."""
    hidden, weight, other, its_weight, labels = batch()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = functional.linear(hidden, weight).log_softmax(-1)
    log_q = functional.linear(other.double(), its_weight.double()).log_softmax(-1)
    is_asked = labels != IGNORE_INDEX
    columns = labels.where(is_asked, 0)[..., None]
    policy, reference = (
        -one.gather(-1, columns)[..., 0][is_asked] for one in (log_p, log_q)
    )
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)[is_asked].sum()
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)[is_asked].sum()
    penalty = {
        "nll_difference": policy.sum() - reference.sum(),
        "forward": forward,
        "reverse": reverse,
    }[estimator]
    total = policy.sum() + beta * penalty
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    sums = KlSums(total, policy.sum(), reference.sum(), penalty, reverse)
    return sums, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 4, 22, 1000])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_chunks_of_any_size_give_the_sums_and_gradients_of_all_logits(
    estimator: str, chunk_tokens: int
) -> None:
    expected, grad_hidden, grad_weight = plainly(estimator, 0.7)
    hidden, weight, other, its_weight, labels = batch()
    hidden.requires_grad_(), weight.requires_grad_()
    sums = linear_kl(
        hidden,
        weight,
        (other, its_weight),
        labels,
        penalty=Penalty(estimator, 0.7),
        chunk_tokens=chunk_tokens,
    )
    # Scaled from above, as the step does it.
    (2.0 * sums.total).backward()
    for one, other_one in zip(sums, expected, strict=True):
        assert one.item() == pytest.approx(other_one.item(), rel=2e-5)
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad, 2 * grad_hidden.float(), rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(weight.grad, 2 * grad_weight.float(), rtol=2e-4, atol=2e-5)


@pytest.mark.acceptance("8d-10d:two_stage_kl", "number-5e-1")
@pytest.mark.capability("T-62")
def test_the_published_penalty_only_scales_the_gradient_of_the_loss() -> None:
    """This is why it is not a divergence: its gradient contains nothing of the reference."""
    slopes = {}
    for beta in (0.0, 3.0):
        hidden, weight, other, its_weight, labels = batch()
        hidden.requires_grad_()
        linear_kl(
            hidden,
            weight,
            (other, its_weight),
            labels,
            penalty=Penalty("nll_difference", beta),
            chunk_tokens=6,
        ).total.backward()
        slopes[beta] = hidden.grad
    torch.testing.assert_close(slopes[3.0], 4.0 * slopes[0.0])


@pytest.mark.acceptance("8d-10e:two_stage_kl")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_model_that_equals_its_reference_has_no_penalty(estimator: str) -> None:
    hidden, weight, _, _, labels = batch()
    hidden.requires_grad_()
    sums = linear_kl(
        hidden,
        weight,
        (hidden.detach(), weight),
        labels,
        penalty=Penalty(estimator, 5.0),
        chunk_tokens=6,
    )
    assert sums.penalty.item() == sums.divergence.item() == 0.0
    assert sums.total.item() == sums.policy.item() == sums.reference.item()


def test_tokens_without_a_label_count_nothing_for_any_value() -> None:
    hidden, weight, other, its_weight, labels = batch()
    arguments = {"penalty": Penalty("reverse", 0.5), "chunk_tokens": 6}
    expected = linear_kl(hidden, weight, (other, its_weight), labels, **arguments)
    spoiled = hidden.masked_fill((labels == IGNORE_INDEX)[..., None], 77.0).requires_grad_()
    sums = linear_kl(spoiled, weight, (other, its_weight), labels, **arguments)
    assert [one.item() for one in sums] == [one.item() for one in expected]
    sums.total.backward()
    assert spoiled.grad is not None
    assert (spoiled.grad[labels == IGNORE_INDEX] == 0).all()


def test_the_reference_gets_no_gradient() -> None:
    hidden, weight, other, its_weight, labels = batch()
    for one in (hidden, other, its_weight):
        one.requires_grad_()
    linear_kl(
        hidden,
        weight,
        (other, its_weight),
        labels,
        penalty=Penalty("forward", 1.0),
        chunk_tokens=6,
    ).total.backward()
    assert other.grad is None and its_weight.grad is None and hidden.grad is not None


def test_an_unknown_estimator_is_refused() -> None:
    hidden, weight, other, its_weight, labels = batch()
    with pytest.raises(ValueError, match="none of nll_difference, forward, reverse"):
        linear_kl(
            hidden,
            weight,
            (other, its_weight),
            labels,
            penalty=Penalty("jensen", 1.0),
            chunk_tokens=6,
        )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_logits_exist_for_one_chunk_of_tokens_at_a_time(estimator: str) -> None:
    """The maximum of allocated memory does not grow with the tokens: counted, not timed."""
    tokens, vocabulary, width, chunk = 4096, 1024, 4, 64
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, tokens, width), generator=generator, requires_grad=True)
    weight = torch.randn((vocabulary, width), generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.untyped_storage().nbytes())
            return out

    with Watch():
        sums = linear_kl(
            hidden,
            weight,
            (hidden.detach() * 0.9, weight.detach()),
            labels,
            penalty=Penalty(estimator, 0.1),
            chunk_tokens=chunk,
        )
        sums.total.backward()
    assert largest <= 4 * chunk * vocabulary < 4 * tokens * vocabulary
