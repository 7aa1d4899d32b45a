"""Pretraining on documents that do not attend to each other: elastic and resumable like any run, and refused
if the model cannot do it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_helpers import elastic_recipe
from run_helpers import (
    DONE,
    MODEL,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    fault,
    recipe,
)

APART: dict[str, Any] = {
    "data": {"packing": "documents", "heldOut": {"count": 6}},
    "evaluation": {"every": {"steps": 6}},
}


@pytest.fixture(scope="module")
def apart(make_experiment: Callable[[], Experiment]) -> Iterator[Experiment]:
    """Runs in one process: ``apart`` as above, ``joined`` of the same windows."""
    experiment = make_experiment()
    experiment.write(elastic_recipe(**APART))
    experiment.run(directory="apart")
    joined = elastic_recipe(**{**APART, "data": {"heldOut": {"count": 6}}})
    experiment.write(joined, name="joined")
    experiment.run(name="joined")
    yield experiment


def test_separated_documents_have_the_sample_order_of_joined_windows(
    apart: Experiment,
) -> None:
    one, other = (curve(apart.at(name)) for name in ("apart", "joined"))
    assert [row["sample_hash"] for row in one.values()] == [
        row["sample_hash"] for row in other.values()
    ]
    assert [row["loss"] for row in one.values()] != [row["loss"] for row in other.values()]
    # Ends of documents have no label, and most samples have one.
    missing = [other[step]["valid_tokens"] - one[step]["valid_tokens"] for step in one]
    assert min(missing) >= 0 and sum(missing) > len(missing)


def test_two_processes_and_a_killed_run_end_bit_equal_to_an_undisturbed_run(
    apart: Experiment,
) -> None:
    kill = fault("step", call=8, action="SIGKILL", to="command")
    for directory, arguments in (("two", ("--workers", "2")), ("killed", ())):
        faults = [kill] if directory == "killed" else []
        apart.run(*arguments, directory=directory, expect=None, faults=faults)
        if faults:
            apart.run(*arguments, directory=directory, expect=DONE)
        assert_same_curve(apart.at("apart"), apart.at(directory))
        assert_same_state(apart.at("apart"), apart.at(directory))


def test_a_run_does_not_continue_with_another_packing(apart: Experiment) -> None:
    told = "--set", "spec.training.data.packing=concatenate"
    said = apart.run(*told, directory="apart", expect=USER_ERROR).err
    assert "spec.training.data.packing" in said


@pytest.mark.acceptance("8d-8f")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1},
            "the attention of mamba is not known to keep the documents of a sample apart",
        ),
        (
            {
                **MODEL,
                "model_type": "mistral",
                "num_key_value_heads": 2,
                "sliding_window": 8,
            },
            "attention of mistral sees 8 tokens here",
        ),
    ],
)
def test_a_model_that_cannot_keep_documents_apart_is_refused(
    experiment: Experiment, config: dict[str, Any], said: str
) -> None:
    experiment.write({**recipe(data={"packing": "documents"}), "model": {"config": config}})
    error = experiment.run(expect=USER_ERROR).err
    assert (
        "spec.training.data.packing: documents cannot be kept apart in this model" in error
    )
    assert said in error and "Set data.packing: concatenate, or use one of" in error
    assert checkpoints(experiment.at()) == []
