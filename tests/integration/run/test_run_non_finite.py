"""Steps with a non-finite loss: the state before them is saved, and they are skipped as often as the file
allows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, fault
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    Experiment,
    assert_same_state,
    checkpoints,
    curve,
    events,
    merge,
    metric_rows,
    recipe,
    steps_of,
)

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def bad(make_experiment: Callable[[], Experiment]) -> Experiment:
    """Steps 4 and 5 of ``bad.yaml`` each have a sample with a letter whose embedding is infinite; ``tiny`` is
    the run without."""
    import torch
    from safetensors.torch import load_file, save_file

    experiment = make_experiment()
    experiment.run()
    experiment.command("checkpoint", "export", "runs/tiny", "--output", "exported").expect(
        DONE
    )
    path = experiment.path / "exported" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][ord("Z")] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    spoil(experiment, [(4, 1), (5, 2)])
    write(experiment)
    return experiment


def write(experiment: Experiment, **changes: Any) -> None:
    training = recipe(
        data={"sources": [{"name": "docs", "path": "spoilt.jsonl"}]},
        initFrom={"path": "exported"},
        checkpoint={"every": {"steps": 3}},
    )
    experiment.write(merge(training, changes), name="bad")


def spoil(experiment: Experiment, places: list[tuple[int, int]]) -> None:
    """Write ``spoilt.jsonl``: the documents with one letter replaced in the sample of each (step, slot), so
    of equal length."""
    from evergrad_manifest.reading.loader import load_manifest
    from evergrad_trainer.data.prepare import prepare
    from evergrad_trainer.recipes.setup import open_recipe

    loaded = load_manifest(experiment.path / "tiny.yaml")
    training, base = loaded.run.training, experiment.path
    prepared = prepare(
        training,
        base_directory=base,
        prepared_directory=experiment.at().parent / ".prepared",
    )
    stream = open_recipe(training, prepared, base).data.train
    texts = [
        json.loads(line)["text"]
        for line in (base / "documents.jsonl").read_text().splitlines()
    ]
    owners = [
        (number, place)
        for number, text in enumerate(texts)
        for place in range(len(text) + 1)
    ]
    for step, slot in places:
        (sample,) = stream.slot(step, slot).samples
        begin = sample.window * training.data.sequence_length
        number, place = next(
            (n, p) for n, p in owners[begin + 3 : begin + 12] if p < len(texts[n])
        )
        texts[number] = texts[number][:place] + "Z" + texts[number][place + 1 :]
    (base / "spoilt.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_non_finite_step_stops_the_run_saved_and_skip_steps_continues_past_it(
    bad: Experiment, workers: str
) -> None:
    directory, arguments = f"stopped-{workers}", ("--workers", workers)
    write(bad)
    for attempt in (1, 2):
        ended = bad.run(*arguments, name="bad", directory=directory, expect=STOPPED_SAVED)
        assert ended.err.count("error: step 4, slot 1: the loss is nan") == 1, (
            "said by one rank, once"
        )
        assert "docs/epoch 0/window " in ended.err and "spoilt.jsonl, line" in ended.err
        assert checkpoints(bad.at(directory)) == [3] and steps_of(bad.at(directory)) == [
            1,
            2,
            3,
        ]
        assert [
            (one["reason"], one["saved"]) for one in events(bad.at(directory), "stop")
        ] == [("non_finite", True)] * attempt

    write(bad, skipSteps=[4])
    ended = bad.run(*arguments, name="bad", directory=directory, expect=STOPPED_SAVED)
    assert "error: step 5, slot 2: the loss is nan" in ended.err
    assert checkpoints(bad.at(directory)) == [3, 4], "the state before a bad step is saved"
    write(bad, skipSteps=[4, 5])
    bad.run(*arguments, name="bad", directory=directory)

    rows, plain = curve(bad.at(directory)), curve(bad.at())
    assert steps_of(bad.at(directory)) == list(range(1, 9))
    assert [step for step, row in rows.items() if row["skipped"]] == [4, 5]
    assert all(row["skipped"] in (None, "requested") for row in rows.values())
    assert [rows[step]["learning_rate"] for step in rows] == [
        plain[step]["learning_rate"] for step in plain
    ]
    kept = [step for step in rows if step not in (4, 5)]
    assert [rows[step]["sample_hash"] for step in kept] == [
        plain[step]["sample_hash"] for step in kept
    ]
    assert rows[4]["loss"] is None and rows[4]["tokens"] == 0


@pytest.mark.capability("O-78")
def test_non_finite_steps_in_a_row_are_skipped_up_to_the_configured_number(
    bad: Experiment,
) -> None:
    write(bad, onNonFinite={"skip": 1, "then": "stop"})
    ended = bad.run("--workers", "2", name="bad", directory="one", expect=STOPPED_SAVED)
    assert "skipped step=4" in ended.out and "error: step 5, slot 2" in ended.err
    assert checkpoints(bad.at("one")) == [3, 4]
    assert [
        (one["step"], one["why"], one["in_a_row"])
        for one in events(bad.at("one"), "skipped")
    ] == [(4, "loss", 1)]
    bad.run("--workers", "2", name="bad", directory="one", expect=STOPPED_SAVED)
    assert steps_of(bad.at("one")) == [1, 2, 3, 4], (
        "how many were bad in a row is forgotten by a resume"
    )

    write(bad, onNonFinite={"skip": 2})
    bad.run("--workers", "2", name="bad", directory="one")
    assert [row["skipped"] for row in metric_rows(bad.at("one"))] == [None] * 3 + [
        "loss"
    ] * 2 + [None] * 3
    write(bad, skipSteps=[5, 4, 5])
    bad.run("--workers", "2", name="bad", directory="named")
    assert_same_state(bad.at("one"), bad.at("named"))


def test_a_skipped_step_is_not_an_optimizer_update_in_a_resumed_run_either(
    experiment: Experiment,
) -> None:
    """Adam's own count follows its updates, not the steps: with another one the next updates would have other
    sizes."""
    experiment.write(recipe(skipSteps=[2, 3]))
    experiment.run(directory="whole")
    experiment.run("--stop-after-steps", "4", directory="resumed", expect=STOPPED_SAVED)
    experiment.run(directory="resumed")
    assert_same_state(experiment.at("whole"), experiment.at("resumed"))


def test_a_non_finite_first_step_loses_nothing(bad: Experiment) -> None:
    path: Path = bad.path / "spoilt.jsonl"
    before = path.read_text()
    spoil(bad, [(1, 0)])
    write(bad)
    ended = bad.run(name="bad", directory="first", expect=STOPPED_SAVED)
    path.write_text(before)
    assert "error: step 1, slot 0: the loss is nan" in ended.err
    assert steps_of(bad.at("first")) == [] and checkpoints(bad.at("first")) == []


def test_a_process_that_receives_state_gets_the_number_of_updates(
    make_elastic: MakeCluster, undisturbed: Experiment
) -> None:
    skipping = "spec.training.skipSteps=[2, 3]"
    undisturbed.run("--set", skipping, directory="skipping")
    faults = [fault("SIGKILL", "slot", node=1, step=6, to="node", name="kill")]
    cluster = make_elastic(expect=2).start(faults=faults, sets=[skipping])
    cluster.until(lambda: cluster.has_happened("kill"), "the kill")
    cluster.nodes[1].wait()
    cluster.start_node(1, sets=[skipping])
    cluster.finish()
    cluster.check(undisturbed.at("skipping"))
    assert_same_state(cluster.directory, undisturbed.at("skipping"))


def test_a_non_finite_step_ends_a_run_of_several_nodes_saved(
    make_elastic: MakeCluster, bad: Experiment
) -> None:
    sources = "spec.training.data.sources=[{name: docs, path: spoilt.jsonl}]"
    cluster = make_elastic(bad, expect=2).start(
        sets=[sources, "spec.training.initFrom={path: exported}"]
    )
    cluster.finish(STOPPED_SAVED)
    assert cluster.coordinator is not None and cluster.coordinator.wait() == STOPPED_SAVED
    (end,) = cluster.log("finished")
    assert end["reason"] == "non_finite"
    assert checkpoints(cluster.directory) == [3]
