"""Runs that continue at a position while processes leave and join, in sharded worlds, and by passes: each
uses the next samples of its sources, and has the bits of an undisturbed run."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster
from elastic_helpers import fault as node_fault
from position_helpers import PER_STEP, SEED, expected_hashes, sizes_in
from run_helpers import (
    STOPPED_SAVED,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    fault,
    merge,
    recipe,
    steps_of,
    write_documents,
)

pytestmark = pytest.mark.long

SOURCES = {name: {"name": name, "path": f"{name}.jsonl"} for name in "abc"}
SHARDED = {"runtime": {"parallelism": "fsdp2"}, "reproducibility": {"elastic": "fast"}}
STEPS = range(7, 15)


def weighted(**weights: float) -> dict[str, Any]:
    """A mixture of the named sources with these weights."""
    return {"sources": [{**SOURCES[name], "weight": one} for name, one in weights.items()]}


def training_of(**changes: Any) -> dict[str, Any]:
    return recipe(**merge({"reproducibility": {"elastic": "exact", "seed": SEED}}, changes))


def continued(path: str = "runs/first", **changes: Any) -> dict[str, Any]:
    """A run that continues after the sixth step, without A and with C."""
    own = {
        "data": weighted(c=1, b=3),
        "initFrom": {"path": path, "step": 6, "load": "position"},
        "horizon": {"steps": 14},
        "checkpoint": {"every": {"steps": 4}},
    }
    return merge(training_of(**own), changes)


def begin(experiment: Experiment, *arguments: str, **changes: Any) -> Experiment:
    """The other run, of 8 steps on A and B, in ``runs/first``."""
    for seed, name in enumerate(SOURCES):
        write_documents(experiment.path / f"{name}.jsonl", count=4, seed=seed)
    experiment.write(
        training_of(**merge({"data": weighted(a=3, b=1)}, changes)), name="first"
    )
    experiment.run(*arguments, name="first")
    return experiment


@pytest.fixture(scope="module")
def first(make_experiment: Callable[[], Experiment]) -> Experiment:
    """The other run, and in ``runs/whole`` an undisturbed run in one process that continues it."""
    experiment = begin(make_experiment())
    experiment.write(continued(), name="whole")
    experiment.run(name="whole")
    return experiment


@pytest.fixture
def cluster(first: Experiment, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that are not started yet."""
    path = tmp_path / "elastic"
    path.mkdir()
    one = Cluster(first, path, expect=2)
    yield one
    one.close()


def hashes_of(directory: Path) -> dict[int, int]:
    return {step: int(row["sample_hash"], 16) for step, row in curve(directory).items()}


def record_of(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return record


def test_two_nodes_that_are_stopped_midway_continue_bit_equal_to_one_process(
    first: Experiment,
) -> None:
    shutil.copytree(first.at("first"), first.at("gone"))
    first.write(continued("runs/gone"), name="nodes")
    stop = ("--nodes", "2", "--stop-after-steps", "3")
    first.run(*stop, name="nodes", expect=STOPPED_SAVED)
    shutil.rmtree(first.at("gone"))
    first.run("--nodes", "2", name="nodes")
    assert steps_of(first.at("nodes")) == list(STEPS)
    assert {row["world_size"] for row in curve(first.at("nodes")).values()} == {2}
    assert_same_curve(first.at("whole"), first.at("nodes"))
    assert_same_state(first.at("whole"), first.at("nodes"))


def test_a_node_that_joins_before_the_first_checkpoint_takes_the_state_of_a_later_killed_node(
    first: Experiment, cluster: Cluster
) -> None:
    # Nothing is saved before the end: a joining process uses the run's record, and the state of a peer.
    first.write(continued(checkpoint={"every": {"steps": 100}}))
    held = [
        node_fault("hold", "slot", node=node, step=8, name=f"held-{node}")
        for node in (0, 1)
    ]
    cluster.start(faults=held)
    cluster.until_held("held-0")
    cluster.until_held("held-1")
    assert checkpoints(cluster.directory) == []
    cluster.start_node(
        2, faults=[node_fault("hold", "update", node=2, call=2, name="joined")]
    )
    cluster.until_planned("node 2 joined")
    for node in (0, 1):
        cluster.release(f"held-{node}")
    cluster.until_held("joined")
    cluster.nodes[0].kill()
    cluster.nodes[1].kill()
    cluster.release("joined")
    cluster.finish(nodes=[2])
    assert steps_of(cluster.directory) == list(STEPS)
    assert_same_curve(first.at("whole"), cluster.directory)
    assert_same_state(first.at("whole"), cluster.directory)


@pytest.mark.parametrize("before", ["dataParallel", "fsdp2"])
def test_a_sharded_run_continues_at_a_position_and_after_kills_bit_equal(
    make_experiment: Callable[[], Experiment], before: str
) -> None:
    two = ("--workers", "2")
    changes = SHARDED if before == "fsdp2" else {}
    experiment = begin(make_experiment(), *two, **changes)
    experiment.write(continued(**SHARDED), name="next")
    experiment.run(*two, name="next", directory="whole")

    # Killed before its first checkpoint, it begins again; then it is stopped, and killed after a checkpoint.
    early = fault("step", call=2, action="SIGKILL", to="command")
    experiment.run(*two, name="next", directory="killed", expect=-9, faults=[early])
    assert checkpoints(experiment.at("killed")) == []
    stop = (*two, "--stop-after-steps", "3")
    experiment.run(*stop, name="next", directory="killed", expect=STOPPED_SAVED)
    late = fault("step", call=3, action="SIGKILL", to="command")
    experiment.run(*two, name="next", directory="killed", expect=-9, faults=[late])
    experiment.run(*two, name="next", directory="killed")

    sizes = sizes_in(record_of(experiment.at("whole")))
    assert hashes_of(experiment.at("whole")) == expected_hashes(
        [sizes["c"], sizes["b"]], weights=[1, 3], numbers=[2, 1], taken=[0, 6], steps=STEPS
    )
    assert_same_curve(experiment.at("whole"), experiment.at("killed"))
    assert_same_state(experiment.at("whole"), experiment.at("killed"))

    # Sums of shards are rounded differently from sums of replicas: the samples are the same, and the losses
    # nearly.
    replicated = {"runtime": {"parallelism": "dataParallel"}}
    experiment.write(continued(**merge(SHARDED, replicated)), name="replicated")
    experiment.run(*two, name="replicated")
    assert_same_curve(
        experiment.at("whole"), experiment.at("replicated"), exact=False, tolerance=1e-4
    )


@pytest.mark.parametrize(
    ("mixing", "next_mixing", "which"),
    [
        ("passes", "passes", "all"),
        ("passes", "passes", "first"),
        ("passes", "shares", "all"),
        ("shares", "passes", None),
    ],
)
def test_a_position_between_mixtures_by_passes_and_by_shares_continues_each_source_to_its_end(
    make_experiment: Callable[[], Experiment],
    mixing: str,
    next_mixing: str,
    which: str | None,
) -> None:
    from evergrad_trainer.checkpoint.weights import read_extra

    experiment = begin(make_experiment(), data={**weighted(a=1, b=2), "mixing": mixing})
    horizon = (
        {"steps": 14} if which is None else {"steps": None, "epochs": 2, "exhausted": which}
    )
    changes = {"data": {**weighted(b=2, c=0.5), "mixing": next_mixing}, "horizon": horizon}
    experiment.write(continued(**changes), name="next")
    experiment.run(name="next", directory="whole")

    taken = read_extra(experiment.at("first") / "checkpoints" / "step-6")["cursor"]["b"]
    trained = steps_of(experiment.at("whole"))
    record = record_of(experiment.at("whole"))
    sizes = sizes_in(record)
    assert trained == list(range(7, record["derived"]["totalSteps"] + 1))
    assert len(trained) >= 3
    assert hashes_of(experiment.at("whole")) == expected_hashes(
        [sizes["b"], sizes["c"]],
        weights=[2, 0.5],
        numbers=[1, 2],
        taken=[taken, 0],
        steps=range(7, trained[-1] + 1),
        passes=next_mixing == "passes",
    )
    # The end counts what B had given before: up to two passes over the first, or at least two over both.
    saved = experiment.at("whole") / "checkpoints" / f"step-{trained[-1]}"
    passes = {
        name: count / sizes[name] for name, count in read_extra(saved)["cursor"].items()
    }
    left = {name: PER_STEP / sizes[name] for name in passes}
    if which == "first":
        assert max(passes.values()) <= 2 and any(
            2 - passes[one] < 2 * left[one] for one in passes
        )
    if which == "all":
        assert min(passes.values()) >= 2 and any(
            passes[one] - 2 < 2 * left[one] for one in passes
        )
    own = (trained[-1] - 6) * PER_STEP
    epoch = sum(sizes.values())
    if next_mixing == "passes":
        epoch = 2 * sizes["b"] + int(sizes["c"] * 0.5 + 0.5)
    assert record["derived"]["epochs"] == pytest.approx(own / epoch)

    kill = fault("step", call=min(5, len(trained)), action="SIGKILL", to="command")
    experiment.run(name="next", directory="killed", expect=-9, faults=[kill])
    experiment.run("--workers", "2", name="next", directory="killed")
    assert_same_curve(experiment.at("whole"), experiment.at("killed"))
    assert_same_state(experiment.at("whole"), experiment.at("killed"))
