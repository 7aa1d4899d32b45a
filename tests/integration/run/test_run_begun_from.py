"""Runs that begin with another run's state: all of it, with or without its optimizer, and refused
requests."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    EXACT,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_state,
    checkpoints,
    curve,
    events,
    fault,
    final_state,
    recipe,
    steps_of,
)


def begin_from(load: str = "everything", **fields: Any) -> dict[str, Any]:
    return {"initFrom": {"path": "runs/tiny", "load": load, **fields}}


def _times_below(folder: Path, *, but: Path) -> dict[Path, int]:
    """When each file and folder was changed last, all but one folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path != but}


@pytest.mark.capability("G-11", "C-4", "O-21", "O-38")
def test_a_run_continues_from_an_older_step_of_another_directory_bit_equal(
    experiment: Experiment,
) -> None:
    exact = {"reproducibility": {"elastic": "exact"}}
    experiment.write(recipe(**exact))
    experiment.run()
    # A reader of a checkpoint holds it meanwhile, in a folder that is made once.
    leases = experiment.at() / "checkpoints" / "leases"
    leases.mkdir()
    before = _times_below(experiment.at(), but=leases)
    experiment.write(recipe(**exact, **begin_from(step=3)), name="fork")

    # Stopped and continued, also with other numbers of workers: the fork is a run like any other.
    experiment.run("--stop-after-steps", "2", name="fork", expect=STOPPED_SAVED)
    experiment.run("--workers", "2", name="fork")

    assert steps_of(experiment.at("fork")) == [4, 5, 6, 7, 8]
    first, second = curve(experiment.at()), curve(experiment.at("fork"))
    for step in range(4, 9):
        assert [second[step][key] for key in EXACT] == [first[step][key] for key in EXACT]
    assert_same_state(experiment.at(), experiment.at("fork"))
    # Its source is recorded, and nothing of the other run was changed.
    begun = events(experiment.at("fork"), "begun_from")
    record = json.loads((experiment.at("fork") / "run.json").read_text())["begunFrom"]
    assert [(one["checkpoint"], one["load"]) for one in begun] == [("step-3", "everything")]
    assert begun[0]["from_step"] == record.pop("step") == 3
    assert record == {key: begun[0][key] for key in record}
    assert _times_below(experiment.at(), but=leases) == before
    assert not list(leases.iterdir())


@pytest.mark.acceptance("8d-7b")
@pytest.mark.capability("O-20", "O-54", "C-38", "A-74")
def test_rolling_and_permanent_checkpoints_coexist_and_the_final_model_is_exported(
    experiment: Experiment,
) -> None:
    from safetensors.torch import load_file

    saves = {
        "every": {"steps": None, "tokens": 128},
        "keepEvery": {"steps": 3},
        "keep": 1,
        "exportAtEnd": True,
    }
    experiment.write(recipe(checkpoint=saves))
    experiment.run()
    saved = [
        int(one["checkpoint"].split("-")[1]) for one in events(experiment.at(), "save")
    ]
    assert saved == [2, 3, 4, 6, 8]
    assert checkpoints(experiment.at()) == [3, 6, 8]
    # The export contains the weights of the last checkpoint.
    (exported,) = (experiment.at() / "exports").iterdir()
    tensors, state = load_file(exported / "model.safetensors"), final_state(experiment.at())
    assert exported.name == "step-8" and (exported / "config.json").is_file() and tensors
    assert all(value.equal(state[f"model.{key}"]) for key, value in tensors.items())


@pytest.mark.long
def test_a_run_that_is_killed_in_its_export_repeats_it(experiment: Experiment) -> None:
    experiment.write(recipe(checkpoint={"exportAtEnd": True}))
    experiment.run(expect=-9, faults=[fault("export", call=1, action="SIGKILL")])
    assert not (experiment.at() / "complete.json").exists()
    experiment.run()
    assert [one.name for one in (experiment.at() / "exports").iterdir()] == ["step-8"]
    assert steps_of(experiment.at()) == list(range(1, 9))
    assert (experiment.at() / "complete.json").exists()


def damage(experiment: Experiment) -> None:
    for shard in (experiment.at() / "checkpoints" / "step-3").glob("rank-*.bin"):
        data = bytearray(shard.read_bytes())
        data[100] ^= 1
        shard.write_bytes(data)


@pytest.mark.acceptance("input-O-61", "input-4e-10")
@pytest.mark.long
def test_invalid_initial_states_are_refused_by_name(experiment: Experiment) -> None:
    experiment.run()
    cases: list[tuple[dict[str, Any], str]] = [
        (
            begin_from(step=5),
            "contains no checkpoint of step 5; the available steps are 8, 6, 3",
        ),
        (begin_from(step=8), "spec.training.horizon: ends at step 8"),
        ({"initFrom": {"path": "nowhere"}}, "nowhere: contains no checkpoint"),
        (
            {**begin_from(step=6), "data": {"sequenceLength": 32}},
            "spec.training.data.sequenceLength: 32 here, and 16 in",
        ),
        (
            {**begin_from("weights"), "model": {"config": {"hidden_size": 64}}},
            "shapes differ; model.",
        ),
        (
            {**begin_from("optimizer"), "optimizer": {"type": "lion"}},
            "Use the same optimizer, or load the weights alone",
        ),
        (begin_from("weights", step=3), "checksum differs"),
    ]
    damage(experiment)
    for number, (changes, said) in enumerate(cases):
        experiment.write(recipe(**changes), name=f"fork-{number}")
        refused = experiment.run(name=f"fork-{number}", expect=USER_ERROR)
        assert said in refused.err, refused.err
        assert steps_of(experiment.at(f"fork-{number}")) == []


@pytest.mark.long
@pytest.mark.capability("O-22", "O-61")
def test_a_loaded_optimizer_makes_another_first_step_than_a_new_one(
    experiment: Experiment,
) -> None:
    experiment.run()
    for load in ("weights", "optimizer"):
        changes: dict[str, Any] = {**begin_from(load), "horizon": {"steps": 1}}
        experiment.write(recipe(**changes), name=load)
        experiment.run(name=load)
    first = curve(experiment.at("weights"))[1]["loss"]
    assert curve(experiment.at("optimizer"))[1]["loss"] == first
    one, other = (
        final_state(experiment.at(load), prefix="model.")
        for load in ("weights", "optimizer")
    )
    assert any(not value.equal(other[key]) for key, value in one.items())
