"""A run continues with allowed changes of its file: overrides from a step on, cadences, another path of its
data."""

from collections.abc import Callable

import pytest
from run_helpers import (
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    curve,
    events,
    recipe,
    steps_of,
    write_documents,
)

HALF, WHOLE = 4, 8


def changed(
    half: bool, *, path: str = "documents.jsonl", **further: object
) -> dict[str, object]:
    """The recipe over ``WHOLE`` steps at a constant rate; ``half``: it stops on the way."""
    sources = {"sources": [{"name": "docs", "path": path}]}
    stop = {"afterStep": HALF} if half else {}
    return recipe(
        horizon={"steps": WHOLE},
        schedule={"type": "constant"},
        data=sources,
        stop=stop,
        **further,
    )


@pytest.fixture(scope="module")
def experiment(make_experiment: Callable[[], Experiment]) -> Experiment:
    return make_experiment()


def test_a_rate_changed_in_a_training_run_has_the_effect_of_one_set_from_the_first_step(
    experiment: Experiment,
) -> None:
    overrides = [{"fromStep": HALF + 2, "learningRate": 1e-4, "clipNorm": 0.01}]
    experiment.write(changed(False, overrides=overrides))
    experiment.run(directory="foreseen")
    experiment.write(changed(True))
    experiment.run(directory="changed", expect=STOPPED_SAVED)
    experiment.write(changed(False, overrides=overrides))
    experiment.run(directory="changed")

    foreseen, path = experiment.at("foreseen"), experiment.at("changed")
    assert steps_of(path) == list(range(1, WHOLE + 1))
    assert_same_curve(foreseen, path)
    rates = {row["learning_rate"] for step, row in curve(path).items() if step >= HALF + 2}
    assert rates == {1e-4} and 1e-4 not in {
        curve(path)[step]["learning_rate"] for step in range(1, HALF + 2)
    }
    (event,) = events(path, "changed")
    assert event["step"] == HALF
    assert [one["path"] for one in event["changes"]] == [
        "spec.training.stop.afterStep",
        "spec.training.overrides",
    ]
    compared = experiment.command(
        "compare-runs", str(foreseen), str(path), "--exact"
    ).expect(0)
    assert (
        f"B continued after step {HALF} with another file: spec.training.stop.afterStep"
        in compared.out
    )


@pytest.mark.acceptance("8d-4b:pretrain")
def test_a_run_continues_with_moved_data_and_not_with_other_data(
    experiment: Experiment,
) -> None:
    experiment.write(changed(True))
    experiment.run(directory="moved", expect=STOPPED_SAVED)
    folder = experiment.path / "elsewhere"
    folder.mkdir()
    (folder / "copy.jsonl").write_bytes((experiment.path / "documents.jsonl").read_bytes())
    write_documents(folder / "other.jsonl", seed=1)

    experiment.write(changed(False, path="elsewhere/other.jsonl"))
    refused = experiment.run(directory="moved", expect=USER_ERROR)
    assert "other.jsonl: its content changed since this run was prepared" in refused.err
    experiment.write(changed(False, path="elsewhere/copy.jsonl"))
    experiment.run(directory="moved")
    assert steps_of(experiment.at("moved")) == list(range(1, WHOLE + 1))
    assert [
        one["path"] for one in events(experiment.at("moved"), "changed")[0]["changes"]
    ] == [
        "spec.training.data.sources[0].path",
        "spec.training.stop.afterStep",
    ]
