"""The recipe of edits while nodes are lost and join: every group computes the same items and the same bits."""

import shutil
import signal
from collections.abc import Callable, Iterator

import pytest
from elastic_helpers import STEPS, Cluster, fault, train_undisturbed
from latent_corpus import training, write_corpus
from run_helpers import Experiment, curve

MakeCluster = Callable[..., Cluster]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["cached", "live"])
def edits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Experiment]:
    """Its directory ``undisturbed`` was trained by one undisturbed process."""
    one = Experiment(tmp_path_factory.mktemp("edits"))
    write_corpus(one.path / "corpus")
    one.write(training({"features": request.param}, horizon={"steps": STEPS}))
    train_undisturbed(one)
    yield one
    one.close()


def check(cluster: Cluster, edits: Experiment) -> None:
    """The run is complete, with the bits of the undisturbed one, its measures of a collapse too."""
    whole = edits.at("undisturbed")
    cluster.check(whole)
    one, other = curve(whole), curve(cluster.directory)
    for step in range(1, STEPS + 1):
        assert one[step]["metrics"] == other[step]["metrics"], f"step {step}"


@pytest.mark.acceptance("8d-11j:latent_edit")
@pytest.mark.acceptance("8d-1g:latent_edit", "8d-2e:latent_edit")
@pytest.mark.capability("G-51")
@pytest.mark.parametrize(("place", "rank"), [("slot", 0), ("update", 1)])
def test_a_lost_node_changes_no_bit(
    make_elastic: MakeCluster, edits: Experiment, place: str, rank: int
) -> None:
    dies = fault("SIGKILL", place, rank=rank, step=6, to="node")
    cluster = make_elastic(edits, expect=2).start(faults=[dies])
    cluster.until(
        lambda: any(one.poll() is not None for one in cluster.nodes.values()),
        "a node's end",
    )
    left = [node for node, one in cluster.nodes.items() if one.poll() != -signal.SIGKILL]
    assert len(left) == 1
    cluster.finish(nodes=left)
    check(cluster, edits)
    assert len(cluster.pids(left[0])) == 1, "it went on in the process it was"


@pytest.mark.acceptance("8d-1h:latent_edit")
def test_a_node_that_joins_midway_trains_bit_equal(
    make_elastic: MakeCluster, edits: Experiment
) -> None:
    held = fault("hold", "slot", node=0, step=5, name="held")
    cluster = make_elastic(edits, expect=1).start(faults=[held])
    cluster.until_held()
    cluster.start_node(1)
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish()
    check(cluster, edits)
    first = cluster.steps(1)[0]
    assert first > 1 and cluster.steps(1) == list(range(first, STEPS + 1))


@pytest.mark.acceptance("8d-4j:latent_edit")
def test_a_node_with_another_corpus_is_refused_and_the_run_continues(
    make_elastic: MakeCluster, edits: Experiment
) -> None:
    held = fault("hold", "report", node=0, step=2, name="held")
    cluster = make_elastic(edits, expect=1).start(faults=[held])
    cluster.until_held()
    # At the same path, so that only the content differs, as on a host with a separate disk.
    corpus, aside = edits.path / "corpus", edits.path / "aside"
    corpus.rename(aside)
    try:
        write_corpus(corpus, train=5)
        # It does not have the run's directory either, which records the data.
        other = cluster.start_node(1, directory=edits.path / "elsewhere")
        assert other.wait() != 0, cluster.describe()
        assert "fingerprint.data" in other.said(), other.said()
    finally:
        shutil.rmtree(corpus)
        aside.rename(corpus)
        cluster.release("held")
    cluster.finish(nodes=[0])
    check(cluster, edits)
    assert {row["size"] for row in cluster.trace()} == {1}
