"""Random events in any order: when the events have stopped and nodes answer, one group runs, or the run
reports the reason for waiting."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_cluster import (
    Boundary,
    Broken,
    Capacity,
    Cluster,
    Done,
    FakeNode,
    Progress,
    make_settings,
)

WAITS = {"WaitingForNodes", "AllNodesLeft"}
NAMES = ("0", "1", "2", "9", "10")


def freeze(cluster: Cluster, node: FakeNode) -> None:
    node.is_frozen = True


def cut(cluster: Cluster, node: FakeNode) -> None:
    node.is_cut = True


def hang(cluster: Cluster, node: FakeNode) -> None:
    node.has_answered = False


def recover(cluster: Cluster, node: FakeNode) -> None:
    node.is_frozen = node.is_cut = False
    node.has_answered = True


def leave(cluster: Cluster, node: FakeNode) -> None:
    from evergrad_coordinator.protocol import Leaving

    node.is_leaving = True
    node.send(Leaving())


def replace(cluster: Cluster, node: FakeNode) -> None:
    cluster.start(node.name)


def crash_worker(cluster: Cluster, node: FakeNode) -> None:
    if node.group:
        group, node.group, node.step = node.group, None, -1
        node.send(
            Broken(
                group.generation,
                "worker_crash",
                rank=group.first_rank,
                exit_code=-9,
                time_since=0.01,
            )
        )


def report_stuck(cluster: Cluster, node: FakeNode) -> None:
    if node.group:
        node.send(Broken(node.group.generation, "stuck"))


def report_progress(cluster: Cluster, node: FakeNode) -> None:
    if node.group:
        node.send(Progress(node.group.generation, node.step))
        node.send(Boundary(node.group.generation, node.step))


def grow(cluster: Cluster, node: FakeNode) -> None:
    if node.group is None or node.workers < 3:
        node.workers += 1
        node.send(Capacity(node.workers))


def shrink(cluster: Cluster, node: FakeNode) -> None:
    node.workers = max(0, node.workers - 1)
    node.send(Capacity(node.workers))


def kill(cluster: Cluster, node: FakeNode) -> None:
    node.die()


def drop_connection(cluster: Cluster, node: FakeNode) -> None:
    if not node.is_cut:
        node.disconnect()


def end_gracefully(cluster: Cluster, node: FakeNode) -> None:
    if node.group and cluster.settings.recovery == "fresh":
        generation, node.group = node.group.generation, None
        node.send(Done(generation))


DEEDS = {
    deed.__name__: deed
    for deed in (
        freeze, cut, hang, recover, leave, replace, crash_worker, report_stuck, report_progress, grow, shrink, kill,
        drop_connection, end_gracefully,
    )
}  # fmt: skip
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0, 4.0])),
        st.tuples(st.sampled_from(sorted(DEEDS)), st.sampled_from(NAMES)),
        st.tuples(
            st.sampled_from(["restart", "replace_coordinator", "kill_all", "cut_all"]),
            st.just(""),
        ),
    ),
    max_size=14,
)


def play(cluster: Cluster, events: list[tuple[str, Any]]) -> None:
    """Carry out one event after the other."""
    for name, value in events:
        if name == "wait":
            cluster.run(value)
        elif name == "restart":
            cluster.restart_coordinator()
        elif name == "replace_coordinator":
            cluster.restart_coordinator(epoch=cluster.settings.epoch + 1)
        elif name == "start":
            if cluster.newest(value) is None:
                cluster.start(value)
        elif name.endswith("_all"):
            for node in [one for one in cluster.nodes if one.is_alive]:
                DEEDS[name.removesuffix("_all")](cluster, node)
        else:
            node = cluster.newest(value)
            if node is not None:
                DEEDS[name](cluster, node)


GRACEFUL = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["start", "leave", "leave"]), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0, 2.0])),
        st.tuples(st.just("leave_all"), st.just("")),
    ),
    max_size=16,
)


def is_at_rest(cluster: Cluster) -> bool:
    """Return whether the newest group is exactly as expected, or the missing part is reported."""
    group = cluster.group
    if group.finished:
        return all(not node.is_alive for node in cluster.nodes)
    able = [node for node in cluster.nodes if node.is_alive and node.workers > 0]
    if any(node.is_leaving for node in able) or any(
        node.peer not in cluster.peers for node in able
    ):
        return False
    needed = 1 if group.world and group.world.done else cluster.settings.min_nodes
    wanted = min(
        len([node for node in able if not is_done(cluster, node)]),
        cluster.settings.max_nodes,
    )
    if cluster.condition.phase == "Running":
        members = cluster.members_of(cluster.gone)
        is_whole = sum(one.group.workers for one in members if one.group) == sum(
            one.workers for one in members
        )
        return is_whole and (
            len(members) == wanted or bool(group.world and group.world.done)
        )
    return wanted < needed and cluster.condition.reason in WAITS


def is_done(cluster: Cluster, node: FakeNode) -> bool:
    joined = cluster.group.nodes.get(node.name)
    return joined is not None and joined.is_done


def explore(
    judge: Callable[[list[tuple[str, Any]]], None],
    events: st.SearchStrategy[list[tuple[str, Any]]],
    examples: int,
) -> None:
    """Let ``judge`` check this number of event lists, the same ones each time."""
    chosen = settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    chosen(given(events=events)(judge))()


def running_group(**changes: Any) -> Cluster:
    """Three nodes that train together."""
    cluster = Cluster(make_settings(max_failures_without_progress=1000, **changes))
    for name in NAMES[:3]:
        cluster.start(name)
    cluster.run_until_running()
    return cluster


def check_any_order(cluster: Cluster, events: list[tuple[str, Any]]) -> None:
    play(cluster, events)
    for node in [one for one in cluster.nodes if one.is_alive]:
        recover(cluster, node)
    until = cluster.now + 25
    while not is_at_rest(cluster):
        assert cluster.now < until, (
            cluster.condition,
            cluster.group.proposal,
            cluster.group.world,
            cluster.group.nodes,
        )
        cluster.run(0.3)
    # Two counts of the same time agree: if nodes train, none of it is lost.
    cluster.run(0.6)
    if cluster.group.ledger.nodes.keys() & {"training", "repeated"}:
        assert cluster.group.accounting.cause is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [800, pytest.param(5000, marks=pytest.mark.long)])
def test_events_in_any_order_end_in_one_group_or_a_named_wait(examples: int) -> None:
    def judge(events: list[tuple[str, Any]]) -> None:
        check_any_order(
            Cluster(make_settings(max_failures_without_progress=1000)),
            [("start", "0"), ("start", "1"), *events],
        )

    explore(judge, EVENTS, examples)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [600, pytest.param(3000, marks=pytest.mark.long)])
def test_events_in_any_order_in_a_running_group_end_in_one_group_or_a_named_wait(
    examples: int,
) -> None:
    def judge(events: list[tuple[str, Any]]) -> None:
        check_any_order(running_group(max_nodes=3), events)

    explore(judge, EVENTS, examples)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [400, pytest.param(2000, marks=pytest.mark.long)])
def test_events_in_any_order_with_fresh_workers_end_in_one_group_or_a_named_wait(
    examples: int,
) -> None:
    def judge(events: list[tuple[str, Any]]) -> None:
        check_any_order(running_group(recovery="fresh", hold_joins=True), events)

    explore(judge, EVENTS, examples)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_nodes_that_join_and_drain_gracefully_lose_no_step(examples: int) -> None:
    def judge(events: list[tuple[str, Any]]) -> None:
        cluster = Cluster(make_settings(lease_seconds=30))
        cluster.is_graceful = True
        play(
            cluster,
            [("start", "0"), ("start", "1"), ("start", "2"), ("wait", 1.0), *events],
        )
        for node in [one for one in cluster.nodes if one.is_alive]:
            leave(cluster, node)
        cluster.run(5)
        assert all(node.exit_code == 75 for node in cluster.nodes)
        assert max(cluster.saved, default=-1) == cluster.trained
        assert len(cluster.saved) == len(cluster.saves_asked) == len(set(cluster.saved)), (
            "the same state was saved twice"
        )

    explore(judge, GRACEFUL, examples)
