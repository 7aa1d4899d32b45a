"""Whether a reloaded checkpoint gives what the run has measured: the verdicts."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.errors import InputError
from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.commands import evaluate
from evergrad_trainer.evaluation.comparison import compare_with_run
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.run.directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run that has measured the set heldOut at step 10, the second time with another loss, and the set
    broken without one."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    log = RunLog(found)
    measured = [("heldOut", 2, 9.0), ("heldOut", 2, 2.5), ("broken", 2, math.nan)]
    # A frozen process of generation 1 has written its result late.
    for name, generation, loss in (*measured, ("heldOut", 1, 8.0)):
        log.evaluation_end(
            EvaluationRecord(10, generation, name, loss, 12.0, 4096, 1.0, 1e9)
        )
    log.close()
    return found


def row(**changes: Any) -> dict[str, Any]:
    return {"name": "heldOut", "step": 10, "loss": 2.5, "tokens": 4096, **changes}


@pytest.mark.acceptance("number-C-44")
@pytest.mark.capability("C-44")
@pytest.mark.parametrize(
    ("changes", "tolerance", "verdict"),
    [
        ({}, 0.0, "as the run measured it, bit by bit"),
        ({"loss": 2.5 * (1 + 1e-7)}, 1e-5, "as the run measured it, within 1e-05 relative"),
        ({"loss": 2.5000001}, 0.0, "differs: 2.5000001 over 4,096 tokens, and the run"),
        ({"loss": 2.6}, 1e-5, "differs: 2.6 over 4,096 tokens, and the run measured 2.5"),
        (
            {"tokens": 4095},
            1e-5,
            "differs: 2.5 over 4,095 tokens, and the run measured 2.5 over",
        ),
        ({"loss": None}, 1e-5, "differs: None over"),
        ({"name": "broken", "loss": None}, 1e-5, "as the run measured it"),
        (
            {"name": "broken"},
            1e-5,
            "differs: 2.5 over 4,096 tokens, and the run measured nan",
        ),
        (
            {"step": 20},
            1e-5,
            "the run itself has not measured it at step 20; nothing to compare",
        ),
        ({"name": "wiki"}, 1e-5, "the run itself has not measured it at step 10"),
    ],
)
def test_each_result_has_a_verdict(
    directory: RunDirectory, changes: dict[str, Any], tolerance: float, verdict: str
) -> None:
    [one] = compare_with_run(directory, [row(**changes)], tolerance=tolerance)
    assert one.verdict.startswith(verdict)
    # A set that was not compared is not an agreement.
    assert one.is_equal == verdict.startswith("as the run measured it")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--watch"], "--watch; one checkpoint is compared"),
        (["--tolerance", "nan"], "--tolerance nan; one checkpoint is compared"),
        (
            ["--weights", "average"],
            "--weights; the weights are those that the run itself has",
        ),
    ],
)
def test_incomparable_runs_are_refused_before_anything_is_opened(
    tmp_path: Path, options: list[str], said: str
) -> None:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    args = parser.parse_args([str(tmp_path / "none"), "--compare", *options])
    with pytest.raises(InputError, match=f"--compare: cannot be combined with {said}"):
        evaluate.execute(args)
