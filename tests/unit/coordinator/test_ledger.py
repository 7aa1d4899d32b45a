"""How the coordinator counts the time of a run's nodes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_cluster import Cluster, FakeNode, make_settings

from evergrad_common.causes import USES, Use
from evergrad_coordinator.protocol import Broken, Progress
from evergrad_coordinator.rules import time_accounting
from evergrad_coordinator.rules.ledger import Ledger, apportion
from evergrad_coordinator.rules.status import build_status


def start_running(number: int = 3, **settings: object) -> Cluster:
    cluster = Cluster(make_settings(expect=number, max_nodes=number, **settings))
    for name in range(number):
        cluster.start(name)
    cluster.run_until_running()
    return cluster


def counted(cluster: Cluster) -> dict[Use, int]:
    """Return the seconds of all nodes by use; open time counts for its current use."""
    ledger = dataclasses.replace(
        cluster.group.ledger,
        counted=dict(cluster.group.ledger.counted),
        unsettled=dict(cluster.group.ledger.unsettled),
    )
    ledger.settle()
    return {use: round(amount / 1000) for use, amount in ledger.counted.items()}


def report(
    node: FakeNode,
    step: int,
    *,
    evaluating: float | None = None,
    saving: float | None = None,
) -> None:
    assert node.group is not None
    node.send(
        Progress(
            node.group.generation,
            step,
            evaluation_seconds=evaluating,
            saving_seconds=saving,
        )
    )


@given(
    st.integers(0, 10**12),
    st.dictionaries(
        st.sampled_from(sorted(USES)), st.integers(0, 10**9), min_size=1
    ).filter(lambda weights: sum(weights.values()) > 0),
)
def test_shares_sum_to_the_whole(amount: int, weights: dict[Use, int]) -> None:
    shares = apportion(amount, weights)
    assert sum(shares.values()) == amount
    total = sum(weights.values())
    assert all(
        abs(shares[use] * total - amount * weight) < total
        for use, weight in weights.items()
    )


def test_nodes_that_train_are_in_training() -> None:
    cluster = start_running()
    before = counted(cluster).get("training", 0)
    cluster.run(20)
    assert counted(cluster)["training"] - before == pytest.approx(60, abs=1)
    # The nodes came at the same time, so only the forming of the group took time.
    assert set(counted(cluster)) <= {"training", "startup", "waiting"}


def test_too_few_nodes_are_in_waiting() -> None:
    cluster = start_running(2)
    cluster.nodes[1].die()
    cluster.run(10)
    assert counted(cluster)["waiting"] == pytest.approx(10, abs=3)


def test_a_change_of_a_group_that_has_trained_is_recovery() -> None:
    cluster = start_running()
    cluster.run(5)
    # The next plan gets no response.
    for node in cluster.nodes[:2]:
        node.has_answered = False
    cluster.nodes[2].die()
    cluster.run(1)
    assert counted(cluster)["recovery"] >= 1
    assert "startup" not in counted(cluster) or counted(cluster)["startup"] <= 2


def test_a_spare_node_is_idle() -> None:
    cluster = start_running()
    cluster.start(3)
    cluster.run(10)
    assert counted(cluster)["idle"] == pytest.approx(10, abs=1)


def test_steps_below_the_highest_step_are_counted_as_repeated() -> None:
    cluster = start_running()
    report(cluster.nodes[0], 40)
    cluster.run(5)
    # Fresh workers continue from a checkpoint: the checkpoint of step 10, as all report.
    for node in cluster.nodes:
        node.step = 10
    node = cluster.nodes[0]
    assert node.group is not None
    node.send(Broken(node.group.generation, "worker_crash", rank=0, exit_code=1))
    cluster.run_until_running()
    cluster.run(5)
    repeated = counted(cluster)["repeated"]
    assert repeated == pytest.approx(15, abs=2)
    # From the step that was reached before, it is training again.
    report(cluster.nodes[0], 40)
    cluster.run(5)
    assert counted(cluster)["repeated"] == pytest.approx(repeated, abs=1)


def test_evaluations_and_saves_are_subtracted_from_training() -> None:
    cluster = start_running()
    rank_0 = cluster.nodes[0]
    report(rank_0, 1, evaluating=3.0, saving=1.0)
    cluster.run(10)
    report(rank_0, 2, evaluating=7.0, saving=3.0)
    assert counted(cluster)["evaluation"] == 12
    assert counted(cluster)["saving"] == 6
    assert counted(cluster)["training"] == pytest.approx(12, abs=2)
    # A counter that starts again, as after a move of rank 0, subtracts nothing.
    cluster.run(1)
    report(rank_0, 3, evaluating=0.0, saving=0.0)
    assert counted(cluster)["evaluation"] == 12


def test_a_report_cannot_claim_more_time_than_has_passed() -> None:
    cluster = start_running()
    report(cluster.nodes[0], 1, evaluating=0.0, saving=0.0)
    before = sum(counted(cluster).values())
    cluster.run(1)
    report(cluster.nodes[0], 2, evaluating=1000.0, saving=1000.0)
    assert counted(cluster)["evaluation"] == 3
    assert sum(counted(cluster).values()) - before == 3


def test_the_status_has_the_time_at_which_nodes_could_first_train() -> None:
    cluster = start_running()
    cluster.run(10)
    usage = build_status(cluster.group, now=cluster.now)["usage"]
    assert set(usage["joinedSecondsAgo"]) == {"10.0.0.0", "10.0.0.1", "10.0.0.2"}
    assert all(seconds > 9 for seconds in usage["joinedSecondsAgo"].values())
    assert usage["milliseconds"]["training"] > 25_000


def test_a_node_that_trained_under_another_coordinator_has_joined_before() -> None:
    cluster = start_running()
    cluster.run(5)
    cluster.restart_coordinator()
    cluster.run(5)
    ledger = cluster.group.ledger
    assert set(ledger.joined.values()) == {ledger.began_at}
    # The group continued, and so did its training.
    assert set(counted(cluster)) == {"training"}


def test_time_after_the_end_of_the_run_is_teardown() -> None:
    cluster = start_running()
    node = cluster.nodes[0]
    assert node.group is not None
    from evergrad_coordinator.protocol import Result

    for other in cluster.nodes:
        other.has_answered = False
    node.send(Result(node.group.generation, 100))
    before = counted(cluster).get("training", 0)
    cluster.run(5)
    assert counted(cluster)["end"] == pytest.approx(15, abs=1)
    assert counted(cluster)["training"] == before


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 50.0)), max_size=30))
def test_the_accounted_times_sum_to_the_time_of_the_nodes(
    intervals: list[tuple[int, float]],
) -> None:
    ledger, now, expected = Ledger(began_at=100.0), 100.0, 0
    for number, seconds in intervals:
        ledger.nodes = {"training": number, "idle": 1}
        before = ledger.at_milliseconds
        now += seconds
        ledger.close_interval(now=now)
        expected += (ledger.at_milliseconds - before) * (number + 1)
        ledger.note_progress(
            Progress(1, 1, evaluation_seconds=now / 7, saving_seconds=now / 9)
        )
    assert sum(ledger.counted.values()) == expected
    assert not ledger.unsettled
    assert all(amount >= 0 for amount in ledger.counted.values())
    assert ledger.at_milliseconds == round(1000 * (now - 100.0))


def test_a_thousand_simultaneous_joins_do_not_recount_at_each_hello() -> None:
    cluster = Cluster(make_settings(expect=50, max_nodes=50))
    for name in range(50):
        cluster.start(name)
    assert cluster.group.ledger.recounted_at == cluster.now
    assert sum(cluster.group.ledger.nodes.values()) <= 1
    cluster.run(time_accounting.RECOUNT_SECONDS + 0.1)
    assert sum(cluster.group.ledger.nodes.values()) == 50
