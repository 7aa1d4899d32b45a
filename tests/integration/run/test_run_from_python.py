"""A run that is started from Python, to its end and on from a stop."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from run_helpers import Experiment, read_lines, recipe

from evergrad_trainer import api


@pytest.mark.capability("G-1", "G-96", "O-29")
def test_a_run_from_python_returns_a_typed_report_and_resumes_where_it_stopped(
    make_experiment: Callable[[], Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_experiment()
    manifest = experiment.write(recipe())
    monkeypatch.chdir(experiment.path)
    before = dict(os.environ)
    stopped = api.run(manifest=manifest, arguments=("--stop-after-steps", "3"))
    assert (stopped.completed_steps, stopped.is_complete) == (3, False)
    found = api.run(manifest=manifest)
    assert found.is_complete and found.completed_steps == found.requested_steps > 3
    assert found.resumed_from == 3 and found.directory == Path("runs/tiny")
    assert found.loss is not None and found.samples > stopped.samples > 0
    assert found.events is not None
    assert found.data and found.data == stopped.data
    # Return the phases of each process's start, after its first step.
    starts = [row for row in read_lines(found.events) if row["type"] == "phases"]
    assert len(starts) == 2
    for row in starts:
        assert {"data", "model", "first_step"} <= set(row)
        assert all(row[name] >= 0 for name in ("data", "model", "first_step"))
    for path in (found.checkpoint, found.configuration, found.provenance, found.preflight):
        assert path is not None and path.exists()
    assert dict(os.environ) == before
