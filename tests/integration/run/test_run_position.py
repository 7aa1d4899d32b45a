"""Runs that continue after another run's step in another mixture, each source at its own position."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from position_helpers import expected_hashes, sizes_in
from run_helpers import (
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    events,
    fault,
    merge,
    recipe,
    steps_of,
    write_documents,
)

EXACT = {"reproducibility": {"elastic": "exact", "seed": 5}}
FIRST = {
    "data": {
        "sources": [
            {"name": "a", "path": "a.jsonl", "weight": 3},
            {"name": "b", "path": "b.jsonl", "weight": 1},
        ]
    }
}
# B with another name, path and weight, after a new source; A is removed.
SECOND = {
    "data": {
        "sources": [
            {"name": "c", "path": "c.jsonl", "weight": 1},
            {"name": "kept", "path": "moved/b.jsonl", "weight": 3},
        ]
    },
    "initFrom": {"path": "runs/tiny", "step": 6, "load": "position"},
    "horizon": {"steps": 14},
    "optimizer": {"learningRate": 1e-3},
    "schedule": {
        "type": "pieces",
        "pieces": [
            {"until": 6, "ratio": 0.1},
            {"until": 8, "ratio": 1},
            {"until": 14, "ratio": 0.5},
        ],
    },
    "checkpoint": {"every": {"steps": 4}},
}


@pytest.fixture(scope="module")
def continued(make_experiment: Callable[[], Experiment]) -> Experiment:
    """A run of 8 steps on A and B, in ``runs/tiny``, and a run that continues after its sixth step, in
    ``runs/next``."""
    experiment = make_experiment()
    for seed, name in enumerate("abc"):
        write_documents(experiment.path / f"{name}.jsonl", count=4, seed=seed)
    (experiment.path / "moved").mkdir()
    shutil.copy(experiment.path / "b.jsonl", experiment.path / "moved" / "b.jsonl")
    experiment.write(recipe(**EXACT, **FIRST))
    experiment.run()
    experiment.write(recipe(**merge(EXACT, SECOND)), name="next")
    experiment.run(name="next")
    return experiment


@pytest.mark.capability("O-22", "O-61", "G-11")
def test_training_in_another_mixture_continues_each_source_where_it_ended(
    continued: Experiment,
) -> None:
    from evergrad_trainer.checkpoint.weights import read_extra

    # Six steps of four samples, one in four of which was B's.
    cursor = read_extra(continued.at() / "checkpoints" / "step-6")["cursor"]
    assert cursor == {"a": 18, "b": 6}
    rows = curve(continued.at("next"))
    record = json.loads((continued.at("next") / "run.json").read_text())
    assert sorted(rows) == list(range(7, 15))
    # B is the source 1 of the first run, and C the third source that this chain of runs has seen.
    sizes = sizes_in(record)
    expected = expected_hashes(
        [sizes["c"], sizes["kept"]],
        weights=[1, 3],
        numbers=[2, 1],
        taken=[0, cursor["b"]],
        steps=range(7, 15),
    )
    assert {step: int(row["sample_hash"], 16) for step, row in rows.items()} == expected
    # The pass of B that the first run began in is finished, and the next one begun.
    assert 6 + 24 > sizes["kept"] > 6

    # The learning rate is warmed up again after the step, to this file's peak.
    rates = [rows[step]["learning_rate"] for step in (7, 8, 14)]
    assert rates == pytest.approx([0.55e-3, 1e-3, 0.5e-3])
    (begun,) = events(continued.at("next"), "begun_from")
    assert (begun["load"], begun["from_step"], begun["sources"]) == (
        "position",
        6,
        {"c": 0, "kept": 6},
    )
    start = record["dataStart"]
    assert [(one["name"], one["number"], one["taken"]) for one in start["sources"]] == [
        ("c", 2, 0),
        ("kept", 1, 6),
    ]
    assert [(one["name"], one["taken"]) for one in start["leftOut"]] == [("a", 18)]


@pytest.mark.capability("O-22", "G-11")
def test_a_position_in_another_mixture_is_bit_equal_after_kills_and_with_two_workers(
    continued: Experiment,
) -> None:
    other = shutil.copytree(continued.at(), continued.at("other"))
    changes = merge(SECOND, {"initFrom": {"path": "runs/other"}})
    continued.write(recipe(**merge(EXACT, changes)), name="killed")

    # Killed before its first checkpoint it begins again from the same.
    continued.run(
        name="killed", expect=-9, faults=[fault("update", call=2, action="SIGKILL")]
    )
    assert checkpoints(continued.at("killed")) == []
    continued.run("--stop-after-steps", "3", name="killed", expect=STOPPED_SAVED)
    # From its own checkpoint on it needs the other run no more.
    shutil.rmtree(other)
    continued.run(
        "--workers", "2", "--stop-after-steps", "2", name="killed", expect=STOPPED_SAVED
    )
    continued.run(name="killed")
    assert steps_of(continued.at("killed"))[-1] == 14
    assert_same_curve(continued.at("next"), continued.at("killed"))
    assert_same_state(continued.at("next"), continued.at("killed"))


@pytest.mark.long
def test_a_chain_of_runs_continues_a_source_that_one_of_them_omitted(
    continued: Experiment,
) -> None:
    third = merge(
        SECOND,
        {
            "data": FIRST["data"],
            "initFrom": {"path": "runs/next", "step": None},
            "horizon": {"steps": 16},
            "schedule": None,
        },
    )
    continued.write(recipe(**merge(EXACT, third)), name="third")
    continued.run(name="third")
    (begun,) = events(continued.at("third"), "begun_from")
    # Eight steps of four samples between them, three of four of which were B's.
    assert begun["sources"] == {"a": 18, "b": 6 + 24}


@pytest.mark.long
def test_all_commands_read_a_run_that_started_at_a_position(
    continued: Experiment,
) -> None:
    # Samples of its first step: a new source has its first window there, and B is in its first pass still.
    shown = continued.command(
        "prepare", "next.yaml", "--show-samples", "4", "--json"
    ).expect(0)
    samples = [one["sample"] for one in json.loads(shown.out)["firstStep"]]
    assert [one.split("/")[0] for one in samples].count("kept") == 3

    # A resume in another directory has its bits, and so has an evaluation of it there.
    held = {"evaluation": {"sources": [{"name": "held", "path": "documents.jsonl"}]}}
    changes = merge(
        SECOND,
        {**held, "initFrom": {"path": "runs/next", "step": 12, "load": "everything"}},
    )
    continued.write(recipe(**merge(EXACT, changes)), name="fork")
    continued.run(name="fork")
    assert steps_of(continued.at("fork")) == [13, 14]
    assert_same_state(continued.at("next"), continued.at("fork"))
    evaluated = continued.command("evaluate", str(continued.at("fork"))).expect(0)
    assert "held" in evaluated.out


@pytest.mark.long
def test_settings_that_conflict_with_a_position_are_refused(continued: Experiment) -> None:
    base = merge(EXACT, SECOND)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"reproducibility": {"seed": 6}},
            "spec.training.reproducibility.seed: 6 here, and 5 in",
        ),
        (
            {"batching": {"globalBatchSize": 8}},
            "spec.training.batching.globalBatchSize: 8 here, and 4 in",
        ),
        (
            {"data": {"heldOut": {"fraction": 0.2}}},
            "spec.training.data.heldOut",
        ),
        (
            {"horizon": {"steps": 6}, "schedule": None},
            "spec.training.horizon: ends at step 6",
        ),
        ({"initFrom": {"step": 5}}, "contains no checkpoint of step 5"),
        (
            {"data": {"sources": [{"name": "b", "path": "b.jsonl", "samples": 5}]}},
            "spec.training.data.sources[0]: b is b of",
        ),
    ]
    for number, (changes, said) in enumerate(cases):
        name = f"refused-{number}"
        continued.write(recipe(**merge(base, changes)), name=name)
        refused = continued.run(name=name, expect=USER_ERROR)
        assert said in refused.err, refused.err
        assert steps_of(continued.at(name)) == []

    # A checkpoint alone does not show to which sources its position belongs.
    copied = shutil.copytree(
        continued.at() / "checkpoints" / "step-6", continued.path / "step-6"
    )
    continued.write(
        recipe(**merge(base, {"initFrom": {"path": "step-6", "step": None}})), name="copy"
    )
    refused = continued.run(name="copy", expect=USER_ERROR)
    assert "does not lie in the directory of its run" in refused.err
    assert Path(copied).is_dir()
