"""A run that an older version began goes on with this one, bit for bit.

``run-05accba`` was trained to step 4 of 8 by the version of that commit. ``continued.json`` is what the same
version made of the other steps.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from run_helpers import EXACT, Experiment, curve, final_state

from evergrad_trainer.state.replicas import hash_state

OLDER = Path(__file__).with_name("run-05accba")
TOLERANCE = 1e-5
"""Relative, for a processor that rounds otherwise than the one that trained the older run."""


def rows_of(directory: Path) -> dict[int, list[Any]]:
    return {step: [row[key] for key in EXACT] for step, row in curve(directory).items()}


def test_a_run_of_05accba_goes_on_bit_for_bit(experiment: Experiment) -> None:
    shutil.copy(OLDER / "documents.jsonl", experiment.path / "documents.jsonl")
    shutil.copy(OLDER / "run.yaml", experiment.path / "before.yaml")
    shutil.copytree(OLDER, experiment.at("before"))
    experiment.run(name="before")
    experiment.run(name="before", directory="anew")

    continued = json.loads((OLDER / "continued.json").read_text())
    expected = rows_of(OLDER) | {
        row["step"]: [row[key] for key in EXACT] for row in continued["rows"]
    }
    resumed, anew = rows_of(experiment.at("before")), rows_of(experiment.at("anew"))
    assert sorted(resumed) == sorted(expected) == list(range(1, 9))
    if anew == expected:
        # This processor rounds as the one that trained the older run.
        assert resumed == expected
        assert (
            hash_state(final_state(experiment.at("before"))) == continued["state_after_step_8"]
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
