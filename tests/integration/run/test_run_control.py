"""How a run is stopped, continues, ends and is extended; and which processes end together."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    STOPPED_UNSAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    events,
    fault,
    final_state,
    metric_rows,
    read_lines,
    recipe,
    steps_of,
    wait_until,
)

from bed.process_state import is_alive
from evergrad_manifest.identity import hashed_recipe
from evergrad_manifest.reading.loader import load_manifest

EVALUATED: dict[str, Any] = {
    "data": {
        "sources": [{"name": "docs", "path": "documents.jsonl"}],
        "sequenceLength": 16,
        "heldOut": {"count": 6},
    },
    "evaluation": {"every": {"steps": 2}, "samples": 6},
}
SLOW = fault("step", call=0, action="sleep", rank=None, seconds=0.05)


def evergrad(experiment: Experiment, *arguments: str) -> "subprocess.Popen[str]":
    """The real command, as a user starts it."""
    command = [str(Path(sys.executable).with_name("evergrad")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=experiment.path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def snapshot(directory: Path) -> dict[str, tuple[int, str]]:
    """Time of change and content of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    }


@pytest.mark.acceptance("8d-5e", "input-4e-19")
@pytest.mark.capability("O-52", "T-4", "O-X1")
def test_the_command_trains_a_manifest_to_its_report_and_then_does_nothing_more(
    experiment: Experiment,
) -> None:
    out, err = evergrad(experiment, "run", "tiny.yaml").communicate(timeout=PATIENCE)
    directory = experiment.at()
    assert "Traceback" not in err
    assert steps_of(directory) == list(range(1, 9)), err
    written = {path.name for path in directory.iterdir()}
    assert written >= {
        "run.json",
        "provenance.json",
        "metrics.jsonl",
        "events.jsonl",
        "complete.json",
        "report.html",
        "report.md",
    }
    assert json.loads((directory / "complete.json").read_text())["step"] == 8
    # Each checkpoint itself records the complete identity of its run.
    whole = hashed_recipe(load_manifest(experiment.path / "tiny.yaml").run)
    assert {
        "model",
        "tokenizer",
        "batching",
        "optimizer",
        "schedule",
        "data",
    } <= whole.keys()
    assert whole["optimizer"]["learningRate"] == 3e-3 and whole["schedule"]["type"] == "wsd"
    for step in (3, 6, 8):
        path = directory / "checkpoints" / f"step-{step}" / "manifest.json"
        held = json.loads(path.read_text("utf-8"))["extra"]["state"]["recipe"]
        assert held == json.loads(json.dumps(whole)), step
    shown = directory.relative_to(experiment.path)
    assert f"page: evergrad open {shown}\n" in out
    assert f"report: {shown}/report.html" in out

    before = snapshot(directory)
    again = experiment.run()
    assert f"tiny is complete: 8 steps, in {directory}. Nothing to do." in again.out
    assert "To train longer, raise the horizon and use --extend." in again.out
    assert snapshot(directory) == before


@pytest.mark.acceptance("8d-5d")
def test_the_command_stops_on_sigterm_with_its_state_saved(experiment: Experiment) -> None:
    experiment.write(recipe(horizon={"steps": 100_000}))
    process = evergrad(experiment, "run", "tiny.yaml")
    wait_until(lambda: steps_of(experiment.at()))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == STOPPED_SAVED, err
    last = steps_of(experiment.at())[-1]
    assert checkpoints(experiment.at())[-1] == last
    assert f"stop step={last} reason=signal saved=true" in out
    assert f"to go on behind step {last}: the same command\n" in out
    assert [event["exit_code"] for event in events(experiment.at(), "end")] == [
        STOPPED_SAVED
    ]


@pytest.mark.acceptance("input-G-12")
@pytest.mark.capability("G-12")
def test_the_command_refuses_an_invalid_manifest_before_anything_is_written(
    experiment: Experiment,
) -> None:
    manifest = experiment.write()
    manifest.write_text(
        manifest.read_text().replace('"sequenceLength"', '"sequenceLenght"')
    )
    process = evergrad(experiment, "run", "tiny.yaml")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == USER_ERROR
    assert "spec.training.data.sequenceLenght: unknown" in err and "sequenceLength" in err
    assert "Traceback" not in err
    assert not (experiment.path / "runs").exists()


@pytest.mark.acceptance("8d-5c", "input-4e-3")
@pytest.mark.capability("A-37", "G-5", "C-17", "O-9")
def test_a_stop_file_stops_the_run_and_is_removed_so_that_the_run_can_resume(
    experiment: Experiment,
) -> None:
    experiment.run(directory="undisturbed")
    experiment.at().mkdir(parents=True)
    (experiment.at() / "stop").touch()
    stopped = experiment.run(expect=STOPPED_SAVED)
    last = steps_of(experiment.at())[-1]
    assert f"to go on behind step {last}: the same command\n" in stopped.out
    assert steps_of(experiment.at()) == [1]
    assert checkpoints(experiment.at()) == [1]
    assert not (experiment.at() / "stop").exists()
    assert events(experiment.at(), "stop")[-1]["reason"] == "stop_file"
    experiment.run()
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())


@pytest.mark.acceptance("8d-17d", "input-4e-3")
@pytest.mark.capability("A-37")
def test_a_stop_file_created_while_two_processes_train_stops_both(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(horizon={"steps": 2000}))
    run = experiment.start("--workers", "2", faults=[SLOW])
    wait_until(lambda: len(steps_of(experiment.at())) >= 2)
    (experiment.at() / "stop").write_text("the machine is needed\n")
    run.wait().expect(STOPPED_SAVED)
    assert checkpoints(experiment.at())[-1] == steps_of(experiment.at())[-1] < 2000
    assert not (experiment.at() / "stop").exists()


@pytest.mark.acceptance("8d-5a")
@pytest.mark.capability("A-71")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_stop_after_steps_counts_the_steps_of_one_process(
    experiment: Experiment, workers: str
) -> None:
    for expected in ([1, 2, 3], [1, 2, 3, 4, 5, 6]):
        experiment.run(
            "--stop-after-steps", "3", "--workers", workers, expect=STOPPED_SAVED
        )
        assert steps_of(experiment.at()) == expected
    experiment.run("--stop-after-steps", "3", "--workers", workers, expect=DONE)
    assert steps_of(experiment.at()) == list(range(1, 9))


@pytest.mark.acceptance("8d-5b", "8d-9b", "input-4e-4")
@pytest.mark.capability("G-71", "C-11", "C-23", "C-42", "A-30", "A-75", "C-9", "T-23")
def test_stop_after_step_stops_the_run_at_that_step_at_every_start(
    experiment: Experiment,
) -> None:
    # A schedule whose every step depends on its length, which a stop does not change.
    experiment.write(recipe(schedule={"type": "linear"}))
    experiment.run(directory="undisturbed")
    stop = ("--set", "spec.training.stop.afterStep=5")
    experiment.run(*stop, expect=STOPPED_SAVED)
    saved = snapshot(experiment.at() / "checkpoints")
    experiment.run(*stop, expect=STOPPED_SAVED)
    assert steps_of(experiment.at()) == [1, 2, 3, 4, 5]
    # A start without a step saves nothing.
    steps = [name for name in saved if name.startswith("step-")]
    now = snapshot(experiment.at() / "checkpoints")
    assert steps and {name: now[name] for name in now if name.startswith("step-")} == {
        name: saved[name] for name in steps
    }
    assert events(experiment.at(), "stop")[-1]["reason"] == "after_step"
    rates = [row["learning_rate"] for row in curve(experiment.at()).values()]
    assert rates == pytest.approx([3e-3 * (8 - step) / 8 for step in range(5)])
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))
    assert_same_curve(experiment.at("undisturbed"), experiment.at())


@pytest.mark.capability("T-33", "G-92", "O-32", "G-33")
@pytest.mark.acceptance("8d-15b", "8d-15d")
def test_records_are_in_chronological_order_and_contain_no_local_path(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(**EVALUATED, checkpoint={"every": {"steps": 2}}))
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    experiment.run()
    directory = experiment.at()
    rows = read_lines(directory / "events.jsonl")
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    ends = ("start", "stop", "complete", "end")
    told = [(row["type"], row["step"]) for row in rows if row["type"] in ends]
    assert told == [
        ("start", 0), ("stop", 4), ("end", 4),
        ("start", 4), ("stop", 8), ("complete", 8), ("end", 8),
    ]  # fmt: skip
    # The parts of a start are made in their order, each with its seconds.
    (phases,) = (row for row in rows if row["type"] == "phases" and row["generation"] == 1)
    made = [name for name in phases if name in ("data", "model", "first_step")]
    assert made == ["data", "model", "first_step"]
    # The rows of the run, then its last checkpoint, then the completion mark.
    written = [
        (directory / name).stat().st_mtime_ns
        for name in ("metrics.jsonl", "checkpoints/step-8/manifest.json", "complete.json")
    ]
    assert written == sorted(written)
    # A save is written during the training and reported when it is published, before the end that waits for
    # it.
    saves = [
        (row["generation"], row["checkpoint"]) for row in rows if row["type"] == "save"
    ]
    assert saves == [(1, "step-2"), (1, "step-4"), (2, "step-6"), (2, "step-8")]
    assert [row["type"] for row in rows].index("end") > rows.index(
        next(row for row in rows if row.get("checkpoint") == "step-4")
    )

    experiment.command("report", str(directory)).expect(DONE)
    here = str(experiment.path)
    for name in (
        "metrics.jsonl",
        "events.jsonl",
        "evaluation.jsonl",
        "summary.json",
        "report.md",
    ):
        assert here not in (directory / name).read_text("utf-8"), name
    # The page names the run's folder, with the user's home directory as ~.
    page = (directory / "report.html").read_text("utf-8")
    assert here.replace(str(Path.home()), "~") in page and str(Path.home()) not in page


def test_stop_after_steps_below_one_is_refused(experiment: Experiment) -> None:
    ended = experiment.run("--stop-after-steps", "0", "--workers", "0", expect=USER_ERROR)
    assert (
        "--workers: 0 is below 1" in ended.err
        and "--stop-after-steps: 0 is below 1" in ended.err
    )


@pytest.mark.acceptance("8d-5d")
@pytest.mark.capability("C-65", "O-50")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_one_interrupt_stops_with_the_state_saved_and_a_second_one_stops_at_once(
    experiment: Experiment, workers: str
) -> None:
    experiment.write(recipe(horizon={"steps": 2000}))
    first = experiment.start("--workers", workers, faults=[SLOW])
    wait_until(lambda: steps_of(experiment.at()))
    first.send(signal.SIGINT)
    first.wait().expect(STOPPED_SAVED)
    assert checkpoints(experiment.at())[-1] == steps_of(experiment.at())[-1]

    held = fault("step", call=2, action="sleep", rank=None, seconds=1000)
    # Counted before the start: the second run is a fork of a warm process, and may be quicker than this one.
    before = len(steps_of(experiment.at()))
    second = experiment.start("--workers", workers, faults=[held])
    wait_until(lambda: len(steps_of(experiment.at())) > before)
    # Two signals count as one if the first has not been handled when the second arrives; then one more is the
    # second.
    while is_alive(second.pid):
        second.send(signal.SIGINT)
        time.sleep(0.1)
    ended = second.wait().expect(STOPPED_UNSAVED)
    assert "interrupted twice" in ended.err and "not saved" in ended.err


@pytest.mark.acceptance("8d-17d")
def test_sigterm_to_the_launcher_stops_both_workers_at_one_step(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(horizon={"steps": 2000}))
    run = experiment.start("--workers", "2", faults=[SLOW])
    wait_until(lambda: len(steps_of(experiment.at())) >= 3)
    workers = run.workers()
    assert len(workers) == 2
    run.send(signal.SIGTERM)
    run.wait().expect(STOPPED_SAVED)
    last = steps_of(experiment.at())[-1]
    assert last < 2000
    newest = json.loads(
        (experiment.at() / "checkpoints" / f"step-{last}" / "manifest.json").read_text()
    )
    assert newest["world_size"] == 2
    assert not any(map(is_alive, workers))
    # The final values belong to this end, and not to an earlier one.
    summary = json.loads((experiment.at() / "summary.json").read_text("utf-8"))
    assert summary["step"] == last


@pytest.mark.capability("O-14", "C-12", "T-34", "T-46", "A-28")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stop_during_an_evaluation_repeats_it_after_the_resume(
    experiment: Experiment, workers: str
) -> None:
    experiment.write(recipe(**EVALUATED))
    experiment.run("--workers", workers, directory="undisturbed")
    experiment.run(
        "--workers",
        workers,
        expect=STOPPED_SAVED,
        faults=[fault("evaluation", call=2, action="SIGTERM")],
    )
    assert steps_of(experiment.at()) == [1, 2, 3, 4]
    assert [row["step"] for row in read_lines(experiment.at() / "evaluation.jsonl")] == [2]
    experiment.run("--workers", workers)
    assert_same_curve(experiment.at("undisturbed"), experiment.at())

    def evaluated(directory: str) -> list[Any]:
        rows = read_lines(experiment.at(directory) / "evaluation.jsonl")
        return [(row["step"], row["name"], row["loss"]) for row in rows]

    assert evaluated("tiny") == evaluated("undisturbed")
    assert [step for step, _, _ in evaluated("tiny")] == [2, 4, 6, 8]


def test_a_stop_during_the_first_step_takes_effect_after_the_next_step(
    experiment: Experiment,
) -> None:
    experiment.run(expect=STOPPED_SAVED, faults=[fault("step", call=1, action="SIGTERM")])
    assert steps_of(experiment.at()) == [1, 2]
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))


@pytest.mark.acceptance("8d-5e")
def test_a_stop_during_the_last_step_still_ends_the_run_complete(
    experiment: Experiment,
) -> None:
    experiment.run(expect=DONE, faults=[fault("step", call=8, action="SIGTERM")])
    assert (experiment.at() / "complete.json").exists()


def test_a_killed_worker_is_replaced_and_the_run_loses_no_step(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(horizon={"steps": 2000}))
    for rank in (0, 1):
        directory = experiment.at(f"killed-{rank}")
        run = experiment.start("--workers", "2", directory=f"killed-{rank}", faults=[SLOW])
        wait_until(lambda directory=directory: steps_of(directory))  # type: ignore[misc]
        workers = run.workers()
        os.kill(workers[rank], signal.SIGKILL)

        def has_both_again(directory: Path = directory) -> bool:
            rows = metric_rows(directory)
            return (
                rows[-1]["generation"] > rows[0]["generation"]
                and rows[-1]["world_size"] == 2
            )

        wait_until(has_both_again)
        run.send(signal.SIGTERM)
        run.wait().expect(STOPPED_SAVED)
        assert steps_of(directory) == list(range(1, len(steps_of(directory)) + 1)), (
            "a step was lost or repeated"
        )
        assert not any(map(is_alive, workers))


def test_workers_end_with_their_launcher(experiment: Experiment) -> None:
    experiment.write(recipe(horizon={"steps": 2000}))
    run = experiment.start("--workers", "2", faults=[SLOW])
    wait_until(lambda: steps_of(experiment.at()))
    workers = run.workers()
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    wait_until(
        lambda: not any(map(is_alive, workers)), what="a worker outlived its launcher"
    )


def test_a_changed_horizon_and_an_invalid_path_are_reported_together(
    experiment: Experiment,
) -> None:
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    wrong = ("--set", "spec.training.data.sources[0].path=nowhere.jsonl")
    for steps, options, what in (
        (11, (), "spec.training.horizon.steps: 11 here, but the run in"),
        (5, ("--extend",), "spec.training.horizon: 5 steps are fewer than the 8"),
    ):
        horizon = ("--set", f"spec.training.horizon.steps={steps}")
        refused = experiment.run(*horizon, *wrong, *options, expect=USER_ERROR)
        assert what in refused.err
        assert "nowhere.jsonl: does not exist" in refused.err
    experiment.run()


@pytest.mark.acceptance("8d-4f", "input-1e-1")
def test_a_finished_run_is_extended_only_with_the_option(
    experiment: Experiment,
) -> None:
    experiment.run()
    longer, shorter = (
        ("--set", f"spec.training.horizon.steps={steps}") for steps in (11, 5)
    )
    refused = experiment.run(*longer, expect=USER_ERROR)
    assert "spec.training.horizon.steps: 11 here, but the run in" in refused.err
    assert "began with 8" in refused.err and "--extend" in refused.err
    assert (experiment.at() / "complete.json").exists()

    refused = experiment.run(*shorter, "--extend", expect=USER_ERROR)
    assert "spec.training.horizon: 5 steps are fewer than the 8 of the run" in refused.err
    assert "spec.training.stop.afterStep" in refused.err

    experiment.run(*longer, "--extend")
    assert steps_of(experiment.at()) == list(range(1, 12))
    assert json.loads((experiment.at() / "complete.json").read_text())["step"] == 11
    assert [
        (event["from_steps"], event["to_steps"])
        for event in events(experiment.at(), "extended")
    ] == [(8, 11)]
    (warning,) = events(experiment.at(), "warning")
    assert (
        "the learning rate rises from" in warning["message"]
        and "initFrom" in warning["message"]
    )
    experiment.write(recipe(horizon={"steps": 11}))
    assert "complete: 11 steps" in experiment.run().out


def test_a_started_run_is_not_extended_without_the_option_and_continues_unchanged(
    experiment: Experiment,
) -> None:
    experiment.run("--stop-after-steps", "3", expect=STOPPED_SAVED)
    refused = experiment.run("--set", "spec.training.horizon.steps=20", expect=USER_ERROR)
    assert "spec.training.horizon.steps" in refused.err
    assert steps_of(experiment.at()) == [1, 2, 3]
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))


@pytest.mark.capability("C-24", "C-33")
@pytest.mark.parametrize(
    ("horizon", "steps"),
    [({"tokens": 600}, 10), ({"tokens": 640}, 10), ({"epochs": 1.5}, None)],
    ids=str,
)
def test_a_horizon_in_tokens_or_epochs_is_rounded_up_to_steps(
    experiment: Experiment, horizon: dict[str, Any], steps: int | None
) -> None:
    from run_helpers import write_documents

    write_documents(experiment.path / "documents.jsonl", count=4)
    experiment.write(
        recipe(
            horizon={"steps": None, **horizon},
            batching={"globalBatchSize": 8, "microBatchSize": 2},
        )
    )
    if steps is not None:
        steps = steps // 2
    experiment.run()
    derived = json.loads((experiment.at() / "run.json").read_text())["derived"]
    trained = steps_of(experiment.at())
    assert trained == list(range(1, derived["totalSteps"] + 1))
    if steps is not None:
        assert len(trained) == steps
    else:
        assert derived["samples"] / derived["epochs"] * 1.5 <= derived["samples"] + 1e-6
        assert 1.5 <= derived["epochs"] < 1.5 + 8 * derived["epochs"] / derived["samples"]


@pytest.mark.acceptance("8d-7b")
@pytest.mark.capability("A-41", "T-X10")
def test_the_best_and_the_newest_checkpoint_are_kept(experiment: Experiment) -> None:
    best = {"metric": "heldOut/loss", "mode": "max"}
    experiment.write(
        recipe(**EVALUATED, checkpoint={"every": {"steps": 2}, "keep": 1, "best": best})
    )
    experiment.run("--stop-after-steps", "5", expect=STOPPED_SAVED)
    experiment.run()
    losses = {
        row["step"]: row["loss"] for row in read_lines(experiment.at() / "evaluation.jsonl")
    }
    highest = max(losses, key=lambda step: losses[step])
    assert highest != 8
    assert checkpoints(experiment.at()) == [highest, 8]
    found = json.loads((experiment.at() / "complete.json").read_text())["best"]
    assert found == {**best, "value": losses[highest], "step": highest}


@pytest.mark.capability("T-X10")
def test_the_best_checkpoint_is_marked_although_its_evaluation_was_interrupted(
    experiment: Experiment,
) -> None:
    """The stop saves the step before its evaluation has ended; the evaluation is done again after
    the resume."""
    best = {"metric": "heldOut/loss", "mode": "min"}
    experiment.write(
        recipe(**EVALUATED, checkpoint={"every": {"steps": 2}, "keep": 1, "best": best})
    )
    experiment.run(
        faults=[fault("evaluation", call=3, action="SIGTERM")], expect=STOPPED_SAVED
    )
    rows = read_lines(experiment.at() / "evaluation.jsonl")
    stopped = steps_of(experiment.at())[-1]
    assert (
        stopped not in {row["step"] for row in rows}
        and checkpoints(experiment.at())[-1] == stopped
    )
    experiment.run("--stop-after-steps", "1", expect=STOPPED_SAVED)
    losses = {
        row["step"]: row["loss"] for row in read_lines(experiment.at() / "evaluation.jsonl")
    }
    assert min(losses, key=lambda step: losses[step]) == stopped, (
        "the loss of this run falls"
    )
    pointer = json.loads((experiment.at() / "checkpoints" / "best.json").read_text())
    assert pointer["step"] == stopped
    assert stopped in checkpoints(experiment.at()), (
        "retention has removed the best checkpoint"
    )


def test_an_edited_model_directory_is_another_model(experiment: Experiment) -> None:
    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    experiment.write(
        {**recipe(), "model": {"path": "exported"}, "tokenizer": {"type": "byte"}},
        name="second",
    )
    experiment.run("--stop-after-steps", "3", name="second", expect=STOPPED_SAVED)
    path = experiment.path / "exported" / "config.json"
    config = json.loads(path.read_text())
    before = config["rms_norm_eps"]
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    refused = experiment.run(name="second", expect=USER_ERROR)
    assert "configuration.rms_norm_eps: is 0.1 here, but the run in" in refused.err
    assert f"began with {before}" in refused.err
    # Even without run.json: the checkpoint records to which run its tensors belong.
    record = json.loads((experiment.at("second") / "run.json").read_text())
    del record["model"]
    (experiment.at("second") / "run.json").write_text(json.dumps(record))
    refused = experiment.run(name="second", expect=USER_ERROR)
    assert "rms_norm_eps" in refused.err and "checkpoints" in refused.err
    path.write_text(json.dumps(config))
    experiment.run(name="second")
    assert steps_of(experiment.at("second")) == list(range(1, 9))


def test_a_pretrained_model_is_not_trained_on_bytes_by_default(
    experiment: Experiment,
) -> None:
    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    experiment.write({**recipe(), "model": {"path": "exported"}}, name="second")
    refused = experiment.run(name="second", expect=USER_ERROR)
    assert (
        "spec.training.tokenizer: missing" in refused.err and "ids of bytes" in refused.err
    )


def still(**changes: Any) -> dict[str, Any]:
    """Return one step that changes nothing visible, so that the first checkpoint contains the initial
    state."""
    return recipe(
        horizon={"steps": 1}, optimizer={"learningRate": 1e-12, "weightDecay": 0}, **changes
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_init_from_another_run_loads_only_the_weights(
    experiment: Experiment, workers: str
) -> None:
    import torch

    experiment.run()
    experiment.write(
        still(initFrom={"path": "runs/tiny"}, runtime={"parallelism": "fsdp2"}),
        name="second",
    )
    before = snapshot(experiment.at())
    experiment.run("--workers", workers, name="second")
    first, second = (
        final_state(experiment.at(), prefix="model."),
        final_state(experiment.at("second"), prefix="model."),
    )
    assert first.keys() == second.keys()
    assert all(
        torch.allclose(value, second[key], rtol=0, atol=1e-9)
        for key, value in first.items()
    )
    assert steps_of(experiment.at("second")) == [1]
    assert snapshot(experiment.at()) == before


@pytest.mark.parametrize("field", ["initFrom", "model"])
def test_init_from_can_load_a_transformers_directory(
    experiment: Experiment, field: str
) -> None:
    import torch

    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    experiment.write(
        {**still(), field: {"path": "exported"}, "tokenizer": {"type": "byte"}},
        name="second",
    )
    for workers in ("1", "2"):
        experiment.run("--workers", workers, name="second", directory=f"second-{workers}")
        first = final_state(experiment.at(), prefix="model.")
        second = final_state(experiment.at(f"second-{workers}"), prefix="model.")
        assert first.keys() == second.keys()
        assert all(
            torch.allclose(value, second[key], rtol=0, atol=1e-9)
            for key, value in first.items()
        )


@pytest.mark.acceptance("input-3e-2")
def test_init_from_applies_to_a_new_run_only(experiment: Experiment) -> None:
    experiment.run()
    experiment.write(recipe(initFrom={"path": "runs/tiny"}), name="second")
    experiment.run(name="second", directory="undisturbed")
    experiment.run("--stop-after-steps", "4", name="second", expect=STOPPED_SAVED)
    experiment.run(name="second")
    assert_same_curve(experiment.at("undisturbed"), experiment.at("second"))
    assert curve(experiment.at("second"))[1]["loss"] < curve(experiment.at())[1]["loss"]


@pytest.fixture(scope="module")
def plain(make_experiment: Callable[[], Experiment]) -> Experiment:
    """A run of the tiny recipe, to compare others with."""
    experiment = make_experiment()
    experiment.run(directory="plain")
    return experiment


@pytest.mark.capability("C-21", "A-23")
@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("true", ("--workers", "1")),
        ("offload", ("--workers", "1")),
        ("true", ("--workers", "2", "--set", "spec.training.runtime.parallelism=fsdp2")),
    ],
)
def test_activation_checkpointing_changes_memory_and_not_the_losses(
    plain: Experiment, value: str, options: tuple[str, ...]
) -> None:
    directory = f"recomputed-{value}-{options[1]}"
    plain.run(
        *options,
        "--set",
        f"spec.training.runtime.activationCheckpointing={value}",
        directory=directory,
    )
    # One process sums as before; shards are summed in another order.
    is_exact = options[1] == "1"
    assert_same_curve(
        plain.at("plain"), plain.at(directory), exact=is_exact, tolerance=1e-5
    )


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bf16-autocast", 0.01), ("bf16", 0.03)]
)
@pytest.mark.parametrize(
    "options",
    [
        ("--workers", "1"),
        ("--workers", "2", "--set", "spec.training.runtime.parallelism=fsdp2"),
    ],
)
def test_lower_precisions_stay_close_to_full_precision(
    plain: Experiment, precision: str, tolerance: float, options: tuple[str, ...]
) -> None:
    directory = f"{precision}-{options[1]}"
    plain.run(
        *options,
        "--set",
        f"spec.training.runtime.precision={precision}",
        directory=directory,
    )
    assert_same_curve(
        plain.at("plain"), plain.at(directory), exact=False, tolerance=tolerance
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_model_has_the_same_curve(plain: Experiment) -> None:
    # Use a separate process, because the compiler's helpers do not work in a forked one.
    options = ("--set", "spec.training.horizon.steps=3", "--run-directory", "runs/compiled")
    process = evergrad(
        plain, "run", "tiny.yaml", "--set", "spec.training.runtime.compile=on", *options
    )
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == DONE, err
    plain.run("--set", "spec.training.horizon.steps=3", directory="not-compiled")
    assert_same_curve(
        plain.at("not-compiled"), plain.at("compiled"), exact=False, tolerance=1e-4
    )


@pytest.mark.capability("A-14")
def test_rows_have_the_documented_fields(plain: Experiment) -> None:
    rows = metric_rows(plain.at("plain"))
    assert all(
        len(row["sample_hash"]) == 16 and int(row["sample_hash"], 16) >= 0 for row in rows
    )
    assert {row["tokens"] for row in rows} == {64}
    assert all(0 < row["valid_tokens"] <= 64 for row in rows)
    phases = (
        "data_seconds",
        "forward_backward_seconds",
        "communication_seconds",
        "optimizer_seconds",
        "other_seconds",
    )
    assert all(
        abs(sum(row[phase] for phase in phases) - row["step_seconds"]) < 1e-6
        for row in rows
    )
    assert len({row["sample_hash"] for row in rows}) == len(rows)
