"""Errors that no change of the group solves, and failures that look like such errors: which node is reported,
and how the run ends."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, elastic_recipe, fault
from run_helpers import (
    DONE,
    INTERNAL,
    STOPPED_UNSAVED,
    Experiment,
    checkpoints,
    steps_of,
    write_documents,
)

MakeCluster = Callable[..., Cluster]


@pytest.mark.acceptance("8d-4j:pretrain")
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("spec.training.optimizer.learningRate=1e-2", "configuration"),
        pytest.param("metadata.name=other", "other", marks=pytest.mark.long),
    ],
)
def test_a_node_of_another_run_is_refused_with_both_values(
    make_elastic: MakeCluster, undisturbed: Any, change: str, names: str
) -> None:
    cluster = make_elastic(expect=2)
    cluster.start_coordinator()
    cluster.start_node(0)
    cluster.until(lambda: cluster.log("hello"), "the first node")
    stranger = cluster.start_node(1, sets=[change])
    assert stranger.wait() == INTERNAL, cluster.describe()
    assert names in stranger.said() and "Traceback" not in stranger.said()
    if names == "other":
        assert "tiny" in stranger.last_words
    cluster.start_node(1)
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))


def test_a_worker_that_exits_with_code_0_midway_is_replaced(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2).start(faults=[fault("exit", "slot", node=1, step=4)])
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1
    assert [
        (line["cause"], line["exitCode"])
        for line in cluster.log("broken")
        if line["cause"] != "peer_lost"
    ] == [("worker_crash", 0)]


def test_a_slot_that_kills_every_worker_ends_the_run_with_its_samples(
    make_elastic: MakeCluster,
) -> None:
    cluster = make_elastic(expect=2, options=("--max-failures", "2"))
    cluster.start(faults=[fault("SIGKILL", "forward", step=4, slot=3, is_repeated=True)])
    cluster.finish(INTERNAL)
    assert cluster.coordinator is not None and cluster.coordinator.wait() == INTERNAL
    (end,) = cluster.log("finished")
    for words in ("step 4, slot 3", "SIGKILL", "documents.jsonl"):
        assert words in end["message"], end["message"]
    assert max(steps_of(cluster.directory)) == 3
    assert all("step 4, slot 3" in node.last_words for node in cluster.nodes.values())


@pytest.mark.capability("O-51")
def test_an_error_of_rank_1_alone_is_reported_as_the_cause(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """The others only see a connection that was closed, which is a consequence."""
    cluster = make_elastic(options=("--max-failures", "1"))
    cluster.start(faults=[fault("raise", "forward", step=4, rank=1, is_repeated=True)])
    cluster.finish(INTERNAL)
    (end,) = cluster.log("finished")
    for words in (
        "rank 1",
        "step 4",
        "ValueError: a user's own mistake",
        "documents.jsonl",
    ):
        assert words in end["message"], end["message"]
    assert "onnection" not in end["message"]
    assert "a user's own mistake" in cluster.nodes[1].last_words
    assert "a user's own mistake" in cluster.nodes[0].last_words, (
        "every node's last words name the root cause"
    )


def test_a_single_error_of_one_rank_costs_a_worker_and_no_step(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2).start(
        faults=[fault("raise", "forward", step=4, rank=0)]
    )
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    # Whether the failed worker's successor still finds steps to train depends on how quick the other is.
    assert len(cluster.pids(1)) == 1
    assert [
        event["rank"] for event in cluster.log("broken") if event["cause"] == "user_error"
    ] == [0]
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


def test_saves_that_fail_for_lack_of_space_end_no_run(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """The run continues from its newest checkpoint after a person has made room for it."""
    cluster = make_elastic(expect=2)
    cluster.start(
        faults=[fault("full", "shard", rank=1, call=2)],
        sets=["spec.training.checkpoint.maxFailures=1"],
    )
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)
    causes = {line["cause"] for line in cluster.log("broken")}
    # One cause, from the process that saw it, and not the fault of a host.
    assert "volume_full" in causes and causes <= {"volume_full", "peer_lost"}
    assert any("No space left on device" in node.said() for node in cluster.nodes.values())


def test_workers_of_one_group_report_host_faults_too(
    make_elastic: MakeCluster,
) -> None:
    """Level 2. Not a single failure of the run is allowed here, and this is none."""
    cluster = make_elastic(expect=2, options=("--max-failures", "0", "--recovery", "fresh"))
    sets = [
        "checkpoint.maxFailures=1",
        "runtime.parallelism=fsdp2",
        "reproducibility.elastic=fast",
    ]
    cluster.start(
        faults=[fault("full", "shard", rank=1, call=2)],
        sets=[f"spec.training.{one}" for one in sets],
        recovery="fresh",
    )
    cluster.finish()
    causes = {line["cause"] for line in cluster.log("broken")}
    # One cause, from the process that saw it, and not the fault of a host.
    assert "volume_full" in causes and causes <= {"volume_full", "peer_lost"}
    assert checkpoints(cluster.directory)[-1] == STEPS


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of three mebibytes."""
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(volume)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield volume
    finally:
        subprocess.run(["umount", "-l", str(volume)], check=True)


def test_a_full_volume_while_the_last_nodes_drain_is_reported_by_the_exit_code(
    small_volume: Path, make_elastic: MakeCluster, undisturbed: Any
) -> None:
    experiment = Experiment(small_volume)
    write_documents(small_volume / "documents.jsonl")
    experiment.write(elastic_recipe())
    cluster = make_elastic(experiment, expect=2).start(
        faults=[fault("hold", "slot", node=0, step=7, name="held")]
    )
    cluster.until_held()
    cluster.until(lambda: checkpoints(cluster.directory) == [5], "the checkpoint")
    fill(small_volume / "filler")
    for node in cluster.nodes.values():
        node.send(15)
    cluster.until(lambda: len(cluster.log("leaving")) == 2, "two that leave")
    cluster.release("held")
    codes = [cluster.nodes[node].wait() for node in (0, 1)]
    assert STOPPED_UNSAVED in codes and DONE not in codes, cluster.describe()
    assert cluster.coordinator is not None and cluster.coordinator.wait() == STOPPED_UNSAVED
    assert checkpoints(cluster.directory) == [5]
    assert any(
        "No space left on device" in node.said() for node in cluster.nodes.values()
    ), cluster.describe()
    (small_volume / "filler").unlink()
    cluster.start()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)


def fill(path: Path) -> None:
    """Take every byte that is left, but for some lines of metrics."""
    with path.open("wb", buffering=0) as file:
        block = 1 << 16
        while block:
            try:
                file.write(os.urandom(block))
            except OSError:
                block //= 2
    os.truncate(path, path.stat().st_size - (128 << 10))
