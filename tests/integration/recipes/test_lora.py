"""Adapters for a stored model, with their average and noise on the embeddings: saved, resumed, computed by
several processes and sent to joining nodes, with the bits of an undisturbed run in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from pages import play, read_blocks
from run_helpers import (
    DONE,
    MODEL,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    final_state,
)
from run_helpers import fault as run_fault

LORA: dict[str, Any] = {
    "model": {
        "config": None,
        "path": "base",
        "resizeEmbeddings": {"multipleOf": 8},
        "configOverrides": {"attention_dropout": 0.1},
        "embeddingNoise": 5,
        "lora": {"rank": 4, "dropout": 0.1},
    },
    "tokenizer": {"type": "byte"},
    "ema": {"decay": 0.9, "warmup": True, "evaluate": True},
    "optimizer": {"learningRate": 1e-2},
    "evaluation": {"every": {"steps": 4}},
    "checkpoint": {"asynchronous": False},
    "data": {"heldOut": {"count": 5}},
}


def write_lora(experiment: Experiment, **changes: Any) -> None:
    """Write a stored model with fewer ids than the tokenizer, and a run that trains adapters for it."""
    from evergrad_manifest.training import Model
    from evergrad_trainer.models.build import build_model, plan_model

    settings = Model.model_validate({"config": MODEL})
    plan = plan_model(settings, base_directory=experiment.path, vocab_size=250)
    build_model(plan, seed=1, precision="fp32").save_pretrained(experiment.path / "base")
    experiment.write(elastic_recipe(**{**LORA, **changes}))


@pytest.fixture(scope="module")
def adapted(make_experiment: Callable[[], Experiment]) -> Experiment:
    """An experiment whose run ``undisturbed`` was trained by one undisturbed process."""
    experiment = make_experiment()
    write_lora(experiment)
    train_undisturbed(experiment)
    return experiment


def assert_equal(experiment: Experiment, directory: Path) -> None:
    undisturbed = experiment.at("undisturbed")
    assert_same_curve(undisturbed, directory)
    assert_same_state(undisturbed, directory)
    losses = [
        [
            (row["step"], row["loss"])
            for row in map(json.loads, path.read_text().splitlines())
        ]
        for path in (one / "evaluation.jsonl" for one in (undisturbed, directory))
    ]
    assert dict(losses[0]) == dict(losses[1])


@pytest.mark.capability("A-40", "C-37", "C-51", "T-X6")
def test_a_run_of_adapters_learns_and_saves_only_the_adapters(adapted: Experiment) -> None:
    directory = adapted.at("undisturbed")
    rows = curve(directory)
    assert rows[STEPS]["loss"] < rows[1]["loss"]
    state = final_state(directory)
    assert state and {name.partition(".")[0] for name in state} == {
        "model",
        "optimizer",
        "ema",
    }
    assert all("lora_" in name for name in state)
    [newest] = (directory / "checkpoints").glob(f"step-{STEPS}*/manifest.json")
    extra = json.loads(newest.read_text())["extra"]
    assert set(extra["state"]["frozen"]) == {"model.base"}
    assert extra["state"]["ema"] == {"updates": STEPS}


@pytest.mark.capability("A-40")
def test_a_killed_run_of_adapters_resumes_bit_equal(
    adapted: Experiment,
) -> None:
    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    adapted.run(directory="killed", expect=-9, faults=[killed])
    adapted.run(directory="killed")
    assert_equal(adapted, adapted.at("killed"))


@pytest.mark.long
def test_the_commands_of_the_page_export_a_whole_model_and_the_adapters_alone(
    adapted: Experiment, tmp_path: Path
) -> None:
    _, export = read_blocks("docs/train/adapters.md")
    play(export.replace("runs/tuned", str(adapted.at("undisturbed"))), tmp_path)
    assert (tmp_path / "tuned/config.json").is_file()
    assert not (tmp_path / "tuned/adapter_config.json").exists()
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files


@pytest.mark.long
def test_two_processes_are_bit_equal_to_one(adapted: Experiment) -> None:
    adapted.run("--workers", "2", directory="two")
    assert_equal(adapted, adapted.at("two"))


@pytest.mark.long
def test_a_lost_node_and_a_joining_node_change_no_bit(
    adapted: Experiment, make_elastic: Callable[..., Cluster]
) -> None:
    kill = fault("SIGKILL", "update", node=1, step=4, to="node", name="kill")
    hold = fault("hold", "slot", node=0, step=7, name="held")
    cluster = make_elastic(adapted).start(faults=[kill, hold])
    cluster.until_held()
    cluster.start_node(3)
    cluster.until_planned("node 3 joined")
    cluster.release("held")
    cluster.finish(nodes=[0, 2, 3])
    assert cluster.has_happened("kill")
    cluster.check(adapted.at("undisturbed"))
    assert_equal(adapted, cluster.directory)


@pytest.mark.long
def test_a_checkpoint_can_be_evaluated_with_its_average_or_with_its_weights(
    adapted: Experiment,
) -> None:
    directory = adapted.at("undisturbed")
    losses = []
    for more in ([], ["--weights", "average"], ["--weights", "trained"]):
        ended = adapted.command("evaluate", str(directory), "--json", *more).expect(DONE)
        [row] = json.loads(ended.out)["results"]
        losses.append(row["loss"])
    rows = [
        json.loads(line)
        for line in (directory / "evaluation.jsonl").read_text().splitlines()
    ]
    assert losses[0] == losses[1] == rows[-1]["loss"] != losses[2]


@pytest.mark.long
def test_rows_can_be_learned_by_adapters_too(experiment: Experiment) -> None:
    rows = [{"prompt": f"{one}+1=", "completion": str(one + 1)} for one in range(80)]
    (experiment.path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    data = {
        "sources": [{"name": "sums", "path": "rows.jsonl"}],
        "sequenceLength": 32,
        "heldOut": {"count": 5},
    }
    write_lora(experiment, recipe="sft", data=data)
    train_undisturbed(experiment)
    experiment.run(
        directory="killed",
        expect=-9,
        faults=[run_fault("step", call=8, action="SIGKILL", to="command")],
    )
    experiment.run(directory="killed", expect=DONE)
    assert_equal(experiment, experiment.at("killed"))


@pytest.mark.long
def test_a_run_that_loads_everything_of_an_adapter_run_ends_equal(
    adapted: Experiment,
) -> None:
    theirs = str(adapted.at("undisturbed"))
    begun = {"path": theirs, "load": "everything", "step": 5}
    write_lora(adapted, initFrom=begun)
    try:
        adapted.run(directory="begun")
    finally:
        write_lora(adapted)
    assert_same_state(adapted.at("undisturbed"), adapted.at("begun"))
    assert min(curve(adapted.at("begun"))) == 6


@pytest.mark.long
def test_adapters_learn_pairs_with_their_base_as_the_reference(
    experiment: Experiment,
) -> None:
    rows = [
        {"prompt": f"{one}+1=", "chosen": str(one + 1), "rejected": "no"}
        for one in range(80)
    ]
    (experiment.path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    data = {
        "sources": [{"name": "sums", "path": "rows.jsonl"}],
        "sequenceLength": 32,
        "heldOut": {"count": 5},
    }
    # No noise: at the first step model and reference are the same.
    model = {"embeddingNoise": None, "configOverrides": {}, "lora": {"rank": 4}}
    write_lora(
        experiment,
        recipe="preference",
        rows={},
        data=data,
        model={**LORA["model"], **model},
    )
    train_undisturbed(experiment)
    steps = curve(experiment.at("undisturbed"))
    assert steps[1]["metrics"]["margin"] == 0.0 < steps[STEPS]["metrics"]["margin"]
    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    experiment.run(directory="killed", expect=-9, faults=[killed])
    experiment.run(directory="killed", expect=DONE)
    assert_equal(experiment, experiment.at("killed"))


@pytest.mark.long
def test_a_sharded_run_of_adapters_equals_a_run_of_one_process(
    experiment: Experiment,
) -> None:
    ema = {"decay": 0.9, "warmup": True}
    fast = {"reproducibility": {"elastic": "fast"}, "ema": ema}
    write_lora(experiment, **fast)
    train_undisturbed(experiment)
    write_lora(experiment, **fast, runtime={"parallelism": "fsdp2"})
    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    experiment.run("--workers", "2", directory="sharded", expect=-9, faults=[killed])
    experiment.run("--workers", "2", directory="sharded")
    assert_same_curve(
        experiment.at("undisturbed"), experiment.at("sharded"), exact=False, tolerance=1e-4
    )
    one, other = (
        final_state(experiment.at("undisturbed")),
        final_state(experiment.at("sharded")),
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        if name.startswith("ema."):
            assert torch.allclose(value, other[name], atol=1e-3), name


@pytest.mark.long
def test_a_changed_base_is_refused(adapted: Experiment) -> None:
    from safetensors.torch import load_file, save_file

    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    adapted.run(directory="other", expect=-9, faults=[killed])
    path = adapted.path / "base" / "model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    try:
        ended = adapted.run(directory="other", expect=USER_ERROR)
    finally:
        path.write_bytes(before)
    assert "the frozen modules model.base are not those the run began with" in ended.err
