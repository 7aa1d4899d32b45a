"""Runs that begin with another run's state: all of it, with or without its optimizer, and what is refused."""

import json
from typing import Any

import pytest
from run_helpers import (
    EXACT,
    STOPPED_SAVED,
    Experiment,
    assert_same_state,
    curve,
    events,
    recipe,
    steps_of,
)


def begin_from(load: str = "everything", **fields: Any) -> dict[str, Any]:
    return {"initFrom": {"path": "runs/tiny", "load": load, **fields}}


@pytest.mark.capability("G-11", "C-4", "O-21", "O-38")
def test_a_run_goes_on_from_an_older_step_of_another_directory_with_the_same_bits(
    experiment: Experiment,
) -> None:
    exact = {"reproducibility": {"elastic": "exact"}}
    experiment.write(recipe(**exact))
    experiment.run()
    before = {path: path.stat().st_mtime_ns for path in experiment.at().rglob("*")}
    experiment.write(recipe(**exact, **begin_from(step=3)), name="fork")

    # Stopped and gone on with, and by other numbers of workers: the fork is a run like any other.
    experiment.run("--stop-after-steps", "2", name="fork", expect=STOPPED_SAVED)
    experiment.run("--workers", "2", name="fork")

    assert steps_of(experiment.at("fork")) == [4, 5, 6, 7, 8]
    first, second = curve(experiment.at()), curve(experiment.at("fork"))
    for step in range(4, 9):
        assert [second[step][key] for key in EXACT] == [first[step][key] for key in EXACT]
    assert_same_state(experiment.at(), experiment.at("fork"))
    # What it began with is written down, and nothing of the other run was changed.
    begun = events(experiment.at("fork"), "begun_from")
    record = json.loads((experiment.at("fork") / "run.json").read_text())["begunFrom"]
    assert [(one["checkpoint"], one["load"]) for one in begun] == [("step-3", "everything")]
    assert record == {key: begun[0][key] for key in record}
    assert {path: path.stat().st_mtime_ns for path in experiment.at().rglob("*")} == before
