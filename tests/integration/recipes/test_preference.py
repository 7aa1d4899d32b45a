"""The recipe of preferences: elastic and resumable like any other, with the reference that it began with."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from recipe_runs import PAIRS, write_pairs
from run_helpers import (
    DONE,
    MODEL,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    read_lines,
    recipe,
    write_documents,
)
from run_helpers import fault as fault_here

ROOT = Path(__file__).resolve().parents[3]
MakeCluster = Callable[..., Cluster]
METRICS = {
    "accuracy",
    "margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_probability",
    "rejected_log_probability",
}


def write(experiment: Experiment, **changes: Any) -> None:
    experiment.write(elastic_recipe(**{**PAIRS, **changes}))
    write_pairs(experiment.path / "pairs.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """Its directory ``undisturbed`` was trained by one undisturbed process."""
    one = Experiment(tmp_path_factory.mktemp("preference"))
    write(one)
    train_undisturbed(one)
    yield one
    one.close()


def metrics(directory: Path) -> list[Any]:
    rows = curve(directory)
    return [rows[step]["metrics"] for step in sorted(rows)]


def evaluations(directory: Path) -> dict[tuple[int, str], Any]:
    """Return the evaluations by step and set; of a step that was evaluated twice, the last."""
    rows = read_lines(directory / "evaluation.jsonl")
    return {
        (row["step"], row["name"]): [row["loss"], row["tokens"], row["metrics"]]
        for row in rows
    }


def assert_same_run(whole: Experiment, directory: Path) -> None:
    one = whole.at("undisturbed")
    assert_same_curve(one, directory)
    assert_same_state(one, directory)
    assert metrics(one) == metrics(directory)
    assert evaluations(one) == evaluations(directory)


@pytest.mark.capability("A-80")
def test_a_run_starts_at_its_reference_and_learns_to_prefer(whole: Experiment) -> None:
    rows = curve(whole.at("undisturbed"))
    first, last = rows[1], rows[STEPS]
    assert first["metrics"].keys() == last["metrics"].keys() == METRICS
    # Model and reference are the same: no margin, and the loss of a coin.
    assert first["metrics"]["margin"] == first["metrics"]["chosen_reward"] == 0.0
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert last["loss"] < first["loss"] and last["metrics"]["margin"] > 0
    for row in rows.values():
        found = row["metrics"]
        rewards = found["chosen_reward"] - found["rejected_reward"]
        assert found["margin"] == pytest.approx(rewards, abs=1e-6)
        # The weight counts pairs; the tokens are those of both rows of each pair.
        assert row["valid_tokens"] == 6 and row["tokens"] == 6 * 2 * 48
    held_out = evaluations(whole.at("undisturbed"))
    assert {step for step, _ in held_out} == {4, 8, STEPS}
    assert all(
        tokens == 5 and found.keys() == METRICS for _, tokens, found in held_out.values()
    )


@pytest.mark.acceptance("8d-1b:preference")
@pytest.mark.capability("A-80")
def test_a_killed_and_resumed_run_ends_bit_equal_to_an_undisturbed_run(
    whole: Experiment,
) -> None:
    kill = fault_here("step", call=7, action="SIGKILL", to="command")
    whole.run(directory="killed", expect=None, faults=[kill])
    whole.run(directory="killed", expect=DONE)
    assert_same_run(whole, whole.at("killed"))


@pytest.mark.acceptance("8d-17a:preference")
@pytest.mark.parametrize("workers", ["4", pytest.param("3", marks=pytest.mark.long)])
def test_workers_of_one_node_are_bit_equal(whole: Experiment, workers: str) -> None:
    """Six pairs a step are cut evenly over three workers, and not over four."""
    whole.run("--workers", workers, directory=f"workers-{workers}")
    assert_same_run(whole, whole.at(f"workers-{workers}"))


@pytest.mark.long
def test_micro_batches_of_several_pairs_have_the_same_losses(whole: Experiment) -> None:
    write(whole, batching={"globalBatchSize": 6, "microBatchSize": 3})
    whole.run(directory="larger")
    write(whole)
    assert_same_curve(
        whole.at("undisturbed"), whole.at("larger"), exact=False, tolerance=1e-5
    )


@pytest.mark.acceptance("8d-1f:preference", "8d-1g:preference", "8d-2e:preference")
@pytest.mark.capability("A-80")
@pytest.mark.parametrize(
    "number", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.long)]
)
def test_the_loss_of_one_of_two_nodes_changes_no_bit(
    make_elastic: MakeCluster, whole: Experiment, number: str
) -> None:
    dies = fault(number, "update", rank=1, step=6, to="node")
    cluster = make_elastic(whole, expect=2).start(faults=[dies])
    cluster.until(
        lambda: any(one.poll() is not None for one in cluster.nodes.values()),
        "a node's end",
    )
    left = [node for node, one in cluster.nodes.items() if one.poll() is None]
    assert len(left) == 1
    if number == "SIGKILL":
        assert -signal.SIGKILL in [one.poll() for one in cluster.nodes.values()]
    cluster.finish(nodes=left)
    cluster.check(whole.at("undisturbed"))
    assert_same_run(whole, cluster.directory)


@pytest.mark.acceptance("8d-1h:preference")
@pytest.mark.long
@pytest.mark.capability("A-80")
def test_a_node_that_joins_midway_gets_the_same_reference(
    make_elastic: MakeCluster, whole: Experiment
) -> None:
    held = fault("hold", "slot", node=0, step=5, name="held")
    cluster = make_elastic(whole, expect=1).start(faults=[held])
    cluster.until_held()
    cluster.start_node(1)
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish()
    cluster.check(whole.at("undisturbed"))
    assert_same_run(whole, cluster.directory)
    first = cluster.steps(1)[0]
    assert 5 <= first < STEPS and cluster.steps(1) == list(range(first, STEPS + 1))


@pytest.mark.acceptance("8d-6a:preference")
@pytest.mark.capability("A-80", "O-39")
def test_evaluate_gives_the_measurements_of_the_run_itself(whole: Experiment) -> None:
    run = whole.at("undisturbed")
    rows = json.loads(whole.command("evaluate", str(run), "--json").expect(DONE).out)[
        "results"
    ]
    own = evaluations(run)
    assert [[row["loss"], row["tokens"], row["metrics"]] for row in rows] == [
        own[STEPS, "heldOut"]
    ]


SHARDED = ("--workers", "2", "--set", "spec.training.runtime.parallelism=fsdp2")


@pytest.mark.long
@pytest.mark.parametrize("chunk", [20, None])
def test_shards_train_with_the_same_reference(
    make_experiment: Callable[[], Experiment], chunk: int | None
) -> None:
    """``chunk``: logits in chunks are made with a head that is gathered with its model."""
    experiment = make_experiment()
    write(experiment, reproducibility={"elastic": "fast"}, runtime={"lossChunk": chunk})
    experiment.run(*SHARDED, directory="sharded")
    experiment.run(directory="alone")
    assert_same_curve(
        experiment.at("alone"), experiment.at("sharded"), exact=False, tolerance=1e-5
    )
    assert metrics(experiment.at("sharded"))[0]["margin"] == 0.0
    kill = fault_here("step", call=8, action="SIGKILL", to="command")
    experiment.run(*SHARDED, directory="killed", faults=[kill], expect=-9)
    experiment.run(*SHARDED, directory="killed")
    assert_same_curve(experiment.at("sharded"), experiment.at("killed"))
    assert_same_state(experiment.at("sharded"), experiment.at("killed"))


@pytest.mark.long
def test_the_reference_of_a_sharded_model_computes_in_the_dtypes_of_the_model(
    experiment: Experiment,
) -> None:
    """Its norms too: under autocast alone they are computed in fp32, and the first rewards are not 0."""
    runtime = {"precision": "bf16-autocast", "lossChunk": 20}
    write(experiment, reproducibility={"elastic": "fast"}, runtime=runtime)
    experiment.run(*SHARDED, "--stop-after-steps", "1", expect=STOPPED_SAVED)
    (first,) = metrics(experiment.at())
    assert first["chosen_reward"] == first["rejected_reward"] == first["margin"] == 0.0


@pytest.mark.acceptance("8d-12d:preference")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            '{"prompt": "a", "chosen": "b"}',
            "pairs.jsonl:61: the row has no field 'rejected'; its fields are 'prompt', 'chosen'",
        ),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "b"}',
            "pairs.jsonl:61: the fields 'chosen' and 'rejected' are the same",
        ),
        (
            json.dumps({"prompt": "a" * 70, "chosen": "b", "rejected": "c"}),
            "pairs.jsonl:61: the row has 72 tokens, and a sample holds 49",
        ),
    ],
)
def test_a_row_that_is_not_a_pair_is_refused_with_its_line(
    experiment: Experiment, row: str, said: str
) -> None:
    write(experiment)
    with (experiment.path / "pairs.jsonl").open("a") as file:
        file.write(row + "\n")
    assert said in experiment.run(expect=USER_ERROR).err
    assert checkpoints(experiment.at()) == []


@pytest.fixture(scope="module")
def base(make_experiment: Callable[[], Experiment]) -> Experiment:
    """Two runs of the same small model, ``base`` and ``other``, and ``exported`` of the first."""
    experiment = make_experiment()
    for name, seed in (("base", 0), ("other", 1)):
        write_documents(experiment.path / "documents.jsonl", seed=seed)
        experiment.write(recipe(data={"sequenceLength": 16}), name=name)
        experiment.run(name=name)
    for name in ("base", "other"):
        run, exported = str(experiment.at(name)), str(experiment.path / f"exported-{name}")
        experiment.command("checkpoint", "export", run, "--output", exported).expect(DONE)
    return experiment


@pytest.mark.long
def test_a_run_from_given_weights_has_them_as_its_reference(base: Experiment) -> None:
    """Of a run, and of a directory of its weights that ``initFrom`` or ``model`` names; resumed, they are read
    again."""
    write(base, initFrom={"path": "runs/base"})
    base.run("--stop-after-steps", "7", directory="run", expect=STOPPED_SAVED)
    base.run("--workers", "2", directory="run")
    found = metrics(base.at("run"))
    assert found[0]["margin"] == 0.0 and found[-1]["margin"] > 0

    training = elastic_recipe(**PAIRS)
    for name, changes in (
        ("initFrom", {"initFrom": {"path": "exported-base"}}),
        ("model", {"model": {"path": "exported-base"}, "tokenizer": {"type": "byte"}}),
    ):
        base.write({**training, **changes})
        base.run("--stop-after-steps", "2", directory=name, expect=STOPPED_SAVED)
        assert metrics(base.at(name)) == found[:2]


def test_a_run_keeps_its_first_reference_while_the_referenced_run_trains_on(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(data={"sequenceLength": 16}), name="first")
    three = ("--stop-after-steps", "3")
    experiment.run(*three, name="first", expect=STOPPED_SAVED)
    write(experiment, initFrom={"path": "runs/first", "step": 3})
    experiment.run(directory="undisturbed")

    # Killed before its first checkpoint, and stopped after it, while the other run has newer checkpoints.
    write(experiment, initFrom={"path": "runs/first"})
    kill = fault_here("step", call=3, action="SIGKILL", to="command")
    experiment.run(directory="kept", expect=None, faults=[kill])
    assert checkpoints(experiment.at("kept")) == []
    experiment.run(*three, name="first", expect=STOPPED_SAVED)
    experiment.run("--stop-after-steps", "7", directory="kept", expect=STOPPED_SAVED)
    experiment.run(name="first")
    experiment.run("--workers", "2", directory="kept")
    assert checkpoints(experiment.at("first")) == [3, 6, 8]
    assert_same_run(experiment, experiment.at("kept"))
    record = json.loads((experiment.at("kept") / "run.json").read_text())
    assert record["begunFrom"]["checkpoint"] == "step-3"

    # It is also evaluated with that reference.
    run = experiment.at("kept")
    command = experiment.command("evaluate", str(run), "--json").expect(DONE)
    (row,) = json.loads(command.out)["results"]
    own = evaluations(run)[STEPS, "heldOut"]
    assert [row["loss"], row["tokens"], row["metrics"]] == own


@pytest.mark.long
@pytest.mark.capability("A-80")
@pytest.mark.parametrize(
    "first",
    [
        {},
        {"initFrom": {"path": "runs/base"}},
        {"preference": {**PAIRS["preference"], "reference": "runs/base"}},
    ],
    ids=["seed", "initial", "named"],
)
def test_a_run_that_continues_the_state_of_another_keeps_its_reference(
    base: Experiment, first: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In any way that the first run names it, and also through a run that itself continues another run."""
    name = request.node.callspec.id
    write(base, **first)
    base.run(directory=f"first-{name}")
    for of, step, after in (("first", 5, "second"), ("second", 10, "third")):
        begun = {"path": f"runs/{of}-{name}", "step": step, "load": "everything"}
        write(base, initFrom=begun)
        # Stopped once: the reference is found again at each start.
        stopped = ("--stop-after-steps", "1")
        base.run(*stopped, directory=f"{after}-{name}", expect=STOPPED_SAVED)
        base.run(directory=f"{after}-{name}")
        whole, rest = curve(base.at(f"first-{name}")), curve(base.at(f"{after}-{name}"))
        assert sorted(rest) == list(range(step + 1, STEPS + 1))
        for at, row in rest.items():
            assert (row["loss"], row["metrics"]) == (
                whole[at]["loss"],
                whole[at]["metrics"],
            )
        assert_same_state(base.at(f"first-{name}"), base.at(f"{after}-{name}"))


@pytest.mark.long
def test_a_run_continues_from_a_checkpoint_that_was_copied_without_its_run(
    base: Experiment,
) -> None:
    """It cannot be known what the reference was, so that it has to be named."""
    write(base, initFrom={"path": "runs/base"})
    base.run(directory="copied")
    copied = base.path / "copied" / "step"
    newest = max(step for step in checkpoints(base.at("copied")) if step < STEPS)
    shutil.copytree(base.at("copied") / "checkpoints" / f"step-{newest}", copied)
    begun = {"path": "copied/step", "load": "everything"}
    write(base, initFrom=begun)
    err = base.run(directory="unnamed", expect=USER_ERROR).err
    assert (
        "spec.training.initFrom.path: " in err and "is not in the directory of a run" in err
    )
    assert "Name that reference as preference.reference" in err
    own = {**PAIRS["preference"], "reference": "runs/base"}
    write(base, initFrom=begun, preference=own)
    base.run(directory="named-copy")
    whole, rest = curve(base.at("copied")), curve(base.at("named-copy"))
    assert (
        [row["loss"] for row in rest.values()] == [whole[at]["loss"] for at in rest] != []
    )


@pytest.mark.long
def test_the_manifest_can_name_another_reference(base: Experiment) -> None:
    found = []
    for reference in ("runs/other", "exported-other"):
        own = {**PAIRS["preference"], "reference": reference}
        write(base, initFrom={"path": "runs/base"}, preference=own)
        directory = reference.replace("/", "-")
        base.run(directory=directory)
        found.append(metrics(base.at(directory)))
    # Not the model that the run begins with: there are margins from the first step on.
    assert found[0] == found[1] and found[0][0]["margin"] != 0.0


@pytest.mark.long
def test_a_joining_node_reads_the_reference_that_the_manifest_names(
    make_elastic: MakeCluster, base: Experiment
) -> None:
    """Neither the initial weights of the run nor the current weights of a member."""
    own = {**PAIRS["preference"], "reference": "runs/other"}
    write(base, initFrom={"path": "runs/base"}, preference=own)
    base.run(directory="named")
    held = fault("hold", "slot", node=0, step=5, name="held")
    cluster = make_elastic(base, expect=1).start(faults=[held])
    cluster.until_held()
    cluster.start_node(1)
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish()
    cluster.check(base.at("named"))
    assert metrics(cluster.directory) == metrics(base.at("named"))
    assert metrics(cluster.directory)[0]["margin"] != 0.0
    assert 5 <= cluster.steps(1)[0] < STEPS


@pytest.mark.long
def test_a_run_does_not_continue_with_another_reference(base: Experiment) -> None:
    """Known by its content: the path is the same."""
    place = base.path / "reference"
    shutil.copytree(base.path / "exported-base", place)
    own = {**PAIRS["preference"], "reference": "reference"}
    write(base, preference=own)
    base.run("--stop-after-steps", "7", directory="swapped", expect=STOPPED_SAVED)
    before = checkpoints(base.at("swapped"))
    shutil.rmtree(place)
    shutil.copytree(base.path / "exported-other", place)
    err = base.run(directory="swapped", expect=USER_ERROR).err
    assert "the frozen modules reference are not those the run began with" in err
    assert "Restore what they are made from" in err
    assert checkpoints(base.at("swapped")) == before

    # With the same content again, it continues.
    shutil.rmtree(place)
    shutil.copytree(base.path / "exported-base", place)
    base.run(directory="swapped")


@pytest.mark.parametrize("reference", ["runs/other", "exported-other"])
def test_a_reference_that_computes_another_function_is_refused_by_its_key(
    base: Experiment, reference: str
) -> None:
    directory = reference.replace("/", "-")
    own = {**PAIRS["preference"], "reference": reference}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    write(base, preference=own, model={"config": {**MODEL, **rope}})
    for command in ("preflight", "run"):
        place = ("--run-directory", str(base.at(f"{command}-{directory}")))
        refused = base.command(command, "tiny.yaml", *place).expect(USER_ERROR)
        assert (
            f"spec.training.preference.reference: {reference} has rope_parameters.rope_theta "
            "10000, and spec.training.model has 3" in refused.err
        )
        assert "the weights would compute another function" in refused.err
        assert not (base.at(f"{command}-{directory}") / "run.json").exists()

    # Differences without effect are listed; ids that an export has set are not differences.
    write(base, preference=own, model={"config": {**MODEL, "attention_dropout": 0.1}})
    few = ("--stop-after-steps", "1")
    accepted = base.run(*few, directory=f"same-{directory}", expect=STOPPED_SAVED)
    assert (
        "warning: spec.training.preference.reference: attention_dropout is 0.1 here and 0 "
        f"in {reference}" in accepted.err
    )
    assert "token_id" not in accepted.err
    assert len(metrics(base.at(f"same-{directory}"))) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"preference": {"reference": "nowhere"}},
            "spec.training.preference.reference: ",
        ),
        ({"initFrom": {"path": "nowhere"}}, "spec.training.initFrom.path: "),
        (
            {"preference": {"loss": "hinge", "labelSmoothing": 0.1}},
            "spec.training.preference.labelSmoothing: has no meaning with loss hinge",
        ),
    ],
)
def test_untrainable_settings_are_refused_before_anything_is_written(
    experiment: Experiment, changes: dict[str, Any], said: str
) -> None:
    write(experiment, **changes)
    err = experiment.run(expect=USER_ERROR).err
    assert said in err
    if "nowhere" in str(changes):
        assert "is no directory; the reference is read from it at each start" in err
    assert (
        not (experiment.at() / "run.json").exists() and checkpoints(experiment.at()) == []
    )


@pytest.mark.acceptance("8d-4i:preference")
@pytest.mark.long
def test_another_beta_is_another_recipe(experiment: Experiment) -> None:
    write(experiment)
    experiment.run("--stop-after-steps", "3", expect=STOPPED_SAVED)
    write(experiment, preference={"beta": 0.7, "labelSmoothing": 0.1})
    err = experiment.run(expect=USER_ERROR).err
    assert "spec.training.preference.beta: 0.7 here, but the run in" in err


def test_a_user_task_derived_from_the_recipe_reads_pairs(
    experiment: Experiment,
) -> None:
    (experiment.path / "mine.py").write_text(
        "from evergrad_trainer.recipes.preference import Preference\n\n"
        "class Mine(Preference):\n    pass\n"
    )
    write(experiment, recipe="mine:Mine", horizon={"steps": 2})
    experiment.run(expect=DONE)
    assert set(curve(experiment.at())[1]["metrics"]) == METRICS


@pytest.mark.long
@pytest.mark.capability("A-80")
def test_the_manifest_converted_from_arctictraining_runs(base: Experiment) -> None:
    """With a model of bytes and two of its processes: all else is as the page has it."""
    page = (ROOT / "docs/reference/migrating/arctictraining.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(apiVersion.*?)^```$", page, re.MULTILINE | re.DOTALL)
    training = yaml.safe_load(text)["spec"]["training"]
    training["tokenizer"] = {"type": "byte"}
    training["data"]["sequenceLength"] = 48
    training["rows"] |= PAIRS["rows"]
    training["runtime"] |= {"precision": "fp32", "device": "cpu", "threads": 1}
    base.write(training, name="chat-dpo")
    write_pairs(base.path / "choices.jsonl", count=160)
    shutil.copytree(base.path / "exported-base", base.path / "models" / "chat")
    base.run("--workers", "2", name="chat-dpo", expect=DONE)
    rows = curve(base.at("chat-dpo"))
    assert set(rows[1]["metrics"]) == METRICS and rows[1]["metrics"]["margin"] == 0.0
    assert len(rows) == 3 and rows[1]["valid_tokens"] == 64


@pytest.mark.capability("A-80")
def test_the_example_generates_its_pairs_and_trains_on_them(experiment: Experiment) -> None:
    folder = ROOT / "examples" / "preference"
    script = str(folder / "make_pairs.py")
    subprocess.run([sys.executable, script, str(experiment.path)], check=True)
    assert len((experiment.path / "pairs.jsonl").read_text().splitlines()) > 500
    shutil.copy(folder / "sft.yaml", experiment.path / "brief-sft.yaml")
    shutil.copy(folder / "trainingrun.yaml", experiment.path / "brief.yaml")

    def run(name: str, **changes: Any) -> None:
        steps = {"schedule.warmup": 0, "schedule.decay": 0, "runtime.threads": 1}
        sets = [
            part
            for key, value in {**steps, **changes}.items()
            for part in ("--set", f"spec.training.{key}={value}")
        ]
        experiment.run(*sets, name=name, expect=DONE)

    run("brief-sft", **{"horizon.steps": 2, "checkpoint.every.steps": 2})
    first = {"horizon.steps": 2, "evaluation.every.steps": 2, "evaluation.samples": 4}
    run("brief", **first, **{"initFrom.path": "runs/brief-sft"})
    found = evaluations(experiment.at("brief"))
    assert found[0, "heldOut"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[2, "heldOut"][2]["margin"] != 0.0
