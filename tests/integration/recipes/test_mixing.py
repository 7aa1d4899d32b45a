"""A run by passes over parts of its sources: elastic and resumable as any run, and ended by them."""

from collections.abc import Callable

import pytest
from elastic_helpers import elastic_recipe
from run_helpers import (
    DONE,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    fault,
    write_documents,
)


@pytest.mark.capability("A-43", "C-32", "O-11")
def test_a_killed_run_by_passes_continues_with_two_processes_bit_equal(
    make_experiment: Callable[[], Experiment],
) -> None:
    experiment = make_experiment()
    write_documents(experiment.path / "more.jsonl", count=30, seed=1)
    sources = [
        {"name": "docs", "path": "documents.jsonl", "samples": 20},
        {"name": "more", "path": "more.jsonl", "samples": "50%", "weight": 2},
    ]
    experiment.write(
        elastic_recipe(
            data={"sources": sources, "mixing": "passes"},
            horizon={"steps": None, "epochs": 1, "exhausted": "all"},
            reproducibility={"dataSeed": 5},
        )
    )
    experiment.run(directory="whole")
    kill = fault("step", call=5, action="SIGKILL", to="command")
    experiment.run(directory="killed", expect=None, faults=[kill])
    experiment.run("--workers", "2", directory="killed", expect=DONE)
    assert_same_curve(experiment.at("whole"), experiment.at("killed"))
    assert_same_state(experiment.at("whole"), experiment.at("killed"))

    # Another seed of the data is another run.
    assert len(curve(experiment.at("whole"))) > 5
    other = "--set", "spec.training.reproducibility.dataSeed=6"
    said = experiment.run(*other, directory="whole", expect=USER_ERROR).err
    assert "spec.training.reproducibility.dataSeed: 6 here" in said
