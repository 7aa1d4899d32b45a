"""Every recipe through stops, kills and resumes: it has the same bits as an undisturbed run, and does not
continue with other data or as another recipe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latent_corpus import write_corpus
from recipe_runs import DATA, RECIPES, assert_same_run, write_recipe
from run_helpers import (
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    checkpoints,
    constant,
    fault,
    steps_of,
)

WholeOf = Callable[[str], Experiment]
EVERY_BATCH = constant("evergrad_trainer.training.evaluation._ROUNDS_BETWEEN_EXCHANGES", 1)


@pytest.mark.acceptance(
    "8d-1a:sft",
    "8d-1a:latent_edit",
    "8d-1a:preference",
    "8d-1b:latent_edit",
    "8d-2a:pretrain",
)
@pytest.mark.acceptance(
    "8d-2a:sft", "8d-2a:two_stage_kl", "8d-2a:latent_edit", "8d-2a:preference"
)
@pytest.mark.acceptance("8d-2b:sft", "8d-2b:latent_edit", "8d-2b:preference")
@pytest.mark.acceptance("8d-2c:sft", "8d-2c:latent_edit", "8d-2c:preference")
@pytest.mark.acceptance(
    "8d-3a:sft", "8d-3a:two_stage_kl", "8d-3a:latent_edit", "8d-3a:preference"
)
@pytest.mark.capability("G-31")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_and_killed_repeatedly_ends_bit_equal_to_an_undisturbed_run(
    whole_of: WholeOf, recipe: str
) -> None:
    whole = whole_of(recipe)
    directory = whole.at("disturbed")

    def run(*arguments: str, expect: int, faults: list[Any] | None = None) -> None:
        whole.run(*arguments, directory="disturbed", expect=expect, faults=faults or [])

    run("--stop-after-steps", "7", expect=STOPPED_SAVED)
    # In the third batch of the evaluation after step 8.
    run(expect=-9, faults=[fault("batch", call=3, action="SIGKILL", to="command")])
    run(
        expect=STOPPED_SAVED, faults=[EVERY_BATCH, fault("batch", call=3, action="SIGTERM")]
    )
    manifest = json.loads((directory / "checkpoints/step-8/manifest.json").read_text())
    tallies = manifest["extra"]["tallies"].values()
    assert sum(one["done"] for one in tallies) == 3, (
        "what was measured belongs to the state"
    )

    # In the update of step 10, and in the save after it.
    run(expect=-9, faults=[fault("update", call=2, action="SIGKILL", to="command")])
    run(expect=-9, faults=[fault("shard", call=1, action="SIGKILL", to="command")])
    # The save runs during the training: a fast machine trains further steps before the kill.
    steps = steps_of(directory)
    assert steps[:12] == [*range(1, 8), 8, 8, 9, 9, 10]
    assert steps[12:] == list(range(11, 11 + len(steps[12:])))
    run(expect=0)
    assert_same_run(whole.at("undisturbed"), directory)


def write_slots(experiment: Experiment, recipe: str, slots: int) -> None:
    """8 steps of so many micro-batches, of two stages the second from step 6 on."""
    size = 2 if recipe == "latent_edit" else 1
    changes: dict[str, Any] = {
        "batching": {"globalBatchSize": size * slots, "microBatchSize": size},
        "horizon": {"steps": 8},
    }
    if recipe == "two_stage_kl":
        stages = [{"tokens": 5 * 16 * slots}, {"beta": 2.0}]
        changes["twoStageKl"] = {"stages": stages}
    write_recipe(experiment, recipe, **changes)


@pytest.mark.long
@pytest.mark.acceptance(
    "8d-1d:sft", "8d-1d:two_stage_kl", "8d-1d:latent_edit", "8d-1d:preference"
)
@pytest.mark.acceptance("8d-6c:sft", "8d-6c:latent_edit", "8d-6c:preference")
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("recipe", ["sft", "two_stage_kl", "latent_edit", "preference"])
def test_a_run_of_one_or_three_micro_batches_that_stops_before_its_last_step_trains_it(
    experiment: Experiment, recipe: str, slots: int
) -> None:
    write_slots(experiment, recipe, slots)
    experiment.run(directory="undisturbed")
    experiment.run("--stop-after-steps", "7", expect=STOPPED_SAVED)
    assert checkpoints(experiment.at())[-1] == 7
    experiment.run()
    assert steps_of(experiment.at()) == list(range(1, 9))
    assert_same_run(experiment.at("undisturbed"), experiment.at())


@pytest.mark.acceptance("8d-17a:sft", "8d-17a:latent_edit")
@pytest.mark.parametrize("recipe", ["sft", "latent_edit"])
def test_two_workers_of_a_node_are_bit_equal_to_one(whole_of: WholeOf, recipe: str) -> None:
    whole = whole_of(recipe)
    whole.run("--workers", "2", directory="two-workers")
    assert_same_run(whole.at("undisturbed"), whole.at("two-workers"))


OTHER_DATA = {
    "sft": "rows.jsonl",
    "two_stage_kl": "more.jsonl",
    "preference": "pairs.jsonl",
}


@pytest.mark.acceptance("8d-4b:sft", "8d-4b:two_stage_kl", "8d-4b:preference")
@pytest.mark.acceptance("8d-4b:latent_edit")
@pytest.mark.parametrize("recipe", [*OTHER_DATA, "latent_edit"])
def test_a_run_does_not_continue_with_other_data_and_nothing_is_overwritten(
    experiment: Experiment, recipe: str
) -> None:
    write_recipe(experiment, recipe)
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    before = files_of(experiment.at())

    if recipe == "latent_edit":
        write_corpus(experiment.path / "corpus", train=5)
        texts = [
            f"{experiment.at()}: the data's fingerprint is",
            "Restore the data this run began with",
        ]
    else:
        path = experiment.path / OTHER_DATA[recipe]
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
        texts = [
            f"{path}: its content changed since this run was prepared",
            "Restore the file to continue this run",
        ]
    said = experiment.run(expect=USER_ERROR).err
    assert all(text in said for text in texts), said
    assert files_of(experiment.at()) == before

    # The same data in their place again are the same run.
    DATA[recipe](experiment.path)
    experiment.run("--stop-after-steps", "1", expect=STOPPED_SAVED)


OTHER_RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "sft": (
        {"rows": {"learn": "everything"}},
        "spec.training.rows.learn: 'everything' here, but",
    ),
    "latent_edit": (
        {"latentEdit": {"alpha": 2}},
        "spec.training.latentEdit.alpha: 2.0 here, but",
    ),
    "preference": (
        {"preference": {"beta": 0.1}},
        "spec.training.preference.beta: 0.1 here, but",
    ),
}


@pytest.mark.acceptance("8d-4i:sft", "8d-4i:latent_edit", "8d-4i:preference")
@pytest.mark.parametrize("recipe", OTHER_RECIPES)
def test_a_run_does_not_continue_as_another_recipe_and_nothing_is_overwritten(
    experiment: Experiment, recipe: str
) -> None:
    write_recipe(experiment, recipe)
    experiment.run("--stop-after-steps", "2", expect=STOPPED_SAVED)
    before = files_of(experiment.at())
    changes, said = OTHER_RECIPES[recipe]
    write_recipe(experiment, recipe, **changes)
    assert said in experiment.run(expect=USER_ERROR).err
    assert files_of(experiment.at()) == before


def files_of(directory: Path) -> dict[str, bytes]:
    """All that starts and training have written."""
    files = [one for one in directory.rglob("*") if one.is_file()]
    assert directory / "checkpoints/step-2/manifest.json" in files
    return {one.relative_to(directory).as_posix(): one.read_bytes() for one in files}
