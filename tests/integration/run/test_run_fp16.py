"""Products in fp16: gradients overflow, the loss scale falls until they fit, and the bits equal those of an
undisturbed run after any event."""

from collections.abc import Callable

import pytest
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from run_helpers import (
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    events,
    final_state,
    metric_rows,
)
from run_helpers import fault as run_fault

FIRST = 65536.0
LOUD = '''
"""A loss whose gradients are too large for the scale of the beginning."""

from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Loss


class Loud(Pretrain):
    def loss(self, modules, batch, stage):
        return Loss(super().loss(modules, batch, stage).total * 3000.0)
'''


def write_loud(experiment: Experiment, **changes: object) -> None:
    runtime = {"precision": "fp16-autocast", **changes}
    published = {"asynchronous": False}
    exact = {"elastic": "fast" if "parallelism" in changes else "exact"}
    experiment.write(
        elastic_recipe(
            recipe="loud:Loud", runtime=runtime, checkpoint=published, reproducibility=exact
        )
    )
    (experiment.path / "loud.py").write_text(LOUD, "utf-8")


@pytest.fixture(scope="module")
def loud(make_experiment: Callable[[], Experiment]) -> Experiment:
    """An experiment whose run ``undisturbed`` was trained by one undisturbed process."""
    experiment = make_experiment()
    write_loud(experiment)
    train_undisturbed(experiment)
    return experiment


def assert_falls_and_learns(experiment: Experiment, directory: str) -> int:
    """The scale is halved by each step that overflows, the first ones among them, and the others are trained;
    how many overflowed before the first that did not."""
    rows = curve(experiment.at(directory))
    skipped = [step for step, row in rows.items() if row["skipped"] is not None]
    trained = [step for step in rows if step not in skipped]
    assert {rows[step]["skipped"] for step in skipped} == {"overflow"}
    assert [row["loss_scale"] for row in rows.values()] == [
        FIRST / 2 ** sum(one < step for one in skipped) for step in rows
    ]
    first = trained[0]
    assert first > 3 and len(trained) >= 3
    assert rows[trained[-1]]["loss"] < rows[1]["loss"]
    return first - 1


@pytest.mark.capability("O-74")
def test_a_run_killed_while_the_scale_falls_resumes_bit_equal(
    loud: Experiment,
) -> None:
    num_skipped = assert_falls_and_learns(loud, "undisturbed")
    assert num_skipped <= STEPS - 3
    said = events(loud.at("undisturbed"), "skipped")
    assert [(one["why"], one["in_a_row"]) for one in said] == [
        ("overflow", 0)
    ] * num_skipped
    assert events(loud.at("undisturbed"), "non_finite") == []
    state = final_state(loud.at("undisturbed"))
    assert state["loss_scale.scale"].tolist() == [
        FIRST / 2**num_skipped,
        STEPS - num_skipped,
    ]

    killed = run_fault("step", call=8, action="SIGKILL", to="command")
    loud.run(directory="killed", expect=-9, faults=[killed])
    loud.run(directory="killed")
    steps = [(row["generation"], row["step"]) for row in metric_rows(loud.at("killed"))]
    assert steps[6:8] == [(1, 7), (2, 6)]
    assert_same_curve(loud.at("undisturbed"), loud.at("killed"))
    assert_same_state(loud.at("undisturbed"), loud.at("killed"))


@pytest.mark.long
def test_a_lost_node_and_a_joining_node_change_neither_scale_nor_bits(
    loud: Experiment, make_elastic: Callable[..., Cluster]
) -> None:
    # A step that overflows makes no update: the first update follows the join.
    first = assert_falls_and_learns(loud, "undisturbed") + 1
    kill = fault("SIGKILL", "update", node=1, step=first, to="node", name="kill")
    hold = fault("hold", "slot", node=0, step=3, name="held")
    cluster = make_elastic(loud).start(faults=[kill, hold])
    cluster.until_held()
    cluster.start_node(3)
    cluster.until_planned("node 3 joined")
    cluster.release("held")
    cluster.finish(nodes=[0, 2, 3])
    assert cluster.has_happened("kill")
    cluster.check(loud.at("undisturbed"))


@pytest.mark.long
def test_sharded_ranks_lower_the_scale_together(experiment: Experiment) -> None:
    write_loud(experiment, parallelism="fsdp2")
    experiment.run("--workers", "2", directory="sharded")
    assert_falls_and_learns(experiment, "sharded")
