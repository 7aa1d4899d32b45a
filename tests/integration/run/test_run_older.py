"""A run that an older version began continues with this version, bit for bit.

The version of commit ``05accba`` trained ``run-05accba`` to step 4 of 8. ``continued.json`` contains the
other steps, trained by the same version. With another recipe or other data, the run is refused.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_helpers import EXACT, USER_ERROR, Experiment, curve, final_state

from evergrad_trainer.state.replicas import hash_state

OLDER = Path(__file__).with_name("run-05accba")
TOLERANCE = 1e-5
"""Relative tolerance for a processor that rounds differently from the processor that trained the older
run."""


def rows_of(directory: Path) -> dict[int, list[Any]]:
    return {step: [row[key] for key in EXACT] for step, row in curve(directory).items()}


def test_a_run_of_05accba_resumes_bit_equal(experiment: Experiment) -> None:
    begin(experiment)
    experiment.run(name="before")
    experiment.run(name="before", directory="anew")

    continued = json.loads((OLDER / "continued.json").read_text())
    expected = rows_of(OLDER) | {
        row["step"]: [row[key] for key in EXACT] for row in continued["rows"]
    }
    resumed, anew = rows_of(experiment.at("before")), rows_of(experiment.at("anew"))
    assert sorted(resumed) == sorted(expected) == list(range(1, 9))
    if anew == expected:
        # Return whether this processor rounds like the processor that trained the older run.
        assert resumed == expected
        assert (
            hash_state(final_state(experiment.at("before")))
            == continued["state_after_step_8"]
        )
        return
    for step, row in expected.items():
        for name, value, mine in zip(EXACT, row, resumed[step], strict=True):
            is_close = (
                mine == value
                if isinstance(value, str)
                else abs(mine - value) <= TOLERANCE * abs(value)
            )
            assert is_close, f"step {step}, {name}: {mine} instead of {value}"


def begin(experiment: Experiment) -> dict[Path, bytes]:
    """Lay the older run down as its version left it; the content of each of its files."""
    shutil.copy(OLDER / "documents.jsonl", experiment.path / "documents.jsonl")
    shutil.copy(OLDER / "run.yaml", experiment.path / "before.yaml")
    shutil.copytree(OLDER, experiment.at("before"))
    return contents(experiment)


def contents(experiment: Experiment) -> dict[Path, bytes]:
    files = [path for path in experiment.at("before").rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def test_a_run_of_05accba_with_another_recipe_is_refused_with_a_remedy(
    experiment: Experiment,
) -> None:
    before = begin(experiment)
    changed = ("--set", "spec.training.optimizer.learningRate=0.01")
    ended = experiment.run(*changed, name="before", expect=USER_ERROR)
    assert ended.err == (
        f"error: spec.training.optimizer.learningRate: 0.01 here, but the run in {experiment.at('before')} "
        "began with 0.003; the recipe of a run does not change. Set it back to 0.003, or give the changed "
        "run a name of its own.\n"
    )
    # No file of the older run was changed: after a reset, it continues.
    assert before.items() <= contents(experiment).items()


@pytest.mark.long
def test_a_run_of_05accba_with_other_data_is_refused_with_a_remedy(
    experiment: Experiment,
) -> None:
    before = begin(experiment)
    documents = experiment.path / "documents.jsonl"
    documents.write_text(documents.read_text() + '{"text": "one more"}\n')
    ended = experiment.run(name="before", expect=USER_ERROR)
    assert (
        f"error: {documents}: its content changed since this run was prepared" in ended.err
    )
    assert "Restore the file to continue this run, or train the new content" in ended.err
    assert before.items() <= contents(experiment).items()
