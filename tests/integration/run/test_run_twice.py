"""A second ``evergrad run`` of a run directory in which a process of this machine trains."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_state,
    events,
    fault,
    recipe,
    steps_of,
    wait_until,
)

HOLD = fault("step", call=6, action="hold")
"""Rank 0 pauses before it trains step 6, until the file ``go-on`` exists."""


def owner_of(directory: Path) -> dict[str, Any]:
    """The record of the process that trains there."""
    record: dict[str, Any] = json.loads((directory / "owner.json").read_text())
    return record


def alter_owner(directory: Path, **values: object) -> None:
    """Change the record of the process that trains there."""
    (directory / "owner.json").write_text(json.dumps({**owner_of(directory), **values}))


def content(directory: Path) -> dict[str, bytes]:
    """Every file with its content, but the logs of the process that trains."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "logs" not in path.parts
    }


def test_a_second_run_is_refused_while_the_first_one_is_alive(
    experiment: Experiment,
) -> None:
    # Without a save in the background, the row of step 5 is the last thing that it writes before it is held.
    checkpoint = {"every": {"steps": 3}, "keep": 50, "asynchronous": False}
    experiment.write(recipe(checkpoint=checkpoint))
    first = experiment.start(faults=[HOLD])
    wait_until(lambda: steps_of(experiment.at()) == [1, 2, 3, 4, 5])
    assert events(experiment.at(), "save")
    before = content(experiment.at())
    refused = experiment.run(expect=USER_ERROR)
    assert f"pid {first.pid} trains this run already, at step 5, since 20" in refused.err
    assert f"`kill {first.pid}`" in refused.err and "--take-over" in refused.err
    assert content(experiment.at()) == before
    (experiment.path / "go-on").touch()
    first.wait().expect(0)
    assert steps_of(experiment.at()) == [*range(1, 9)]
    assert not (experiment.at() / "owner.json").exists()
    assert "is complete" in experiment.run().out


def test_a_second_run_of_an_elastic_run_is_refused_for_any_number_of_nodes(
    experiment: Experiment,
) -> None:
    experiment.write()
    first = experiment.start("--nodes", "2", faults=[HOLD])
    wait_until(lambda: steps_of(experiment.at()) == [1, 2, 3, 4, 5])
    for arguments in ((), ("--workers", "2"), ("--nodes", "2")):
        refused = experiment.run(*arguments, expect=USER_ERROR)
        assert f"pid {first.pid} trains this run already" in refused.err
    (experiment.path / "go-on").touch()
    first.wait().expect(0)


@pytest.mark.parametrize("arguments", [(), ("--nodes", "2")], ids=["alone", "elastic"])
def test_take_over_lets_the_first_process_save_and_no_step_is_repeated(
    experiment: Experiment, arguments: tuple[str, ...]
) -> None:
    experiment.write(recipe(horizon={"steps": 40}))
    experiment.run(*arguments, directory="undisturbed")
    slow = fault("step", call=0, action="sleep", rank=None, seconds=0.2)
    first = experiment.start(*arguments, faults=[slow])
    wait_until(lambda: len(steps_of(experiment.at())) > 3)
    second = experiment.run(*arguments, "--take-over")
    assert f"pid {first.pid}, which trains this run, is asked to save" in second.err
    first.wait().expect(STOPPED_SAVED)
    assert steps_of(experiment.at()) == [*range(1, 41)]
    if not arguments:
        assert_same_state(experiment.at("undisturbed"), experiment.at())


def test_a_killed_process_blocks_no_later_start(experiment: Experiment) -> None:
    experiment.write()
    first = experiment.start(faults=[HOLD])
    wait_until(lambda: len(steps_of(experiment.at())) == 5)
    first.send(signal.SIGKILL)
    first.wait()
    assert owner_of(experiment.at())["pid"] == first.pid
    experiment.run("--stop-after-steps", "1", expect=STOPPED_SAVED)
    # Its number belongs to another process by now, or the machine was started again since.
    for values in ({"pid": os.getpid()}, {"boot": "another"}, {"pid_namespace": "pid:[1]"}):
        (experiment.at() / "owner.json").write_text(
            json.dumps({
                "pid": os.getpid(), "start_ticks": 1, "boot": "", "pid_namespace": "",
                "time": 1.0, "host": "here", **values,
            })
        )  # fmt: skip
        experiment.run("--stop-after-steps", "1", expect=STOPPED_SAVED)


def test_take_over_works_without_another_process(experiment: Experiment) -> None:
    experiment.write()
    experiment.run("--take-over")
    assert steps_of(experiment.at()) == [*range(1, 9)]
