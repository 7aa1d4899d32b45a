"""Changes that are disturbed themselves: kills while a group forms, during a state transfer, and during saves
and evaluations."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from patience import PATIENCE
from run_helpers import Experiment, checkpoints, events, read_lines, write_documents

MakeCluster = Callable[..., Cluster]


@pytest.mark.parametrize("place", ["setup", "meeting", "settle"])
def test_a_node_killed_while_the_next_group_forms_is_excluded_from_the_one_after(
    make_elastic: MakeCluster, undisturbed: Any, place: str
) -> None:
    deaths = [
        fault("SIGKILL", "slot", node=2, step=4, to="node"),
        fault("SIGKILL", place, node=1, step=4, to="node", name="kill"),
    ]
    cluster = make_elastic().start(faults=deaths)
    cluster.finish(nodes=[0])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1
    assert [row["size"] for row in cluster.trace() if row["node"] == 0] == [3] * 3 + [1] * (
        STEPS - 3
    )


@pytest.mark.parametrize(("place", "node"), [("send", 0), ("receive", 3)])
def test_a_kill_during_a_state_transfer_leaves_the_others_with_their_state(
    make_elastic: MakeCluster, undisturbed: Any, place: str, node: int
) -> None:
    hold = fault("hold", "slot", node=0, step=4, name="held")
    death = fault("SIGKILL", place, node=node, to="node", name="kill")
    cluster = make_elastic().start(faults=[hold, death])
    cluster.until_held()
    cluster.start_node(3, faults=[death])
    cluster.until_planned("node 3 joined")
    cluster.release("held")
    cluster.finish(nodes=[one for one in range(4) if one != node])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert all(len(cluster.pids(one)) == 1 for one in (1, 2))


def test_survivors_one_step_apart_transfer_their_state(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Node 1 gives the group up although its sums were whole, so that the others have finished a step that it
    has not."""
    cluster = make_elastic().start(
        faults=[fault("lose", "update", node=1, step=4, name="lose")]
    )
    cluster.finish()
    assert cluster.has_happened("lose")
    cluster.check(undisturbed.at("undisturbed"))
    assert cluster.steps(1) == [1, 2, 3, *range(5, STEPS + 1)]
    assert all(len(cluster.pids(node)) == 1 for node in range(3))


@pytest.mark.acceptance("8d-2f:pretrain")
def test_a_save_that_a_kill_interrupts_is_repeated(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Rank 1 dies while it writes its part of step 5 during training; every checkpoint on disk stays
    valid."""
    cluster = make_elastic().start(
        faults=[fault("SIGKILL", "shard", node=1, to="node", name="kill")]
    )
    cluster.finish(nodes=[0, 2])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    begun = min(row["step"] for row in cluster.trace() if row["size"] == 2)
    assert begun - 1 in checkpoints(cluster.directory), (
        "the next world makes the save that was lost before its first step"
    )
    assert all(event["failures"] == 0 for event in events(cluster.directory, "save_failed"))


@pytest.mark.acceptance("8d-2f:pretrain")
def test_rank_0_killed_between_publication_and_its_report_counts_as_saved(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic().start(
        faults=[fault("SIGKILL", "published", node=0, to="node", name="kill")]
    )
    cluster.finish(nodes=[1, 2])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert 5 in checkpoints(cluster.directory)


@pytest.fixture(scope="module")
def evaluating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """An experiment that evaluates every 4 steps and keeps the best."""
    one = Experiment(tmp_path_factory.mktemp("evaluating"))
    write_documents(one.path / "documents.jsonl")
    sources = [{"name": "other", "path": "documents.jsonl"}]
    # More batches than three nodes measure between two exchanges.
    evaluation = {"every": {"steps": 4}, "sources": sources, "samples": 50}
    one.write(
        elastic_recipe(evaluation=evaluation, checkpoint={"best": {"metric": "other/loss"}})
    )
    train_undisturbed(one)
    yield one
    one.close()


@pytest.mark.acceptance("8d-3b:pretrain")
@pytest.mark.parametrize("call", [1, 2])
def test_an_evaluation_that_a_kill_interrupts_is_repeated(
    make_elastic: MakeCluster, evaluating: Experiment, call: int
) -> None:
    """Node 1 dies during the first or second evaluation; rank 0's rows equal those of an undisturbed run."""
    cluster = make_elastic(evaluating)
    cluster.start(
        faults=[fault("SIGKILL", "evaluation", node=1, call=call, to="node", name="kill")]
    )
    cluster.finish(nodes=[0, 2])
    assert cluster.has_happened("kill")
    cluster.check(evaluating.at("undisturbed"))
    assert evaluations(cluster.directory) == evaluations(evaluating.at("undisturbed"))


@pytest.mark.acceptance("8d-3b:pretrain")
@pytest.mark.capability("O-18", "O-68")
@pytest.mark.parametrize("call", [2, 7, pytest.param(11, marks=pytest.mark.long)])
def test_an_evaluation_interrupted_by_a_kill_resumes_in_a_smaller_world(
    make_elastic: MakeCluster, evaluating: Experiment, call: int
) -> None:
    """Node 1 dies in its ``call``-th batch, before or after the first exchange, and is not replaced."""
    cluster = make_elastic(evaluating)
    cluster.start(
        faults=[fault("SIGKILL", "batch", node=1, call=call, to="node", name="kill")]
    )
    cluster.finish(nodes=[0, 2])
    assert cluster.has_happened("kill")
    cluster.check(evaluating.at("undisturbed"))
    assert evaluations(cluster.directory) == evaluations(evaluating.at("undisturbed"))


def evaluations(directory: Path) -> dict[int, float]:
    """The losses that count, by step; every 4 steps there is one."""
    losses = {
        row["step"]: row["loss"] for row in read_lines(directory / "evaluation.jsonl")
    }
    assert sorted(losses) == [4, 8, 12]
    return losses


def test_a_join_waits_for_a_running_save_while_training_continues(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    steps = (6, 9, 10, 11, 12)
    holds = [
        fault("hold", "slot", node=0, step=step, name=f"held-{step}") for step in steps
    ]
    # The join waits for this save for as long as a test does.
    patience = ("--save-patience", str(PATIENCE), "--soft-limit", str(2 * PATIENCE))
    cluster = make_elastic(expect=2, options=patience).start(
        faults=[fault("hold", "shard", node=1, name="saving"), *holds]
    )
    cluster.until_held("saving")
    cluster.until_held("held-6")
    cluster.start_node(2)
    cluster.until_planned("node 2 joined")
    cluster.release("held-6")
    cluster.until_held("held-9")
    assert (cluster.steps(2), checkpoints(cluster.directory)) == ([], [])
    cluster.release("saving")
    cluster.until(lambda: checkpoints(cluster.directory), "the save that was under way")
    assert cluster.steps(2) == [], "it is the save of the old world"
    # The group may see the end of the save a step later.
    for step in (9, 10, 11):
        cluster.release(f"held-{step}")
        cluster.until_held(f"held-{step + 1}")
    cluster.release("held-12")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert cluster.steps(2)
    assert not events(cluster.directory, "save_failed")


def test_a_save_that_takes_too_long_does_not_delay_a_join_and_is_repeated(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Rank 1's part of the save of step 5 is not written while another node joins; a late write does no
    harm."""
    holds = [
        fault("hold", "shard", node=1, name="saving"),
        fault("hold", "slot", node=0, step=6, name="held"),
    ]
    cluster = make_elastic(expect=2, options=("--save-patience", "0.01")).start(
        faults=holds
    )
    cluster.until_held("saving")
    cluster.until_held("held")
    cluster.start_node(2)
    cluster.until_planned("node 2 joined")
    cluster.release("held")
    cluster.until(lambda: checkpoints(cluster.directory), "the save of the new world")
    cluster.release("saving")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert cluster.steps(2)[0] - 1 in checkpoints(cluster.directory)
    assert not events(cluster.directory, "save_failed")


def test_an_evaluation_that_a_join_interrupts_is_repeated_by_the_new_world(
    make_elastic: MakeCluster, evaluating: Experiment
) -> None:
    cluster = make_elastic(evaluating, expect=2).start(
        faults=[fault("hold", "evaluation", node=0, name="held")]
    )
    cluster.until_held()
    cluster.start_node(2)
    cluster.until_planned("node 2 joined")
    cluster.release("held")
    cluster.finish()
    cluster.check(evaluating.at("undisturbed"))
    assert evaluations(cluster.directory) == evaluations(evaluating.at("undisturbed"))
    assert cluster.steps(2)[0] in (5, 6), (
        "the newcomer does not wait for the evaluation's end"
    )
