"""The loss of predicted states, and the metrics that show a collapse, compared with manual calculations."""

import math
import resource
from typing import Any

import pytest
import torch

from evergrad_latent_edit.loss import (
    RIDGE,
    gaussian_kl,
    measure_spread,
    prediction_losses,
)
from evergrad_manifest.training import Monitor
from evergrad_trainer.observers.watches import Watch, rule_of

PREDICTED = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
TARGET = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]])
ALL = torch.ones(2, 1, dtype=torch.bool)


@pytest.mark.acceptance("8d-11a:latent_edit", "number-G-79")
@pytest.mark.capability("G-79")
def test_the_loss_is_alpha_times_the_angle_plus_beta_times_the_distance() -> None:
    losses = prediction_losses(PREDICTED, TARGET, ALL, alpha=1.0, beta=0.1)
    # The second: a cosine of 1/√2, and a squared distance of 1 over two dimensions.
    assert losses.flatten().tolist() == pytest.approx([0.0, 1 - 1 / math.sqrt(2) + 0.05])
    only = prediction_losses(PREDICTED, TARGET, ALL, alpha=0.0, beta=2.0)
    assert only.flatten().tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.acceptance("number-G-79")
@pytest.mark.capability("G-79")
def test_masked_positions_add_nothing_to_the_loss() -> None:
    mask = torch.tensor([[True], [False]])
    losses = prediction_losses(PREDICTED, TARGET, mask, alpha=1.0, beta=0.1)
    assert losses.sum().item() == 0.0


@pytest.mark.acceptance("8d-11b:latent_edit", "number-G-84")
@pytest.mark.capability("G-84")
def test_the_published_case_of_a_collapse_monitor_is_reproduced() -> None:
    spread = measure_spread(PREDICTED, TARGET, ALL)
    assert spread.cosine.item() == pytest.approx((1 + 1 / math.sqrt(2)) / 2)
    assert spread.squared_distance.item() == pytest.approx(0.5)
    assert spread.target_variance.item() == pytest.approx(0.125)
    assert spread.prediction_variance.item() == pytest.approx(0.25)
    assert spread.correlation.item() == pytest.approx(1 / math.sqrt(3))
    assert spread.pairwise_distance.item() == pytest.approx(math.sqrt(2))


@pytest.mark.capability("G-84")
def test_positions_without_an_edit_change_none_of_the_numbers() -> None:
    wide = [torch.cat([one, torch.full((2, 2, 2), 7.0)], 1) for one in (PREDICTED, TARGET)]
    mask = torch.tensor([[True, False, False]] * 2)
    one, other = measure_spread(PREDICTED, TARGET, ALL), measure_spread(*wide, mask)
    for name, value in vars(one).items():
        assert vars(other)[name].item() == pytest.approx(value.item(), abs=1e-12), name


@pytest.mark.capability("G-84")
def test_pairwise_distances_of_many_edits_do_not_store_all_differences() -> None:
    states = torch.randn(1024, 1, 512)
    mask = torch.ones(1024, 1, dtype=torch.bool)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spread = measure_spread(states, states, mask)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, "in KiB; the differences would be 4 GiB"
    # The distance of two vectors of 512 standard normal numbers is nearly √(2 · 512).
    assert spread.pairwise_distance.item() == pytest.approx(32, rel=0.01)


@pytest.mark.acceptance("number-G-80")
@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # Mean 0 and variance 1 by N, as the standard Gaussian.
        ([[1.0], [-1.0]], 0.5 * (0 + 1 - math.log(1 + RIDGE) - 1)),
        # Mean 3: nine more, halved.
        ([[2.0], [4.0]], 0.5 * (9 + 1 - math.log(1 + RIDGE) - 1)),
        # Two states of three dimensions: one direction with a variance of 2, two without any.
        (
            [[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]],
            0.5 * (0 + 2 - math.log(2 + RIDGE) - 2 * math.log(RIDGE) - 3),
        ),
    ],
)
@pytest.mark.capability("G-80")
def test_the_regulariser_matches_that_of_two_gaussians(
    states: list[list[float]], expected: float
) -> None:
    values = torch.tensor(states)
    mask = torch.ones(len(values), dtype=torch.bool)
    assert gaussian_kl(values, mask).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # A row with weight 0 changes nothing, whichever product is smaller.
    padded = torch.cat([values, torch.full((3, values.shape[1]), 5.0)])
    mask = torch.arange(len(padded)) < len(values)
    assert gaussian_kl(padded, mask).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def watches() -> list[Watch]:
    """The three alerts of GenoLeWM, as monitors of a file."""
    rows: list[dict[str, Any]] = [
        {"type": "collapse", "metric": "prediction_variance", "of": "target_variance"},
        {"type": "collapse", "metric": "pairwise_distance"},
        {"type": "divergence", "metric": "gaussian_kl", "limit": 10, "window": 1},
    ]
    return [Watch(rule_of(Monitor.model_validate(row))) for row in rows]


@pytest.mark.acceptance("8d-11c:latent_edit", "number-G-85", "number-G-86")
@pytest.mark.capability("G-83", "G-85")
@pytest.mark.parametrize("batches", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_healthy_batches_raise_no_alert_and_a_collapsed_batch_raises_all_alerts(
    batches: int,
) -> None:
    torch.manual_seed(3)
    # Far more states than dimensions, so that a covariance has no direction without spread.
    mask = torch.ones(32, 1, dtype=torch.bool)
    own = watches()
    for step in range(1, batches + 1):
        target = torch.randn(32, 1, 2)
        spread = measure_spread(target + 0.1 * torch.randn(32, 1, 2), target, mask)
        measured = {name: value.item() for name, value in vars(spread).items()}
        assert [watch.look(step, measured) for watch in own] == [None, None, None]
    target = torch.randn(32, 1, 2)
    measured = {
        name: value.item()
        for name, value in vars(
            measure_spread(target.mean(0, keepdim=True).expand(32, 1, 2), 40 * target, mask)
        ).items()
    }
    alerts = [watch.look(batches + 1, measured) for watch in own]
    assert [alert.rule.metric for alert in alerts if alert is not None] == [
        "prediction_variance",
        "pairwise_distance",
        "gaussian_kl",
    ]
