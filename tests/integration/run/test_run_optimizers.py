"""Each optimizer's state is saved, resumed, computed alike by several processes, and transferred to nodes
that join late: bit-equal to an undisturbed run of one process."""

from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from run_helpers import (
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    final_state,
    metric_rows,
)
from run_helpers import fault as run_fault

PUBLISHED = {"asynchronous": False}
"""A checkpoint exists before the next step begins, however slow its disk is."""
GROUPS = [
    {"parameters": ["*embed_tokens*"], "weightDecay": 0},
    {"parameters": ["*.q_proj.weight", "*norm.weight"], "learningRateRatio": 0.5},
]
OPTIMIZERS = {
    "adamw with groups": {"learningRate": 3e-3, "groups": GROUPS},
    "lion": {"type": "lion", "learningRate": 3e-4},
    "sgd": {"type": "sgd", "learningRate": 0.1, "nesterov": True, "groups": GROUPS},
    "muon": {"type": "muon", "learningRate": 3e-3},
    "adafactor": {"type": "adafactor", "learningRate": 1e-2},
}
PIECES = {
    "type": "pieces",
    "warmup": 3,
    "startRatio": "10%",
    "pieces": [
        {"until": 6, "ratio": 1},
        {"until": "100%", "ratio": "5%", "shape": "cosine"},
    ],
}


@pytest.fixture(scope="module", params=OPTIMIZERS)
def trained(
    request: pytest.FixtureRequest, make_experiment: Callable[[], Experiment]
) -> Experiment:
    """An experiment whose run ``undisturbed`` was trained by one undisturbed process."""
    experiment = make_experiment()
    changes = {
        "optimizer": OPTIMIZERS[request.param],
        "schedule": PIECES,
        "checkpoint": PUBLISHED,
    }
    experiment.write(elastic_recipe(**changes))
    train_undisturbed(experiment)
    return experiment


def assert_equal(experiment: Experiment, directory: str) -> None:
    assert_same_curve(experiment.at("undisturbed"), experiment.at(directory))
    assert_same_state(experiment.at("undisturbed"), experiment.at(directory))


def test_a_run_learns_and_its_state_is_saved(trained: Experiment) -> None:
    rows = curve(trained.at("undisturbed"))
    assert rows[STEPS]["loss"] < rows[1]["loss"]
    assert final_state(trained.at("undisturbed"), prefix="optimizer.")


def test_a_killed_run_resumes_bit_equal(trained: Experiment) -> None:
    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    trained.run(directory="killed", expect=-9, faults=[killed])
    trained.run(directory="killed")
    steps = [(row["generation"], row["step"]) for row in metric_rows(trained.at("killed"))]
    assert steps[6:8] == [(1, 7), (2, 6)]
    assert_equal(trained, "killed")


def test_two_processes_are_bit_equal_to_one(trained: Experiment) -> None:
    trained.run("--workers", "2", directory="two")
    assert_equal(trained, "two")


def test_a_lost_node_and_a_joining_node_change_no_bit(
    trained: Experiment, make_elastic: Callable[..., Cluster]
) -> None:
    kill = fault("SIGKILL", "update", node=1, step=4, to="node", name="kill")
    hold = fault("hold", "slot", node=0, step=7, name="held")
    cluster = make_elastic(trained).start(faults=[kill, hold])
    cluster.until_held()
    cluster.start_node(3)
    cluster.until_planned("node 3 joined")
    cluster.release("held")
    cluster.finish(nodes=[0, 2, 3])
    assert cluster.has_happened("kill")
    cluster.check(trained.at("undisturbed"))
    assert len(cluster.pids(0)) == len(cluster.pids(2)) == 1
    # The joining node received the state, and then trained.
    assert cluster.steps(3)[-1] == STEPS and cluster.steps(3)[0] > 4


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_a_killed_sharded_run_resumes_bit_equal(experiment: Experiment, kind: str) -> None:
    changes: dict[str, Any] = {
        "optimizer": OPTIMIZERS[kind],
        "runtime": {"parallelism": "fsdp2"},
        "reproducibility": {"elastic": "fast"},
        "checkpoint": PUBLISHED,
    }
    experiment.write(elastic_recipe(**changes))
    workers = ("--workers", "2")
    experiment.run(*workers, directory="undisturbed")
    killed = run_fault("step", call=8, action="SIGKILL", rank=1, to="command")
    experiment.run(*workers, directory="killed", expect=-9, faults=[killed])
    experiment.run(*workers, directory="killed")
    rows = metric_rows(experiment.at("killed"))
    assert min(row["step"] for row in rows if row["generation"] == 2) == 6
    assert_equal(experiment, "killed")


@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_a_sharded_model_is_trained_like_a_whole_one(
    experiment: Experiment, kind: str
) -> None:
    # Sums of gradients are rounded in another order, so that a sign differs if a mean is near zero.
    experiment.write(elastic_recipe(optimizer=OPTIMIZERS[kind]))
    experiment.run(directory="whole")
    sharded = {"runtime": {"parallelism": "fsdp2"}, "reproducibility": {"elastic": "fast"}}
    experiment.write(elastic_recipe(optimizer=OPTIMIZERS[kind], **sharded))
    experiment.run("--workers", "2", directory="sharded")
    assert_same_curve(
        experiment.at("whole"), experiment.at("sharded"), exact=False, tolerance=1e-4
    )
