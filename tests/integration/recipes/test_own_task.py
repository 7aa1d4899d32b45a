"""A user's task, examples/custom: elastic like any other, and never trained in two versions at the same
time."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, elastic_recipe, fault, train_undisturbed
from run_helpers import (
    DONE,
    INTERNAL,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    final_state,
    read_lines,
    recipe,
)

ROOT = Path(__file__).resolve().parents[3]
TASK = (ROOT / "examples/custom/averaged.py").read_text("utf-8")
OWN: dict[str, Any] = {
    "recipe": "averaged:Averaged",
    "options": {"decay": 0.5},
    "data": {"heldOut": {"fraction": "20%"}},
    "evaluation": {"every": {"steps": 6}},
}


def write_own(experiment: Experiment, **changes: Any) -> None:
    experiment.write(elastic_recipe(**OWN, **changes))
    (experiment.path / "averaged.py").write_text(TASK, "utf-8")


@pytest.fixture(scope="module")
def own(make_experiment: Callable[[], Experiment]) -> Iterator[Experiment]:
    """The example's task over the tests' documents, trained by one process."""
    experiment = make_experiment()
    write_own(experiment)
    train_undisturbed(experiment)
    yield experiment


@pytest.fixture
def make_own(own: Experiment, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        path = tmp_path / f"cluster-{len(clusters)}"
        path.mkdir()
        clusters.append(Cluster(own, path, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.mark.capability("O-3", "O-5")
def test_three_nodes_of_which_two_die_end_bit_equal_to_an_undisturbed_run(
    own: Experiment, make_own: Callable[..., Cluster]
) -> None:
    """One node is killed within a step and replaced, another between two steps; the joining node also
    receives the average of the weights."""
    kills = [
        fault("SIGKILL", "slot", node=1, step=3, to="node", name="first"),
        fault("SIGKILL", "report", node=2, step=8, to="node", name="second"),
    ]
    cluster = make_own().start(faults=kills)
    cluster.until(lambda: cluster.has_happened("first"), "the first kill")
    cluster.start_node(1)
    cluster.finish(nodes=[0, 1])
    cluster.check(own.at("undisturbed"))
    assert any(name.startswith("kept.") for name in final_state(cluster.directory))


@pytest.mark.capability("G-90", "T-6")
def test_metrics_and_evaluators_of_the_task_are_in_the_files_of_the_run(
    own: Experiment,
) -> None:
    rows = curve(own.at("undisturbed"))
    assert all(0 <= row["metrics"]["accuracy"] <= 1 for row in rows.values())
    evaluations = read_lines(own.at("undisturbed") / "evaluation.jsonl")
    assert {row["name"] for row in evaluations} == {"heldOut", "average"}
    assert all("accuracy" in row["metrics"] for row in evaluations)
    last = {row["name"]: row["loss"] for row in evaluations}
    assert last["average"] != last["heldOut"]


def test_two_versions_of_the_task_file_never_train_together(
    own: Experiment, make_own: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_own(expect=1, min_nodes=1, max_nodes=2)
    cluster.start(faults=[fault("hold", "report", node=0, step=2, name="held")])
    cluster.until_held()
    try:
        shutil.copy(own.path / "averaged.py", tmp_path / "before.py")
        (own.path / "averaged.py").write_text(
            TASK.replace("1 - self", "1.0 - self"), "utf-8"
        )
        other = cluster.start_node(1)
        assert other.wait() == INTERNAL, cluster.describe()
        assert "hello.fingerprint.task: " in other.said()
    finally:
        shutil.copy(tmp_path / "before.py", own.path / "averaged.py")
        cluster.release("held")
    cluster.finish(nodes=[0])
    assert {row["size"] for row in cluster.trace()} == {1}


@pytest.mark.acceptance("input-A-2")
@pytest.mark.capability("A-65", "T-3")
def test_invalid_options_and_a_missing_file_are_refused_like_any_field(
    experiment: Experiment,
) -> None:
    write_own(experiment)
    experiment.write(elastic_recipe(**{**OWN, "options": {"dekay": 2, "decay": 2}}))
    said = experiment.run(expect=USER_ERROR).err
    assert (
        "spec.training.options.decay: 2 is too large; it must be below 1. Lower it." in said
    )
    assert "spec.training.options.dekay: unknown key; did you mean `decay`?" in said
    (experiment.path / "averaged.py").unlink()
    for ended in (
        experiment.run(expect=USER_ERROR),
        experiment.command("validate", "tiny.yaml"),
    ):
        assert ended.code == USER_ERROR and "the module averaged was not found" in ended.err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "import torch\n",
            "import torch\nnone_such\n",
            "NameError: name 'none_such' is not defined",
        ),
        (
            "sums(output.logits",
            "sumz(output.logits",
            "NameError: name 'sumz' is not defined",
        ),
        (
            '"accuracy": (',
            '"precision": (',
            "the loss has the parts precision; the task's metrics are accuracy",
        ),
    ],
)
def test_an_error_in_task_code_is_reported_by_file_and_line_without_a_traceback(
    experiment: Experiment, old: str, new: str, said: str
) -> None:
    write_own(experiment)
    assert old in TASK
    (experiment.path / "averaged.py").write_text(TASK.replace(old, new, 1), "utf-8")
    err = experiment.run(expect=USER_ERROR).err
    assert said in err
    assert "precision" in said or f"{experiment.path}/averaged.py:" in err


@pytest.mark.acceptance("8d-16d")
@pytest.mark.capability("A-64", "O-4")
def test_a_task_carried_in_the_manifest_trains_like_the_one_next_to_it(
    own: Experiment, experiment: Experiment
) -> None:
    """As on a cluster, where ``evergrad submit`` puts the file into the run."""
    experiment.write(elastic_recipe(**OWN, files={"averaged.py": TASK}))
    experiment.run()
    assert_same_state(experiment.at(), own.at("undisturbed"))
    assert not (experiment.path / "averaged.py").exists()


@pytest.mark.capability("A-X1")
def test_a_run_that_continues_with_another_version_of_its_task_reports_it_by_name(
    experiment: Experiment,
) -> None:
    write_own(experiment, stop={"afterStep": 4})
    experiment.run(expect=STOPPED_SAVED)
    changed = TASK.replace("1 - self", "1.0 - self")
    assert changed != TASK
    write_own(experiment)
    (experiment.path / "averaged.py").write_text(changed, "utf-8")
    experiment.run()
    (event,) = [
        row
        for row in read_lines(experiment.at() / "events.jsonl")
        if row["type"] == "changed"
    ]
    (change,) = [one for one in event["changes"] if "averaged.py" in one["path"]]
    assert change["path"] == "spec.training.recipe (averaged.py)"
    assert change["old"] != change["new"] and event["step"] == 4
    # Each checkpoint holds the hash that its steps were trained with.
    hashes = {
        read_json(path)["extra"]["state"]["task"]["averaged.py"]
        for path in experiment.at().glob("checkpoints/step-*/manifest.json")
    }
    assert change["new"] in hashes


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


OBSERVING = (
    TASK
    + '''

class Counting(task.BaseObserver):
    """Remembers the samples of each step, and asks for a stop after the ninth."""

    def __init__(self):
        self.seen = []

    def step_end(self, record):
        self.seen.append(record.sample_hash)

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = list(state.get("seen", []))

    def wishes(self):
        return frozenset({"stop"} if len(self.seen) == 9 else ())


class Observed(Averaged):
    def observers(self):
        return [Counting()]
'''
)


@pytest.mark.acceptance("8d-16c")
def test_an_observer_of_the_task_survives_the_loss_of_rank_0_and_stops_the_run_for_all(
    own: Experiment, make_own: Callable[..., Cluster]
) -> None:
    """Rank 0 is killed, and returns: the stop follows the step after the ninth counted step."""
    (own.path / "averaged.py").write_text(OBSERVING, "utf-8")
    try:
        own.write(elastic_recipe(**{**OWN, "recipe": "averaged:Observed"}))
        kill = fault("SIGKILL", "slot", node=0, step=4, to="node", name="killed")
        cluster = make_own(expect=2, min_nodes=1, max_nodes=2).start(faults=[kill])
        cluster.until(lambda: cluster.has_happened("killed"), "the kill")
        cluster.start_node(0)
        cluster.finish(STOPPED_SAVED, nodes=[0, 1])
    finally:
        write_own(own)
    rows = curve(cluster.directory)
    assert max(rows) == 10
    stops = [
        row
        for row in read_lines(cluster.directory / "events.jsonl")
        if row["type"] == "stop"
    ]
    assert [(row["reason"], row["step"], row["saved"]) for row in stops] == [
        ("observer", 10, True)
    ]
    (newest,) = cluster.directory.glob("checkpoints/step-*10*")
    extra = json.loads((newest / "manifest.json").read_text("utf-8"))["extra"]
    assert extra["state"]["observers"]["Counting"]["seen"] == [
        rows[step]["sample_hash"] for step in range(1, 11)
    ]


PREFERRING = '''
"""Pretraining that stays near a frozen copy of the model, beside a small trained module and a kept centre."""

import torch
from torch import nn

from evergrad_trainer.models import parallel
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Loss, Modules, full_tensor

# What is large elsewhere is small here.
parallel.LARGE_BYTES = 0


class Near(Pretrain):
    metrics = {"distance": "Mean squared distance to the frozen copy's logits."}

    def build(self, build_model):
        trained = {"model": build_model(), "head": nn.Linear(8, 8)}
        return Modules(trained, {"reference": build_model()}, {"centre": torch.zeros(8)})

    def loss(self, modules, batch, stage):
        ids = batch["input_ids"]
        logits = modules.trained["model"](input_ids=ids).logits
        with torch.no_grad():
            before = modules.frozen["reference"](input_ids=ids).logits
        distance = (logits - before).square().mean(-1)
        guess = modules.trained["head"](logits[..., :8]) - modules.kept["centre"]
        loss = super().loss(modules, batch, stage).total
        parts = {"distance": distance.detach().sum()}
        return Loss(loss + 0.1 * distance.sum() + guess.square().sum(), parts)

    def after_update(self, modules, metrics):
        modules.kept["centre"].lerp_(full_tensor(modules.trained["head"].bias), 0.5)
'''


def test_several_modules_can_be_sharded_stopped_resumed_by_more_processes_and_exported(
    experiment: Experiment,
) -> None:
    def write(parallelism: str) -> None:
        runtime = {"parallelism": parallelism, "compareReplicasEvery": 2, "device": "cpu"}
        own = {"recipe": "near:Near", "evaluation": {"every": {"steps": 4}}}
        held_out = {"heldOut": {"count": 6}}
        experiment.write(recipe(**own, data=held_out, runtime=runtime))
        (experiment.path / "near.py").write_text(PREFERRING, "utf-8")

    write("dataParallel")
    experiment.run(directory="whole")
    write("fsdp2")
    stopped = ("--workers", "2", "--stop-after-steps", "4")
    experiment.run(*stopped, directory="cut", expect=STOPPED_SAVED)
    experiment.run("--workers", "4", directory="cut")
    assert_same_curve(experiment.at("whole"), experiment.at("cut"), exact=False)

    whole, cut = (final_state(experiment.at(name)) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert {"kept.centre", "head.weight", "optimizer.head.weight.exp_avg"} < cut.keys()
    assert not any(name.startswith("reference") for name in cut)
    for name, value in whole.items():
        # Adam divides by values that may be small: if a second moment is nearly zero, rounding becomes
        # visible.
        assert (value - cut[name]).abs().max() < 1e-3, name
    losses = [
        [row["loss"] for row in read_lines(experiment.at(name) / "evaluation.jsonl")]
        for name in ("whole", "cut")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    experiment.command("checkpoint", "export", "runs/cut", "--output", "exported").expect(
        DONE
    )


NORMED = """
from torch import nn

from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Loss, Modules


class Normed(Pretrain):
    def build(self, build_model):
        return Modules({"model": build_model(), "extra": nn.Sequential(nn.BatchNorm1d(8))})

    def loss(self, modules, batch, stage):
        loss = super().loss(modules, batch, stage).total
        rows = batch["input_ids"].flatten()[:16].float().view(2, 8) / 256
        return Loss(loss + modules.trained["extra"](rows).square().sum())
"""


@pytest.mark.parametrize("parallelism", ["dataParallel", "fsdp2"])
def test_batch_statistics_are_refused_with_several_workers_before_the_first_step(
    experiment: Experiment, parallelism: str
) -> None:
    runtime = {"parallelism": parallelism, "device": "cpu", "precision": "fp32"}
    experiment.write(recipe(recipe="normed:Normed", runtime=runtime))
    (experiment.path / "normed.py").write_text(NORMED, "utf-8")
    ended = experiment.run("--workers", "2", directory="shared", expect=USER_ERROR)
    assert "the forward pass changes extra.0.running_mean, extra.0.running_var" in ended.err
    assert "LayerNorm" in ended.err
    assert not list(experiment.at("shared").glob("checkpoints/step-*"))
    # One worker changes them in the same way each time, and saves and resumes them.
    experiment.run(directory="alone")
    assert "extra.0.running_mean" in final_state(experiment.at("alone"))
