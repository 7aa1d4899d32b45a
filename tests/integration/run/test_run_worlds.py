"""One run in worlds of 1, 2 and 3 processes that share 4 slots: the same samples and losses, in exact mode
the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_helpers import (
    STOPPED_SAVED,
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    fault,
    final_state,
    read_lines,
    recipe,
    steps_of,
)

DATA_PARALLEL = "spec.training.runtime.parallelism=dataParallel"
SHARDED = "spec.training.runtime.parallelism=fsdp2"
EVALUATED = {
    "data": {
        "sources": [{"name": "docs", "path": "documents.jsonl"}],
        "sequenceLength": 16,
        "heldOut": {"count": 6},
    },
    "evaluation": {"every": {"steps": 4}, "samples": 6},
}


def evaluations(
    experiment: Experiment, directory: str
) -> list[tuple[int, str, float, int]]:
    rows = read_lines(experiment.at(directory) / "evaluation.jsonl")
    return [(row["step"], row["name"], row["loss"], row["tokens"]) for row in rows]


@pytest.fixture(scope="module")
def fast(make_experiment: Callable[[], Experiment]) -> Experiment:
    """Runs ``1``, ``2`` and ``3`` by their number of processes, in the ordinary mode."""
    experiment = make_experiment()
    experiment.write(recipe(**EVALUATED))
    for workers in (1, 2, 3):
        experiment.run("--workers", str(workers), directory=str(workers))
    return experiment


@pytest.fixture(scope="module")
def exact(make_experiment: Callable[[], Experiment]) -> Experiment:
    """The same in exact mode."""
    experiment = make_experiment()
    experiment.write(recipe(**EVALUATED, reproducibility={"elastic": "exact"}))
    for workers in (1, 2, 3):
        experiment.run("--workers", str(workers), directory=str(workers))
    return experiment


@pytest.mark.capability("O-30", "T-16", "G-X40")
@pytest.mark.parametrize("workers", ["2", "3"])
def test_a_larger_world_trains_the_same_samples_with_the_same_losses(
    fast: Experiment, workers: str
) -> None:
    assert_same_curve(fast.at("1"), fast.at(workers), exact=False, tolerance=1e-5)
    fast.command("compare-runs", str(fast.at("1")), str(fast.at(workers))).expect(0)
    assert {row["world_size"] for row in curve(fast.at(workers)).values()} == {int(workers)}
    assert [row[0::3] for row in evaluations(fast, "1")] == [
        row[0::3] for row in evaluations(fast, workers)
    ]


@pytest.mark.acceptance("8d-17a:pretrain")
@pytest.mark.parametrize("workers", ["2", "3"])
def test_in_exact_mode_a_larger_world_is_bit_equal(exact: Experiment, workers: str) -> None:
    assert_same_curve(exact.at("1"), exact.at(workers))
    assert_same_state(exact.at("1"), exact.at(workers))
    assert evaluations(exact, "1") == evaluations(exact, workers)
    exact.command(
        "compare-runs", str(exact.at("1")), str(exact.at(workers)), "--exact"
    ).expect(0)


def test_in_exact_mode_a_run_whose_world_size_changes_at_each_restart_is_bit_equal(
    exact: Experiment,
) -> None:
    for workers, steps in (("1", "2"), ("3", "3")):
        exact.run(
            "--workers",
            workers,
            "--stop-after-steps",
            steps,
            directory="changing",
            expect=STOPPED_SAVED,
        )
    exact.run("--workers", "2", directory="changing")
    assert [row["world_size"] for row in curve(exact.at("changing")).values()] == [
        1,
        1,
        3,
        3,
        3,
        2,
        2,
        2,
    ]
    assert_same_curve(exact.at("1"), exact.at("changing"))
    assert_same_state(exact.at("1"), exact.at("changing"))
    assert evaluations(exact, "1") == evaluations(exact, "changing")


def test_exact_mode_differs_from_fast_mode_by_rounding_only(
    fast: Experiment, exact: Experiment
) -> None:
    assert_same_curve(fast.at("1"), exact.at("1"), exact=False, tolerance=1e-5)


@pytest.mark.long
def test_a_run_whose_world_size_changes_at_each_restart_trains_the_same_samples(
    fast: Experiment,
) -> None:
    for workers, steps in (("1", "2"), ("3", "3")):
        fast.run(
            "--workers",
            workers,
            "--stop-after-steps",
            steps,
            directory="changing",
            expect=STOPPED_SAVED,
        )
    fast.run("--workers", "2", directory="changing")
    assert steps_of(fast.at("changing")) == list(range(1, 9))
    assert_same_curve(fast.at("1"), fast.at("changing"), exact=False)


@pytest.mark.parametrize("workers", ["1", "2", "3"])
def test_sharding_trains_the_same_samples_with_the_same_losses(
    fast: Experiment, workers: str
) -> None:
    fast.run("--workers", workers, "--set", SHARDED, directory=f"sharded-{workers}")
    assert_same_curve(fast.at("1"), fast.at(f"sharded-{workers}"), exact=False)
    # Saved right after an evaluation, which gathers the shards.
    whole, sharded = final_state(fast.at("1")), final_state(fast.at(f"sharded-{workers}"))
    assert whole.keys() == sharded.keys()
    assert all(
        torch.allclose(value, sharded[key], rtol=1e-3, atol=1e-5)
        for key, value in whole.items()
    )


COPIES = ("--workers", "4", "--set", SHARDED, "--set", "spec.training.runtime.shards=2")


def test_two_replicas_of_two_shards_train_the_same_samples_with_the_same_losses(
    fast: Experiment,
) -> None:
    fast.run(*COPIES, directory="copies")
    assert_same_curve(fast.at("1"), fast.at("copies"), exact=False)
    whole, copies = final_state(fast.at("1")), final_state(fast.at("copies"))
    assert whole.keys() == copies.keys()
    assert all(
        torch.allclose(value, copies[key], rtol=1e-3, atol=1e-5)
        for key, value in whole.items()
    )


def test_a_flipped_bit_in_one_of_two_replicas_is_detected_and_both_ranks_are_named(
    fast: Experiment,
) -> None:
    # Rank 3 holds the same part as rank 1. Step 6 is saved; two copies cannot show which of them is correct.
    flip = fault("step", call=5, action="flip", rank=3)
    ended = fast.run(*COPIES, directory="flipped", faults=[flip])
    assert "the state after step 6 differs between ranks" in ended.err
    assert "one of ranks 1 and 3 is wrong, and two cannot tell which" in ended.err
    # Nothing of the wrong state was saved, and the run continued from where the copies were equal.
    assert steps_of(fast.at("flipped")) == [*range(1, 7), *range(4, 9)]
    assert_same_curve(fast.at("1"), fast.at("flipped"), exact=False)


@pytest.mark.parametrize(
    "starts",
    [
        [("2", DATA_PARALLEL), ("3", SHARDED), ("1", DATA_PARALLEL)],
        [("3", SHARDED), ("2", SHARDED), ("2", DATA_PARALLEL)],
    ],
    ids=["replicated, sharded, alone", "sharded by 3, by 2, replicated"],
)
def test_a_checkpoint_of_one_parallelism_loads_under_another(
    fast: Experiment, starts: list[tuple[str, str]]
) -> None:
    directory = f"resharded-{starts[0][0]}"
    for workers, parallelism in starts[:-1]:
        fast.run(
            "--workers",
            workers,
            "--set",
            parallelism,
            "--stop-after-steps",
            "3",
            directory=directory,
            expect=STOPPED_SAVED,
        )
    workers, parallelism = starts[-1]
    fast.run("--workers", workers, "--set", parallelism, directory=directory)
    assert steps_of(fast.at(directory)) == list(range(1, 9))
    assert_same_curve(fast.at("1"), fast.at(directory), exact=False)


@pytest.mark.capability("T-12")
def test_dropout_is_independent_of_the_world_size(experiment: Experiment) -> None:
    model = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
    }
    experiment.write(
        {**recipe(reproducibility={"elastic": "exact"}), "model": {"config": model}}
    )
    for workers in ("1", "3"):
        experiment.run("--workers", workers, directory=workers)
    assert_same_curve(experiment.at("1"), experiment.at("3"))
    assert_same_state(experiment.at("1"), experiment.at("3"))


def test_padding_of_a_sample_counts_no_token_for_any_world_size(
    experiment: Experiment,
) -> None:
    """The loss is divided by the step's valid tokens, not by a rank's: padding that falls on one rank must
    not shift it."""
    import json

    # 60 tokens: three whole windows and one with 12 of 16 labels.
    (experiment.path / "documents.jsonl").write_text(json.dumps({"text": "x" * 59}) + "\n")
    experiment.write(recipe())
    rows: dict[str, Any] = {}
    for workers in ("1", "2", "3"):
        experiment.run("--workers", workers, directory=workers)
        rows[workers] = curve(experiment.at(workers))
    assert {row["valid_tokens"] < row["tokens"] for row in rows["1"].values()} == {True}
    assert_same_curve(experiment.at("1"), experiment.at("2"), exact=False)
    assert_same_curve(experiment.at("1"), experiment.at("3"), exact=False)
