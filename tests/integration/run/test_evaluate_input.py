"""``evergrad evaluate``: input that cannot be evaluated is refused with where, what, why and the remedy
(64)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import USER_ERROR, Experiment, recipe


@pytest.fixture(scope="module")
def finished(make_experiment: Callable[[], Experiment]) -> Experiment:
    """A complete run of 8 steps, saved every 3, with one evaluation set."""
    one = make_experiment()
    one.write(recipe(data={"heldOut": {"count": 6}}))
    one.run()
    return one


def copy_of(finished: Experiment, name: str) -> Path:
    """The run in another directory, to be changed."""
    return Path(shutil.copytree(finished.at(), finished.at(name)))


def refuse(finished: Experiment, *arguments: str) -> str:
    """Return the only reported problem."""
    ended = finished.command("evaluate", *arguments).expect(USER_ERROR)
    assert ended.out == ""
    (line,) = ended.err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["runs/none"],
            "runs/none: does not exist. Name the directory that 'evergrad run' wrote",
        ),
        (["documents.jsonl"], "documents.jsonl: is a file, not a run directory. Name the"),
        (
            ["runs"],
            "runs: is not a run directory; it has none of run.json, metrics.jsonl and",
        ),
        (
            ["runs/tiny", "--set", "heldout"],
            "--set: 'heldout' is not an evaluation set; did you mean heldOut? Known: heldOut.",
        ),
        (
            ["runs/tiny", "--checkpoint", "5"],
            (
                "runs/tiny/checkpoints: contains no checkpoint of step 5; the run has not saved it, or "
                "retention has removed it. Choose one of the existing ones: 3, 6, 8."
            ),
        ),
        (
            ["runs/tiny", "--checkpoint", "best"],
            (
                "runs/tiny/checkpoints: no checkpoint is the best; spec.training.checkpoint.best is "
                "not set, or nothing was evaluated yet. Name a step; there are 3, 6, 8."
            ),
        ),
        (
            ["runs/tiny", "--checkpoint", "newest"],
            (
                "--checkpoint: 'newest' is not a step; a checkpoint is named by its step, or as best or "
                "last. Use a step, best or last."
            ),
        ),
    ],
)
def test_a_missing_choice_is_refused_with_the_available_ones(
    finished: Experiment, arguments: list[str], message: str
) -> None:
    assert message in refuse(finished, *arguments)
    leases = finished.at() / "checkpoints" / "leases"
    assert not leases.exists() or list(leases.iterdir()) == []
    assert not (finished.at() / "evaluations").exists()


def test_a_run_without_a_checkpoint_is_refused(finished: Experiment) -> None:
    run = copy_of(finished, "unsaved")
    shutil.rmtree(run / "checkpoints")
    assert (
        "runs/unsaved/checkpoints: contains no checkpoint; the run has not saved one yet. Wait for "
        "the run's first save, or let --watch wait for it."
        in refuse(finished, "runs/unsaved")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": 2},
            "run.json: has the format 2; this version reads format 1. Use the version",
        ),
        ({"manifest": {}}, "run.json: does not hold a run this version can read"),
    ],
)
def test_a_run_of_another_format_is_refused(
    finished: Experiment, change: dict[str, Any], message: str
) -> None:
    run = copy_of(finished, f"other-{'-'.join(change)}")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, **change}))
    assert message in refuse(finished, f"runs/{run.name}")


def test_a_damaged_checkpoint_is_refused_and_not_moved(
    finished: Experiment,
) -> None:
    run = copy_of(finished, "damaged")
    shard = run / "checkpoints" / "step-8" / "rank-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    refused = refuse(finished, "runs/damaged", "--checkpoint", "8")
    assert "step-8: cannot be loaded; file rank-00000.bin: checksum differs" in refused
    assert shard.is_file() and list((run / "checkpoints" / "leases").iterdir()) == []


def test_a_checkpoint_of_another_run_is_refused(finished: Experiment) -> None:
    run = copy_of(finished, "mixed")
    record = json.loads((run / "run.json").read_text())
    record["configHash"] = "0" * 64
    (run / "run.json").write_text(json.dumps(record))
    refused = refuse(finished, "runs/mixed")
    assert "the recipe's hash" in refused


def test_a_run_without_evaluation_sets_is_refused(finished: Experiment) -> None:
    finished.write(recipe(), name="plain")
    finished.run("--stop-after-steps", "3", name="plain", expect=75)
    assert (
        "spec.training.evaluation: the run has no evaluation set; its file has neither "
        "data.heldOut nor evaluation.sources." in refuse(finished, "runs/plain")
    )
