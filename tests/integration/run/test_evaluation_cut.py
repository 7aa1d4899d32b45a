"""Interrupted evaluations of a run continue at the same place, and give the same bits."""

import json
import signal
from typing import Any

import pytest
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    Experiment,
    checkpoints,
    fault,
    read_lines,
    recipe,
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


def evaluated(experiment: Experiment, directory: str) -> list[Any]:
    rows = read_lines(experiment.at(directory) / "evaluation.jsonl")
    return [(row["step"], row["name"], row["loss"], row["tokens"]) for row in rows]


@pytest.mark.acceptance("8d-2c:pretrain", "8d-3c")
@pytest.mark.capability("O-18", "O-48")
def test_a_kill_during_an_evaluation_costs_no_step_with_save_first(
    experiment: Experiment,
) -> None:
    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    best = {"metric": "other/loss"}
    changes: dict[str, Any] = {"checkpoint": {"every": {"steps": 100}, "best": best}}
    evaluation = {**EVALUATED["evaluation"], "every": {"steps": 4}, "saveFirst": True}
    experiment.write(recipe(**{**EVALUATED, "evaluation": evaluation}, **changes))
    experiment.run(directory="undisturbed")
    # The checkpoint is published before the batch: a kill does not wait for a save under way.
    held = fault("batch", call=9, action="hold")
    run = experiment.start(faults=[held])
    wait_until(lambda: checkpoints(experiment.at()) == [4])
    run.send(signal.SIGKILL)
    run.wait()
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9)), "no step was trained again"
    assert evaluated(experiment, "tiny") == evaluated(experiment, "undisturbed")
    for directory in ("tiny", "undisturbed"):
        pointer = experiment.at(directory) / "checkpoints" / "best.json"
        assert json.loads(pointer.read_text())["step"] == 8, "the loss of this run falls"


@pytest.mark.acceptance("8d-3a:pretrain")
@pytest.mark.capability("O-17", "O-18", "O-44", "O-68")
@pytest.mark.parametrize(("workers", "resumed"), [(1, 1), (2, 1), (1, 2)])
def test_an_evaluation_interrupted_by_a_stop_resumes_midway_after_the_resume(
    experiment: Experiment, workers: int, resumed: int
) -> None:
    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    experiment.write(recipe(**EVALUATED))
    experiment.run("--workers", str(workers), directory="undisturbed")
    sizes = experiment.command("evaluate", "runs/undisturbed", "--json").expect(DONE)
    batches = {row["name"]: row["batches"] for row in json.loads(sizes.out)["results"]}
    # In the first of the two sets of the evaluation after step 2.
    cut = [fault("batch", call=16 // workers - 1, action="SIGTERM")]
    experiment.run("--workers", str(workers), expect=STOPPED_SAVED, faults=cut)
    assert evaluated(experiment, "tiny") == []

    manifest = experiment.at() / "checkpoints" / "step-2" / "manifest.json"
    ((name, tally),) = json.loads(manifest.read_text())["extra"]["tallies"].items()
    assert tally["done"] == 16 < batches[name]

    # The run would stop before the third step if batches were measured again: this rank reads its part of the
    # remaining batches, and the two exchanges of the others would be additional.
    left = {**batches, name: batches[name] - tally["done"]}
    calls = sum(-(-number // resumed) for number in left.values())
    experiment.run(
        "--workers", str(resumed), "--stop-after-steps", "1", expect=STOPPED_SAVED,
        faults=[fault("batch", call=calls + 1, action="SIGTERM")],
    )  # fmt: skip
    assert steps_of(experiment.at()) == [1, 2, 3]
    first = [row for row in evaluated(experiment, "undisturbed") if row[0] == 2]
    assert evaluated(experiment, "tiny") == first and len(first) == 2
    experiment.run("--workers", str(resumed))
    assert [row[0] for row in evaluated(experiment, "tiny")] == [2, 2, 4, 4, 6, 6, 8, 8]
    if workers == resumed:
        assert evaluated(experiment, "tiny") == evaluated(experiment, "undisturbed")


@pytest.mark.acceptance("8d-3a:pretrain")
@pytest.mark.capability("O-18", "O-68")
def test_an_evaluation_that_is_interrupted_at_each_start_ends_eventually(
    experiment: Experiment,
) -> None:
    """Also where its step was saved before it, and at a start that only evaluates."""
    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    evaluation = {**EVALUATED["evaluation"], "every": {"steps": 4}, "saveFirst": True}
    changes: dict[str, Any] = {"checkpoint": {"every": {"steps": 100}}}
    experiment.write(recipe(**{**EVALUATED, "evaluation": evaluation}, **changes))
    experiment.run(directory="undisturbed")
    measured = []
    for _ in range(3):
        cut = [fault("batch", call=9, action="SIGTERM")]
        experiment.run(expect=STOPPED_SAVED, faults=cut)
        newest = json.loads((experiment.at() / "checkpoints" / "latest").read_text())
        manifest = experiment.at() / "checkpoints" / newest["checkpoint"] / "manifest.json"
        tallies = json.loads(manifest.read_text())["extra"]["tallies"]
        measured.append(sum(tally["done"] for tally in tallies.values()))
    assert measured == sorted(set(measured)), "each start has measured more"
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9)), "no step was trained again"
    assert evaluated(experiment, "tiny") == evaluated(experiment, "undisturbed")
