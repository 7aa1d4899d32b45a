"""Reading the values of a report: a number, or a reason if it is not a number, and never an error."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from evergrad.report_values import read_values
from evergrad_common.codec import encode
from evergrad_coordinator.protocol import Boundary, EvaluationReport, Progress
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.torchrun.agent_reports import WorkerReports

NAN, INF = float("nan"), float("inf")


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("not even that")


ODD: list[Any] = [
    NAN, INF, -INF, torch.zeros(3), torch.tensor(NAN), torch.empty(1, device="meta"), np.float32("inf"), np.zeros((2, 2)),
    10**400, 1j, "0.5", b"1", True, [1.0], {"loss": 1.0}, object(), Hostile(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (2, 2.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.tensor(3), 3.0),
        (np.float32(0.5), 0.5),
        (np.array([[0.5]]), 0.5),
        (Decimal("0.5"), 0.5),
        (10**30, 1e30),
    ],
    ids=str,
)
def test_any_value_with_one_finite_number_is_converted_to_it(
    value: Any, number: float
) -> None:
    assert read_values({"loss": value}) == ({"loss": number}, {})


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_any_other_value_is_omitted_with_its_reason_without_affecting_others(
    value: Any,
) -> None:
    found, left_out = read_values({"step": 3, "loss": value, "tokens_per_second": 7.0})
    assert found == {"step": 3, "tokens_per_second": 7.0}
    assert left_out.keys() == {"loss"}
    assert left_out["loss"].startswith("loss: ") and len(left_out["loss"]) < 200


@pytest.mark.parametrize(
    "value", [*ODD, 2.5, 10**30, -2], ids=lambda value: type(value).__name__
)
def test_a_step_is_a_whole_number_within_the_bounds_of_the_coordinator(value: Any) -> None:
    assert read_values({"step": value, "loss": 1.0}) == (
        {"loss": 1.0},
        {"step": read_values({"step": value})[1]["step"]},
    )


def test_a_whole_number_may_be_a_float_or_a_tensor() -> None:
    values = {
        "step": torch.tensor(4),
        "total_steps": 8.0,
        "checkpoint_step": np.int64(-1),
        "loss": None,
    }
    assert read_values(values) == ({"step": 4, "total_steps": 8, "checkpoint_step": -1}, {})


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_no_value_gives_a_message_that_cannot_be_sent(value: Any) -> None:
    odd = dict.fromkeys(
        ("step", "total_steps", "loss", "tokens_per_second", "checkpoint_step"), value
    )
    metrics, reports = NodeMetrics("r", "0"), WorkerReports()
    reports.begin(3)
    good = {"generation": 3, "rank": 0, "step": 5, "loss": 0.5, "checkpoint_step": 4}
    for report in (good, {**good, **odd}, {**good, "step": 6}):
        for message in (
            metrics.report(report),
            *reports.take(report, now=1.0),
            *reports.flush(now=1.0),
        ):
            assert message is not None
            encode(message)
    progress = metrics.progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.checkpoint_step) == (6, 0.5, 4)


def test_a_report_without_a_readable_step_keeps_its_other_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = NodeMetrics("r", "0")
    assert metrics.report({"generation": 3, "step": "five", "loss": 0.5}) is None
    metrics.report({"generation": 3, "step": 5})
    after = metrics.report({"generation": 3, "step": NAN, "loss": 0.25})
    assert after is not None and (after.step, after.loss) == (5, 0.25)
    assert len([one for one in caplog.records if "step" in one.getMessage()]) == 1, (
        "one warning for each name"
    )


def test_a_torchrun_agent_reports_a_checkpoint_next_to_a_non_finite_loss() -> None:
    reports = WorkerReports()
    reports.begin(3)
    said = reports.take(
        {"generation": 3, "rank": 0, "step": 9, "loss": NAN, "checkpoint_step": 8}, now=1.0
    )
    assert said == [Progress(3, step=9, checkpoint_step=8), Boundary(3, 8)]


def step_record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "generation": 3, "step": step, "loss": 0.5, "tokens": 10, "step_seconds": 0.1, "time": 5.0 + step, "learning_rate": 0.25,
        "grad_norm": INF, **more,
    }  # fmt: skip


def test_progress_contains_the_finite_numbers_of_the_recipe() -> None:
    metrics = NodeMetrics("r", "0")
    metrics.tell("step_end", step_record(5, metrics={"kl": 0.125, "other": NAN}))
    assert metrics.progress is not None
    assert metrics.progress.values == {"learning_rate": 0.25, "kl": 0.125}
    encode(metrics.progress)


def test_an_evaluation_is_reported_at_once_and_again_with_every_step() -> None:
    metrics = NodeMetrics("r", "0")
    metrics.tell("step_end", step_record(5))
    metrics.tell(
        "evaluation_end",
        {"name": "held out", "step": 5, "loss": 2.0, "metrics": {"exact": 0.5, "odd": NAN}},
    )
    told = {"held out": EvaluationReport(5, {"loss": 2.0, "exact": 0.5})}
    assert metrics.progress is not None and metrics.progress.evaluations == told
    metrics.tell("step_end", step_record(6))
    assert (metrics.progress.step, metrics.progress.evaluations) == (6, told)


def test_any_number_of_evaluations_fits_into_a_message() -> None:
    metrics = NodeMetrics("r", "0")
    metrics.tell("step_end", step_record(5))
    for number in range(100):
        name = f"{'ä' * 61}{number:03d}" if number % 2 else "x" * 100 + str(number)
        values = {f"{'m' * 60}{other:03d}": 1.2345678901234567e-300 for other in range(40)}
        metrics.tell(
            "evaluation_end", {"name": name, "step": 5, "loss": 2.0, "metrics": values}
        )
    assert metrics.progress is not None and len(metrics.progress.evaluations) == 16
    metrics.tell(
        "step_end",
        step_record(
            6, metrics={f"{'m' * 60}{number:03d}": 1e-300 / 3 for number in range(32)}
        ),
    )
    encode(metrics.progress)


def test_failed_and_successful_saves_are_part_of_the_progress() -> None:
    metrics = NodeMetrics("r", "0")
    step = {
        "step": 3,
        "generation": 1,
        "loss": 1.0,
        "tokens": 8,
        "step_seconds": 0.1,
        "time": 3.0,
    }
    metrics.tell("step_end", step)
    assert metrics.progress is not None and metrics.progress.failed_saves is None
    event = {"type": "save_failed", "step": 3, "generation": 1, "time": 1.0}
    fields = {"reason": "rank 0: full", "trouble": "no_space", "failures": 2}
    metrics.tell("event", event | fields | {"blocking_seconds": 0.1})
    assert (metrics.progress.failed_saves, metrics.progress.save_trouble) == (2, "no_space")
    assert metrics.progress.save_message == "rank 0: full"
    metrics.tell("step_end", step | {"step": 4})
    assert metrics.progress.failed_saves == 2
    saved = {"type": "save", "step": 4, "generation": 1, "time": 1.0}
    metrics.tell("event", saved | {"checkpoint": "step-4", "blocking_seconds": 0.1})
    assert (metrics.progress.failed_saves, metrics.progress.checkpoint_step) == (0, 4)
