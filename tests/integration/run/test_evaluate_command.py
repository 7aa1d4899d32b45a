"""``evergrad evaluate``: the same bits as the run's own evaluation, interrupted and resumed, and during a
run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    USER_ERROR,
    Ended,
    Experiment,
    Started,
    checkpoints,
    fault,
    read_lines,
    recipe,
    start_command,
    steps_of,
    wait_until,
    write_documents,
)

from evergrad_common.evaluation_report import Evaluated, decode_evaluated

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


@pytest.fixture(scope="module")
def trained(make_experiment: Callable[[], Experiment]) -> Experiment:
    """A complete run, of which tests evaluate copies."""
    one = make_experiment()
    write(one)
    one.run()
    return one


@pytest.fixture
def finished(trained: Experiment, request: pytest.FixtureRequest) -> Path:
    """A complete run of the test, in a separate directory next to the prepared data."""
    return Path(shutil.copytree(trained.at(), trained.at(request.node.name)))


def own_rows(directory: Path) -> list[tuple[int, str, float, int]]:
    """Return the run's own evaluations."""
    rows = read_lines(directory / "evaluation.jsonl")
    return sorted((row["step"], row["name"], row["loss"], row["tokens"]) for row in rows)


def found_rows(results: list[dict[str, Any]]) -> list[tuple[int, str, float, int]]:
    return sorted((row["step"], row["name"], row["loss"], row["tokens"]) for row in results)


def results_of(ended: Ended) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(ended.expect(DONE).out)["results"]
    return results


@pytest.mark.acceptance("8d-6a:pretrain")
@pytest.mark.capability("O-39", "C-22", "C-27", "C-34", "C-44", "O-69", "O-80")
def test_a_second_evaluation_of_a_finished_run_is_bit_equal_to_its_own(
    trained: Experiment, finished: Path
) -> None:
    run = f"runs/{finished.name}"
    ended = trained.command("evaluate", run, "--json", "--compare", "--tolerance", "0")
    # The reloaded weights give the loss that the live ones gave when they were saved.
    assert {
        (one["name"], one["is_equal"])
        for one in json.loads(ended.expect(DONE).out)["comparison"]
    } == {
        ("heldOut", True),
        ("other", True),
    }
    results = results_of(trained.command("evaluate", run, "--json"))
    own = [row for row in own_rows(finished) if row[0] == 8]
    assert found_rows(results) == own and len(own) == 2
    assert [row["is_new"] for row in results] == [True, True]
    assert all(row["seconds_per_batch"] > 0 for row in results)
    assert all(
        row["seconds_per_batch"] == row["seconds"] / row["batches"] for row in results
    )

    # Found the second time, and not written over.
    files = [trained.path / row["file"] for row in results]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = results_of(
        start_command(
            ["evaluate", run, "--json", "--checkpoint", "8", "--set", "other"],
            cwd=trained.path,
            faults=[fault("batch", call=1, action="SIGKILL")],
        ).wait()
    )
    assert [(row["name"], row["is_new"]) for row in again] == [("other", False)]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_evaluation_interrupted_by_a_stop_resumes_midway(
    trained: Experiment, finished: Path
) -> None:
    run = f"runs/{finished.name}"

    def evaluate(*faults: Any) -> Ended:
        return start_command(
            ["evaluate", run, "--set", "other", "--json"],
            cwd=trained.path,
            faults=faults,
        ).wait()

    # The number of batches, from another checkpoint of the same size.
    step_6 = trained.command(
        "evaluate", run, "--set", "other", "--json", "--checkpoint", "6"
    )
    num_batches = results_of(step_6)[0]["batches"]
    evaluate(fault("batch", call=10, action="SIGTERM")).expect(STOPPED_SAVED)
    (cut,) = (finished / "evaluations" / ".cut").iterdir()
    assert json.loads(cut.read_text())["done"] == 12
    # Killed if measured batches were measured again: one batch more than remain.
    left = num_batches - 12
    (row,) = results_of(evaluate(fault("batch", call=left + 1, action="SIGKILL")))
    assert row["batches"] == num_batches and not cut.exists()
    assert found_rows([row]) == [
        one for one in own_rows(finished) if one[:2] == (8, "other")
    ]


def test_watch_evaluates_each_checkpoint_of_a_training_run_despite_a_kill(
    experiment: Experiment,
) -> None:
    write(experiment, checkpoint={"every": {"steps": 2}, "keep": 50})
    # Rank 0 pauses before step 6 until its first checkpoints were evaluated and its peer was killed.
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
    # If the replaced worker joins after the last step, that step has a checkpoint of each generation.
    assert sorted(set(found_rows(results))) == own_rows(experiment.at())
    assert len({(row["checkpoint"], row["name"]) for row in results}) == len(results)
    assert list((experiment.at() / "checkpoints" / "leases").iterdir()) == []


@pytest.mark.long
def test_a_stopped_watch_resumes_where_it_ended(experiment: Experiment) -> None:
    write(experiment, checkpoint={"every": {"steps": 4}, "keep": 50})
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    folder = experiment.at() / "evaluations"

    def watch(*faults: Any) -> Started:
        return start_command(
            ["evaluate", "runs/tiny", "--watch", "--set", "other"],
            cwd=experiment.path,
            faults=faults,
        )

    # In the middle of a set; then while it waits for a checkpoint that is never saved.
    watch(fault("batch", call=5, action="SIGTERM")).wait().expect(STOPPED_SAVED)
    assert list(folder.glob("*.json")) == []
    waiting = watch()
    wait_until(lambda: list(folder.glob("*.json")))
    waiting.send(signal.SIGTERM)
    waiting.wait().expect(STOPPED_SAVED)

    experiment.run()
    ended = watch().wait().expect(DONE)
    assert [line.split()[:2] for line in ended.out.splitlines()] == [
        ["step=4", "set=other"],
        ["step=8", "set=other"],
    ]


@pytest.mark.capability("O-39")
def test_a_sharded_checkpoint_of_two_processes_is_evaluated_in_one(
    experiment: Experiment,
) -> None:
    write(experiment, runtime={"parallelism": "fsdp2"})
    experiment.run("--workers", "2")
    shards = list((experiment.at() / "checkpoints" / "step-8").glob("rank-*.bin"))
    assert len(shards) == 2
    results = results_of(experiment.command("evaluate", "runs/tiny", "--json"))
    own = [row for row in own_rows(experiment.at()) if row[0] == 8]
    for found, measured in zip(found_rows(results), own, strict=True):
        assert found[:2] == measured[:2] and found[3] == measured[3]
        assert found[2] == pytest.approx(measured[2], rel=1e-6)


@pytest.mark.acceptance("8d-6d")
def test_an_elastic_run_is_evaluated_although_its_prepared_data_was_deleted(
    experiment: Experiment,
) -> None:
    write(experiment)
    experiment.run("--nodes", "2")
    own = [row for row in own_rows(experiment.at()) if row[0] == 8]
    results = results_of(experiment.command("evaluate", "runs/tiny", "--json"))
    assert found_rows(results) == own

    shutil.rmtree(experiment.path / "runs" / ".prepared")
    shutil.rmtree(experiment.at() / "evaluations")
    again = results_of(experiment.command("evaluate", "runs/tiny", "--json"))
    assert found_rows(again) == own and [row["is_new"] for row in again] == [True, True]


def test_results_are_in_the_report(trained: Experiment, finished: Path) -> None:
    run = f"runs/{finished.name}"
    trained.command("evaluate", run, "--checkpoint", "3").expect(DONE)
    arguments = [
        str(Path(sys.executable).with_name("evergrad")),
        "report",
        run,
        "--json",
    ]
    report = subprocess.run(
        arguments,
        cwd=trained.path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    results = json.loads(report.stdout)["results"]
    assert [(row["step"], row["name"]) for row in results] == [(3, "heldOut"), (3, "other")]
    text = (finished / "report.md").read_text()
    assert "## Evaluated beside the run" in text
    assert "Evaluated beside the run" in (finished / "report.html").read_text()


@pytest.mark.capability("C-2")
def test_a_pod_writes_the_results_of_its_checkpoint_and_the_waiting_steps(
    trained: Experiment, finished: Path, tmp_path: Path
) -> None:
    run, log = f"runs/{finished.name}", tmp_path / "termination-log"

    def pod(step: int) -> Evaluated:
        arguments = ("--checkpoint", str(step), "--termination-log", str(log))
        trained.command("evaluate", run, *arguments).expect(DONE)
        report = decode_evaluated(log.read_text())
        assert report is not None
        return report

    steps = checkpoints(finished)
    report = pod(steps[0])
    assert (report.step, list(report.waiting)) == (steps[0], steps[1:])
    written = {
        row["name"]: row["loss"]
        for path in (finished / "evaluations").glob("*.json")
        if (row := json.loads(path.read_text()))["step"] == steps[0]
    }
    assert {name: float(one["loss"]) for name, one in report.results.items()} == written
    own = [(step, name, loss) for step, name, loss, _ in own_rows(finished)]
    for name, one in pod(steps[-1]).results.items():
        assert (steps[-1], name, float(one["loss"])) in own

    # A checkpoint that was removed is skipped with a message.
    gone = pod(999)
    assert not gone.results and "contains no checkpoint of step 999" in gone.passed_over


def test_a_comparison_reads_the_weights_although_the_checkpoint_was_evaluated_before(
    trained: Experiment, finished: Path
) -> None:
    run = f"runs/{finished.name}"
    stored = results_of(trained.command("evaluate", run, "--json", "--checkpoint", "8"))
    compare = ("evaluate", run, "--checkpoint", "8", "--compare", "--json")
    again = trained.command(*compare)
    assert [row["is_new"] for row in results_of(again)] == [True, True]
    assert found_rows(json.loads(again.out)["results"]) == found_rows(stored)

    shard = finished / "checkpoints" / "step-8" / "rank-00000.bin"
    data = bytearray(shard.read_bytes())
    data[::3] = bytes(byte ^ 0x55 for byte in data[::3])
    shard.write_bytes(data)
    assert "checksum differs" in trained.command(*compare).expect(USER_ERROR).err
