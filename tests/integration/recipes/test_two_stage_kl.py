"""The recipe of two stages: killed anywhere around its boundary, resumed, and in worlds of every size, it has
the same bits as an undisturbed run, with the same reference."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    DONE,
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
    read_lines,
    recipe,
    write_documents,
)

BOUNDARY, STEPS = 5, 10
"""Steps of 64 tokens: the second stage begins with the first step that starts at 300 tokens or later."""


def two_stages(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "recipe": "two_stage_kl",
        "data": {
            "sources": [
                {"name": "docs", "path": "documents.jsonl"},
                {"name": "more", "path": "more.jsonl"},
            ],
            "sequenceLength": 16,
            "heldOut": {"count": 4},
        },
        "twoStageKl": {
            "stages": [
                {"tokens": 300, "mixture": {"docs": 1}},
                {"mixture": {"docs": 0.25, "more": 0.75}, "beta": 2.0},
            ]
        },
        "horizon": {"steps": STEPS},
        "checkpoint": {"every": {"steps": 3}, "keep": 1},
        "evaluation": {"every": {"steps": 4}},
        "reproducibility": {"elastic": "exact"},
    }
    return recipe(**{**base, **changes})


def write(experiment: Experiment, **changes: Any) -> None:
    write_documents(experiment.path / "more.jsonl", seed=7)
    experiment.write(two_stages(**changes))


@pytest.fixture(scope="module")
def whole(make_experiment: Callable[[], Experiment]) -> Experiment:
    """Its directory ``undisturbed`` contains an undisturbed run."""
    experiment = make_experiment()
    write(experiment)
    experiment.run(directory="undisturbed")
    return experiment


def assert_same_run(whole: Experiment, name: str) -> None:
    one, other = whole.at("undisturbed"), whole.at(name)
    assert_same_curve(one, other)
    assert_same_state(one, other)
    assert metrics(one) == metrics(other)
    assert evaluations(one) == evaluations(other)
    assert {found["hash"] for found in events(other, "snapshot")} == {
        found["hash"] for found in events(one, "snapshot")
    }


def metrics(directory: Path) -> list[Any]:
    rows = curve(directory)
    return [rows[step]["metrics"] for step in sorted(rows) if "metrics" in rows[step]]


def evaluations(directory: Path) -> dict[Any, Any]:
    """The last row of each set and step, without times."""
    return {
        (row["step"], row["name"]): (row["loss"], row["tokens"], row.get("metrics"))
        for row in read_lines(directory / "evaluation.jsonl")
    }


@pytest.mark.acceptance("8d-10a:two_stage_kl", "8d-10e:two_stage_kl", "number-T-63")
@pytest.mark.capability(
    "T-22", "T-28", "T-37", "T-60", "T-61", "T-64", "T-65", "T-66", "T-68", "T-69"
)
def test_the_second_stage_starts_at_its_token_with_the_model_as_reference(
    whole: Experiment,
) -> None:
    directory = whole.at("undisturbed")
    rows = curve(directory)
    names = {"policy_loss", "reference_loss", "penalty", "kl", "beta"}
    assert all("metrics" not in rows[step] for step in range(1, BOUNDARY + 1))
    assert all(
        rows[step]["metrics"].keys() == names for step in range(BOUNDARY + 1, STEPS + 1)
    )

    # In its first step the model is the reference still: no dropout, one arithmetic, no difference.
    first = rows[BOUNDARY + 1]
    assert first["metrics"]["penalty"] == first["metrics"]["kl"] == 0.0
    assert (
        first["metrics"]["policy_loss"]
        == first["metrics"]["reference_loss"]
        == first["loss"]
    )
    last = rows[STEPS]
    assert last["metrics"]["kl"] > 0 and last["metrics"]["beta"] == 2.0
    total = last["metrics"]["policy_loss"] + 2.0 * last["metrics"]["penalty"]
    assert last["loss"] == pytest.approx(total, rel=1e-6)

    # Kept although newer ones have pushed all others of its age out; evaluated, saved and taken in this order.
    assert checkpoints(directory) == [BOUNDARY, STEPS]
    told = [
        (event["type"], event.get("checkpoint"))
        for event in read_lines(directory / "events.jsonl")
        if event["type"] in ("save", "snapshot") and event["step"] == BOUNDARY
    ]
    assert told[-2:] == [("save", "step-5"), ("snapshot", None)]
    assert {(BOUNDARY, "stage1"), (BOUNDARY, "stage2")} <= evaluations(directory).keys()


@pytest.mark.acceptance("8d-10b:two_stage_kl", "8d-10f:two_stage_kl")
def test_an_evaluation_measures_the_model_alone_and_its_distance_from_the_reference(
    whole: Experiment,
) -> None:
    found = evaluations(whole.at("undisturbed"))
    assert {step for step, _ in found} == {4, BOUNDARY, 8, STEPS}
    for name in ("stage1", "stage2"):
        at_boundary, tokens, nothing = found[BOUNDARY, name]
        assert nothing is None
        for step in (8, STEPS):
            loss, its_tokens, more = found[step, name]
            assert its_tokens == tokens and more.keys() == {"reference_loss", "kl"}
            # The reference is the model of the boundary: its loss on the same text equals the measurement at
            # the boundary.
            assert more["reference_loss"] == pytest.approx(at_boundary, rel=1e-6)
            assert more["kl"] > 0 and loss != at_boundary


@pytest.mark.acceptance("8d-6a:two_stage_kl")
@pytest.mark.capability("O-39")
def test_evaluate_uses_the_reference_of_the_run(whole: Experiment) -> None:
    """Its own evaluation again, with the reference from the checkpoint of the boundary; before it without."""
    directory = whole.at("undisturbed")
    own = evaluations(directory)
    for step in (STEPS, BOUNDARY):
        ended = whole.command(
            "evaluate", str(directory), "--json", "--checkpoint", str(step)
        )
        rows = json.loads(ended.expect(DONE).out)["results"]
        found = {
            (row["step"], row["name"]): (row["loss"], row["tokens"], row.get("metrics"))
            for row in rows
        }
        assert found == {key: value for key, value in own.items() if key[0] == step}
        assert len(found) == 2


@pytest.mark.acceptance("8d-9c:two_stage_kl")
@pytest.mark.capability("T-67")
def test_one_schedule_covers_both_stages(whole: Experiment) -> None:
    """Stable through the boundary, and a decay at the end of the second stage alone."""
    rates = [
        row["learning_rate"] for _, row in sorted(curve(whole.at("undisturbed")).items())
    ]
    assert set(rates[: STEPS - 2]) == {3e-3} and rates[-1] < rates[-2] <= 3e-3


def test_the_boundary_is_recorded(whole: Experiment) -> None:
    record = json.loads((whole.at("undisturbed") / "run.json").read_text("utf-8"))
    assert record["derived"]["stageEnds"] == [BOUNDARY]


def test_a_longer_horizon_lengthens_the_second_stage(
    make_experiment: Callable[[], Experiment],
) -> None:
    experiment = make_experiment()
    write(experiment, horizon={"steps": 8}, schedule={"type": "constant"})
    experiment.run(directory="extended")
    write(experiment, schedule={"type": "constant"})
    experiment.run("--extend", directory="extended")
    experiment.run(directory="undisturbed")
    assert_same_curve(experiment.at("undisturbed"), experiment.at("extended"))
    assert_same_state(experiment.at("undisturbed"), experiment.at("extended"))


KILLS = {
    "before_the_last_step_of_the_first_stage": fault("step", call=5, action="SIGKILL"),
    "in_the_evaluation_at_the_boundary": fault("evaluation", call=4, action="SIGKILL"),
    "before_the_boundary_is_saved": fault("save", call=2, action="SIGKILL"),
    "in_the_save_of_the_boundary": fault("shard", call=2, action="SIGKILL"),
    "before_it_is_published": fault("publish", call=2, action="SIGKILL"),
    "when_it_is_published": fault("published", call=2, action="SIGKILL"),
    "before_the_reference_is_taken": fault("snapshot", call=1, action="SIGKILL"),
    "before_the_first_step_of_the_second_stage": fault("step", call=6, action="SIGKILL"),
    "in_the_second_stage": fault("step", call=9, action="SIGKILL"),
}

SHOWN = (
    "in_the_save_of_the_boundary",
    "before_the_reference_is_taken",
    "in_the_second_stage",
)
"""Of each state that a resume can find one: no checkpoint of the boundary, one and no reference, both."""


@pytest.mark.acceptance(
    "8d-1b:two_stage_kl", "8d-1c:two_stage_kl", "8d-2b:two_stage_kl", "8d-2c:two_stage_kl"
)
@pytest.mark.capability("T-70")
@pytest.mark.parametrize(
    "where",
    [pytest.param(one, marks=() if one in SHOWN else pytest.mark.long) for one in KILLS],
)
def test_a_run_killed_around_the_boundary_resumes_bit_equal(
    whole: Experiment, where: str
) -> None:
    whole.run(directory=where, faults=[KILLS[where]], expect=-9)
    assert not (whole.at(where) / "complete.json").exists()
    whole.run(directory=where)
    assert_same_run(whole, where)
    assert BOUNDARY in checkpoints(whole.at(where))


@pytest.mark.acceptance("8d-1a:two_stage_kl", "8d-1c:two_stage_kl", "8d-6c:two_stage_kl")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(BOUNDARY - 1, marks=pytest.mark.long),
        BOUNDARY,
        BOUNDARY + 1,
        pytest.param(STEPS - 1, marks=pytest.mark.long),
    ],
)
def test_a_stopped_and_resumed_run_is_bit_equal(whole: Experiment, step: int) -> None:
    name = f"stopped-{step}"
    whole.run("--stop-after-steps", str(step), directory=name, expect=STOPPED_SAVED)
    whole.run(directory=name)
    assert_same_run(whole, name)


@pytest.mark.acceptance("8d-17a:two_stage_kl")
@pytest.mark.parametrize("workers", [pytest.param("2", marks=pytest.mark.long), "3"])
def test_workers_of_one_node_are_bit_equal(whole: Experiment, workers: str) -> None:
    whole.run("--workers", workers, directory=f"workers-{workers}")
    assert_same_run(whole, f"workers-{workers}")


@pytest.mark.acceptance("input-5e-5")
def test_without_the_checkpoint_of_the_boundary_a_resume_is_refused(
    whole: Experiment,
) -> None:
    stopped = whole.at("no-boundary")
    whole.run("--stop-after-steps", "8", directory="no-boundary", expect=STOPPED_SAVED)
    shutil.rmtree(stopped / "checkpoints" / f"step-{BOUNDARY}")
    before = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    err = whole.run(directory="no-boundary", expect=USER_ERROR).err
    assert f"contains no checkpoint of step {BOUNDARY} from which this run continued" in err
    assert f"Restore step-{BOUNDARY} from a copy" in err
    assert before == sorted(path.name for path in (stopped / "checkpoints").iterdir())


@pytest.mark.acceptance("input-5e-5")
def test_another_checkpoint_in_place_of_the_boundary_checkpoint_is_refused(
    make_experiment: Callable[[], Experiment],
) -> None:
    """It is complete and belongs to this run and step; only its weights differ, which only the hash shows."""
    experiment = make_experiment()
    write(experiment)
    experiment.run("--stop-after-steps", "8", directory="stopped", expect=STOPPED_SAVED)
    # An override is not a part of the recipe, so its checkpoints have the same identity.
    write(experiment, overrides=[{"fromStep": 2, "learningRate": 1e-4}])
    experiment.run("--stop-after-steps", "6", directory="other", expect=STOPPED_SAVED)
    write(experiment)
    place, other = (
        experiment.at(name) / "checkpoints" / f"step-{BOUNDARY}"
        for name in ("stopped", "other")
    )
    shutil.rmtree(place)
    shutil.copytree(other, place)
    err = experiment.run(directory="stopped", expect=USER_ERROR).err
    assert f"contains no checkpoint of step {BOUNDARY} from which this run continued" in err
    assert f"{place}: has other weights" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"twoStageKl": None},
            "spec.training.twoStageKl: missing; recipe two_stage_kl has two stages.",
        ),
        (
            {"twoStageKl": {"stages": [{"tokens": 640}, {}]}},
            "no step is left for the second stage",
        ),
        (
            {"model": {"config": {"model_type": "gemma2", "num_key_value_heads": 2}}},
            "the logits of gemma2 cannot be made in chunks",
        ),
    ],
)
def test_untrainable_settings_are_refused_before_anything_is_written(
    make_experiment: Callable[[], Experiment], changes: dict[str, Any], said: str
) -> None:
    experiment = make_experiment()
    write(experiment)
    experiment.write(merge(two_stages(), changes))
    assert said in experiment.run(expect=USER_ERROR).err
    assert (
        not (experiment.at() / "run.json").exists() and checkpoints(experiment.at()) == []
    )


@pytest.mark.acceptance("8d-4i:two_stage_kl")
def test_another_beta_or_mixture_is_another_recipe(
    make_experiment: Callable[[], Experiment],
) -> None:
    experiment = make_experiment()
    write(experiment)
    experiment.run("--stop-after-steps", "7", expect=STOPPED_SAVED)
    stages = [
        {"tokens": 300, "mixture": {"docs": 1}},
        {"mixture": {"more": 1}, "beta": 3.0},
    ]
    before = (experiment.at() / "run.json").read_bytes()
    write(experiment, twoStageKl={"stages": stages})
    err = experiment.run(expect=USER_ERROR).err
    assert "spec.training.twoStageKl.stages[1].beta: 3.0 here, but the run in" in err
    assert "spec.training.twoStageKl.stages[1].mixture.docs: nothing here" in err
    assert before == (experiment.at() / "run.json").read_bytes()


SHARDED = "spec.training.runtime.parallelism=fsdp2"


def test_shards_train_with_the_same_reference(
    make_experiment: Callable[[], Experiment],
) -> None:
    experiment = make_experiment()
    write(experiment, reproducibility={"elastic": "fast"})
    sharded = ("--workers", "2", "--set", SHARDED)
    experiment.run(*sharded, directory="sharded")
    experiment.run(directory="alone")
    assert_same_curve(
        experiment.at("alone"), experiment.at("sharded"), exact=False, tolerance=1e-5
    )
    killed = fault("step", call=8, action="SIGKILL", to="command")
    experiment.run(*sharded, directory="killed", faults=[killed], expect=-9)
    experiment.run(*sharded, directory="killed")
    assert_same_curve(experiment.at("sharded"), experiment.at("killed"))
    assert_same_state(experiment.at("sharded"), experiment.at("killed"))
    assert metrics(experiment.at("sharded"))[0]["kl"] == 0.0
    # Another cut, and none: the hash is of the whole.
    stop = ("--stop-after-steps", "7")
    experiment.run(*sharded, *stop, directory="cut", expect=STOPPED_SAVED)
    experiment.run(directory="cut")
    assert_same_curve(
        experiment.at("alone"), experiment.at("cut"), exact=False, tolerance=1e-5
    )


def test_the_reference_of_a_sharded_model_computes_in_the_dtypes_of_the_model(
    make_experiment: Callable[[], Experiment],
) -> None:
    """Otherwise the first penalty would not be 0."""
    experiment = make_experiment()
    runtime = {"precision": "bf16-autocast", "parallelism": "fsdp2"}
    write(experiment, reproducibility={"elastic": "fast"}, runtime=runtime)
    stop = ("--stop-after-steps", str(BOUNDARY + 1))
    experiment.run("--workers", "2", *stop, expect=STOPPED_SAVED)
    (first,) = metrics(experiment.at())
    assert first["kl"] == first["penalty"] == 0.0
    assert first["policy_loss"] == first["reference_loss"]
