"""The recipe of two stages while nodes are lost and join: no node trains with another reference."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault, train_undisturbed
from run_helpers import Experiment, checkpoints, curve, events, write_documents

MakeCluster = Callable[..., Cluster]
BOUNDARY = 6
"""Steps of 96 tokens: the second stage begins with the first step that starts at 500 tokens or later."""


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """Its directory ``undisturbed`` was trained by one undisturbed process."""
    one = Experiment(tmp_path_factory.mktemp("two-stages"))
    write_documents(one.path / "documents.jsonl")
    write_documents(one.path / "more.jsonl", seed=7)
    training = elastic_recipe(
        recipe="two_stage_kl",
        data={
            "sources": [
                {"name": "docs", "path": "documents.jsonl"},
                {"name": "more", "path": "more.jsonl"},
            ],
        },
        twoStageKl={
            "stages": [
                {"tokens": 500, "mixture": {"docs": 1}},
                {"mixture": {"docs": 1, "more": 3}, "beta": 2.0},
            ]
        },
        checkpoint={"every": {"steps": 4}, "keep": 1},
    )
    one.write(training)
    train_undisturbed(one)
    yield one
    one.close()


def check(cluster: Cluster, whole: Path, **lost: bool) -> None:
    """The run is complete, with the bits of the undisturbed one, its penalties and its reference too."""
    cluster.check(whole, **lost)
    one, other = curve(whole), curve(cluster.directory)
    for step in range(BOUNDARY + 1, STEPS + 1):
        assert one[step]["metrics"] == other[step]["metrics"], f"step {step}"
    assert one[STEPS]["metrics"]["kl"] > 0
    hashes = {found["hash"] for found in events(whole, "snapshot")}
    assert len(hashes) == 1
    assert {found["hash"] for found in events(cluster.directory, "snapshot")} == hashes
    assert BOUNDARY in checkpoints(cluster.directory)


PLACES = [
    ("step", 0, BOUNDARY),
    ("save", 1, BOUNDARY),
    # Rank 0 alone publishes.
    ("publish", 0, BOUNDARY),
    ("snapshot", 0, None),
    ("snapshot", 1, None),
    ("update", 0, BOUNDARY + 2),
]
FURTHER = [
    ("step", 1, BOUNDARY),
    ("save", 0, BOUNDARY),
    ("published", 0, BOUNDARY),
    ("update", 1, BOUNDARY + 2),
]


@pytest.mark.acceptance("8d-10g:two_stage_kl")
@pytest.mark.acceptance("8d-1g:two_stage_kl", "8d-2e:two_stage_kl", "8d-2f:two_stage_kl")
@pytest.mark.parametrize(
    ("place", "rank", "step"),
    [*PLACES, *(pytest.param(*one, marks=pytest.mark.long) for one in FURTHER)],
)
def test_a_node_lost_around_the_boundary_changes_no_bit(
    make_elastic: MakeCluster,
    two_stages: Experiment,
    place: str,
    rank: int,
    step: int | None,
) -> None:
    dies = fault("SIGKILL", place, rank=rank, step=step, to="node")
    cluster = make_elastic(two_stages, expect=2).start(faults=[dies])
    cluster.until(
        lambda: any(one.poll() is not None for one in cluster.nodes.values()),
        "a node's end",
    )
    left = [node for node, one in cluster.nodes.items() if one.poll() != -signal.SIGKILL]
    assert len(left) == 1
    cluster.finish(nodes=left)
    check(cluster, two_stages.at("undisturbed"))
    assert len(cluster.pids(left[0])) == 1, "it went on in the process it was"


@pytest.mark.acceptance("8d-10g:two_stage_kl")
@pytest.mark.acceptance("8d-1h:two_stage_kl")
def test_a_node_that_joins_in_the_second_stage_gets_the_same_reference(
    make_elastic: MakeCluster, two_stages: Experiment
) -> None:
    held = fault("hold", "slot", node=0, step=BOUNDARY + 3, name="held")
    cluster = make_elastic(two_stages, expect=1).start(faults=[held])
    cluster.until_held()
    # It receives its reference from the member that has it, because the volume may be slow or gone.
    kept = cluster.directory / "checkpoints" / f"step-{BOUNDARY}"
    kept.rename(cluster.directory / "away")
    cluster.start_node(1)
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish()
    (cluster.directory / "away").rename(kept)
    check(cluster, two_stages.at("undisturbed"))
    first = cluster.steps(1)[0]
    assert first > BOUNDARY + 1 and cluster.steps(1) == list(range(first, STEPS + 1))


@pytest.mark.acceptance("8d-2g:two_stage_kl")
def test_if_all_nodes_are_lost_in_the_second_stage_the_boundary_checkpoint_is_read(
    make_elastic: MakeCluster, two_stages: Experiment
) -> None:
    held = fault("hold", "slot", node=0, step=BOUNDARY + 4, name="held")
    cluster = make_elastic(two_stages, expect=2).start(faults=[held])
    cluster.until_held()
    for node in cluster.nodes.values():
        node.kill()
    cluster.start_node(0)
    cluster.start_node(1)
    cluster.finish()
    check(cluster, two_stages.at("undisturbed"), is_state_lost=True)
