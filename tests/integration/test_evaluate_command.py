"""``evergrad evaluate``: the same bits as the run's own evaluation, cut and resumed, beside a living run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    Ended,
    Experiment,
    checkpoints,
    fault,
    read_lines,
    recipe,
    start_command,
    steps_of,
    wait_until,
    write_documents,
)

EVALUATED: dict[str, Any] = {
    "data": {"heldOut": {"count": 6}},
    "evaluation": {
        "every": {"steps": 2},
        "sources": [{"name": "other", "path": "other.jsonl"}],
    },
}


def write(experiment: Experiment, **changes: Any) -> None:
    """The manifest of a run with two evaluation sets, one of them of hundreds of batches."""
    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    experiment.write(recipe(**EVALUATED, **changes))


def own_rows(directory: Path) -> list[tuple[int, str, float, int]]:
    """What the run itself has measured."""
    rows = read_lines(directory / "evaluation.jsonl")
    return sorted((row["step"], row["name"], row["loss"], row["tokens"]) for row in rows)


def found_rows(results: list[dict[str, Any]]) -> list[tuple[int, str, float, int]]:
    return sorted((row["step"], row["name"], row["loss"], row["tokens"]) for row in results)


def results_of(ended: Ended) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(ended.expect(DONE).out)["results"]
    return results


@pytest.mark.capability("O-39", "C-22", "O-80")
def test_a_finished_run_is_evaluated_with_the_bits_of_its_own_evaluation(
    experiment: Experiment,
) -> None:
    write(experiment)
    experiment.run()
    results = results_of(experiment.command("evaluate", "runs/tiny", "--json"))
    own = [row for row in own_rows(experiment.at()) if row[0] == 8]
    assert found_rows(results) == own and len(own) == 2
    assert [row["is_new"] for row in results] == [True, True]

    # Found the second time, and not written over.
    files = [experiment.path / row["file"] for row in results]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = results_of(
        start_command(
            ["evaluate", "runs/tiny", "--json", "--checkpoint", "8", "--set", "other"],
            cwd=experiment.path,
            faults=[fault("batch", call=1, action="SIGKILL")],
        ).wait()
    )
    assert [(row["name"], row["is_new"]) for row in again] == [("other", False)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_evaluation_that_a_stop_cuts_goes_on_in_the_middle(experiment: Experiment) -> None:
    write(experiment)
    experiment.run()

    def evaluate(*faults: Any) -> Ended:
        return start_command(
            ["evaluate", "runs/tiny", "--set", "other", "--json"],
            cwd=experiment.path,
            faults=faults,
        ).wait()

    evaluate(fault("batch", call=10, action="SIGTERM")).expect(STOPPED_SAVED)
    (cut,) = (experiment.at() / "evaluations" / ".cut").iterdir()
    assert json.loads(cut.read_text())["done"] == 12
    # Killed, if what was measured were measured again: there are as many batches as samples.
    lefts = int(json.loads(cut.read_text())["done"])
    (row,) = results_of(evaluate(fault("batch", call=10**6, action="SIGKILL")))
    assert row["batches"] > lefts and not cut.exists()
    assert found_rows([row]) == [
        one for one in own_rows(experiment.at()) if one[:2] == (8, "other")
    ]


def test_watch_evaluates_each_checkpoint_of_a_living_run_through_a_kill(
    experiment: Experiment,
) -> None:
    write(experiment, checkpoint={"every": {"steps": 2}, "keep": 50})
    # Rank 0 stands still before step 6 until its first checkpoints were evaluated and its peer was killed.
    run = experiment.start(
        "--workers", "2", faults=[fault("step", call=6, action="hold", rank=0)]
    )
    wait_until(lambda: checkpoints(experiment.at()))
    watching = start_command(
        ["evaluate", "runs/tiny", "--watch", "--json"], cwd=experiment.path
    )
    folder = experiment.at() / "evaluations"
    wait_until(lambda: folder.is_dir() and len(list(folder.glob("step-4.*"))) == 2)
    assert not (experiment.at() / "complete.json").exists()
    os.kill(run.workers()[1], signal.SIGKILL)
    (experiment.path / "go-on").touch()
    run.wait().expect(DONE)

    ended = watching.wait().expect(DONE)
    results = [json.loads(line) for line in ended.out.splitlines()]
    assert steps_of(experiment.at())[-1] == 8
    assert found_rows(results) == own_rows(experiment.at())
    assert list((experiment.at() / "checkpoints" / "leases").iterdir()) == []
