"""Evaluation sets with their own cadences and sizes, evaluators of a task, and the best checkpoint by their
metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    DONE,
    INTERNAL,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    events,
    read_lines,
    recipe,
    write_documents,
)

ROOT = Path(__file__).resolve().parents[3]
TASK = (ROOT / "examples/custom/averaged.py").read_text("utf-8")
OWN: dict[str, Any] = {
    "recipe": "averaged:Averaged",
    "options": {"decay": 0.5},
    "data": {"heldOut": {"count": 8}},
}


def write_own(experiment: Experiment, text: str = TASK, **changes: Any) -> None:
    (experiment.path / "averaged.py").write_text(text, "utf-8")
    experiment.write(recipe(**OWN, **changes))


def rows(directory: Path) -> list[dict[str, Any]]:
    return read_lines(directory / "evaluation.jsonl")


@pytest.mark.capability("C-28", "O-47", "O-65", "T-27", "T-X11")
def test_cadence_and_size_of_a_set_can_change_in_a_training_run_without_changing_a_bit(
    experiment: Experiment,
) -> None:
    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    data = {"heldOut": {"count": 6}}
    sources = [{"name": "other", "path": "other.jsonl"}]

    def write(*sets: Any) -> None:
        evaluation = {"every": {"steps": 4}, "sources": sources, "sets": list(sets)}
        experiment.write(recipe(data=data, evaluation=evaluation))

    write()
    experiment.run(directory="undisturbed")
    write({"name": "heldOut", "every": {"steps": 1}, "samples": 3})
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    write(
        {"name": "heldOut", "every": {"steps": 3}},
        {"name": "other", "whileTraining": False},
    )
    experiment.run()
    found = [(row["step"], row["name"]) for row in rows(experiment.at())]
    assert found == [
        (1, "heldOut"),
        (2, "heldOut"),
        (3, "heldOut"),
        (4, "heldOut"),
        (4, "other"),
        (6, "heldOut"),
        (8, "heldOut"),
    ]
    sizes = {
        row["step"]: row["tokens"]
        for row in rows(experiment.at())
        if row["name"] == "heldOut"
    }
    assert sizes[1] == sizes[4] < sizes[6] == sizes[8]
    (change,) = events(experiment.at(), "changed")
    assert "spec.training.evaluation.sets" in json.dumps(change["changes"])
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at(), prefix="model.")

    # Batches of another size have the same tokens, but a separate result. The last batch has too few samples:
    # its padding does not count.
    larger = ("--set", "heldOut", "--micro-batch-size", "5")
    ended = experiment.command("evaluate", "runs/tiny", *larger, "--json").expect(DONE)
    (result,) = json.loads(ended.out)["results"]
    assert 0 < 5 * result["batches"] - result["samples"] < 5
    last = next(row for row in rows(experiment.at()) if row["step"] == 8)
    assert result["tokens"] == last["tokens"]
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert result["is_new"]

    # The set that the run has left out is there for the command.
    ended = experiment.command("evaluate", "runs/tiny", "--json").expect(DONE)
    results = {row["name"]: row for row in json.loads(ended.out)["results"]}
    own = {
        row["name"]: row for row in rows(experiment.at("undisturbed")) if row["step"] == 8
    }
    assert {name: row["loss"] for name, row in results.items()} == {
        name: row["loss"] for name, row in own.items()
    }


@pytest.mark.capability("T-47", "T-6", "T-X9")
def test_the_best_checkpoint_follows_a_metric_of_a_task_evaluator(
    experiment: Experiment,
) -> None:
    write_own(
        experiment,
        evaluation={
            "every": {"steps": 8},
            "sets": [{"name": "average", "every": {"steps": 2}}],
        },
        checkpoint={
            "every": {"steps": 100},
            "best": {"metric": "average/accuracy", "mode": "max"},
        },
    )
    experiment.run()
    found = {row["step"]: row for row in rows(experiment.at()) if row["name"] == "average"}
    assert sorted(found) == [2, 4, 6, 8]
    # The first of several that are equally good.
    best = max(sorted(found), key=lambda step: found[step]["metrics"]["accuracy"])
    pointer = json.loads((experiment.at() / "checkpoints" / "best.json").read_text())
    assert pointer["step"] == best

    ended = experiment.command(
        "evaluate", "runs/tiny", "--checkpoint", "best", "--set", "average", "--json"
    ).expect(DONE)
    (row,) = json.loads(ended.out)["results"]
    same = ("step", "loss", "perplexity", "metrics", "tokens")
    assert {key: row[key] for key in same} == {key: found[best][key] for key in same}
    # The evaluator's measurements are in a file of the run, and stay there.
    written = json.loads((experiment.path / row["file"]).read_text("utf-8"))
    assert (experiment.path / row["file"]).parent == experiment.at() / "evaluations"
    assert {key: written[key] for key in ("name", *same)} == {
        "name": "average",
        **{key: found[best][key] for key in same},
    }
    table = experiment.command("evaluate", "runs/tiny", "--checkpoint", str(best)).expect(
        DONE
    )
    assert f"average/accuracy: {row['metrics']['accuracy']}" in table.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"checkpoint": {"best": {"metric": "average/acuracy"}}},
            (
                "spec.training.checkpoint.best.metric: 'average/acuracy' is not a metric of this run; "
                "did you mean `average/accuracy`? Known here: heldOut/loss, heldOut/perplexity,"
            ),
        ),
        (
            {
                "evaluation": {
                    "every": {"steps": 2},
                    "sets": [{"name": "mean", "samples": 4}],
                }
            },
            (
                "spec.training.evaluation.sets[0].name: 'mean' is not an evaluation set; nothing that the "
                "task measures has this name. Known here: heldOut, average."
            ),
        ),
    ],
)
def test_metric_names_that_a_task_does_not_measure_are_refused_before_the_first_step(
    experiment: Experiment, changes: dict[str, Any], message: str
) -> None:
    write_own(experiment, **{"evaluation": {"every": {"steps": 2}}, **changes})
    refused = experiment.run(expect=USER_ERROR)
    assert message in refused.err
    assert not (experiment.at() / "metrics.jsonl").exists()


@pytest.mark.capability("O-53")
def test_an_error_inside_an_evaluation_ends_the_run_with_its_line_and_the_run_can_resume(
    experiment: Experiment,
) -> None:
    broken = TASK.replace(
        "    model, inputs =", "    raise ValueError('no average')\n    model, inputs ="
    )
    assert broken != TASK
    write_own(experiment, broken, evaluation={"every": {"steps": 4}})
    failed = experiment.run(expect=INTERNAL)
    line = 1 + broken.splitlines().index("    raise ValueError('no average')")
    assert "its evaluator average" in failed.err and f"averaged.py:{line}" in failed.err
    (event,) = events(experiment.at(), "failed")
    assert "no average" in event["message"] and event["exit_code"] == INTERNAL
    assert rows(experiment.at()) == []

    write_own(experiment, evaluation={"every": {"steps": 4}})
    experiment.run()
    assert [(row["step"], row["name"]) for row in rows(experiment.at())] == [
        (4, "heldOut"),
        (4, "average"),
        (8, "heldOut"),
        (8, "average"),
    ]
