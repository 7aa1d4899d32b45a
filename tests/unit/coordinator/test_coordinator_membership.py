"""Each rule of membership, on a simulated cluster."""

from typing import Any

import pytest
from simulated_cluster import TOKEN, Cluster, FakeNode, make_settings

from evergrad_common.causes import BreakCause
from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import (
    Boundary,
    Broken,
    Capacity,
    Commit,
    Done,
    End,
    Finished,
    Finishing,
    Go,
    Hello,
    Leave,
    Leaving,
    Message,
    Permit,
    Ping,
    Placement,
    Plan,
    Progress,
    Refused,
    Restoring,
    Result,
    Up,
)
from evergrad_coordinator.rules import events
from evergrad_coordinator.rules.group import new_group
from evergrad_coordinator.rules.phase import GroupPhase, find_phase
from evergrad_coordinator.rules.state import Finish, GroupSettings, Send
from evergrad_coordinator.rules.status import build_status


def start_running(names: str = "012", **changes: Any) -> tuple[Cluster, list[FakeNode]]:
    """A training group."""
    cluster = Cluster(make_settings(expect=len(names), **{"max_nodes": 4, **changes}))
    nodes = [cluster.start(name) for name in names]
    cluster.run_until_running()
    return cluster, nodes


def of_kind(node: FakeNode, kind: type[Message]) -> list[Any]:
    return [message for message in node.received if isinstance(message, kind)]


WRONG_TOKEN = "hello.token: not the token of this run. Give the node the token file of its coordinator."


def hello(cluster: Cluster, **changes: Any) -> Message:
    """Return the response to a hello from an unknown node."""
    values: dict[str, Any] = {
        "run": "r",
        "node": "7",
        "incarnation": "x",
        "address": "a",
        "workers": 1,
        "recovery": "in-process",
    }
    values["token"] = cluster.settings.token
    effects = events.on_hello(
        cluster.group, 999, Hello(**{**values, **changes}), now=cluster.now
    )
    return next(
        effect.message
        for effect in effects
        if isinstance(effect, Send) and effect.peer == 999
    )


def break_group(node: FakeNode, cause: BreakCause = "worker_crash", **changes: Any) -> None:
    assert node.group
    node.send(Broken(node.group.generation, cause, **changes))


# ---- start -------------------------------------------------------------------------------------------------


def test_ranks_are_ordered_by_numeric_index_and_count_workers() -> None:
    cluster = Cluster(make_settings(expect=3))
    nodes = [
        cluster.start(name, workers=workers)
        for name, workers in (("10", 1), ("9", 3), ("2", 2))
    ]
    cluster.run_until_running()
    go = {node.name: of_kind(node, Go)[0] for node in nodes}
    assert [
        (go[name].first_rank, go[name].workers, go[name].node_rank)
        for name in ("2", "9", "10")
    ] == [
        (0, 2, 0),
        (2, 3, 1),
        (5, 1, 2),
    ]
    assert {
        (one.world_size, one.num_nodes, one.address, one.port) for one in go.values()
    } == {(6, 3, "10.0.0.2", 1002)}


def test_the_start_waits_for_the_expected_nodes() -> None:
    cluster = Cluster(make_settings(expect=3, start_wait_seconds=5))
    cluster.start(0), cluster.start(1)
    cluster.run(3)
    assert cluster.group.generation == 0
    assert cluster.condition.message == "2 of 3 expected nodes connected"
    cluster.start(2)
    cluster.run(0.5)
    assert len(cluster.go_members[1]) == 3


def test_the_start_waits_for_a_bounded_time() -> None:
    cluster = Cluster(make_settings(expect=3, start_wait_seconds=5))
    cluster.start(0), cluster.start(1)
    cluster.run(6)
    assert len(cluster.go_members[1]) == 2


def test_fewer_nodes_than_the_minimum_wait_with_a_named_reason() -> None:
    cluster = Cluster()
    cluster.start(0)
    cluster.run(30)
    assert (cluster.condition.phase, cluster.condition.reason) == (
        "Waiting",
        "WaitingForNodes",
    )
    assert cluster.group.generation == 0


def test_a_node_without_workers_is_connected_but_not_a_member() -> None:
    cluster = Cluster(make_settings(expect=2))
    nodes = [cluster.start(0), cluster.start(1), cluster.start(2, workers=0)]
    cluster.run_until_running()
    assert len(cluster.go_members[1]) == 2
    nodes[2].workers = 1
    nodes[2].send(Capacity(1))
    cluster.run(2)
    assert len(cluster.go_members[2]) == 3
    assert of_kind(nodes[0], Plan)[-1].hard is False


# ---- changes -----------------------------------------------------------------------------------------------


def test_a_lost_node_causes_a_hard_plan_of_the_others() -> None:
    cluster, nodes = start_running()
    nodes[1].die()
    cluster.run_until_running()
    assert of_kind(nodes[0], Plan)[-1].hard is True
    assert [node.name for node, _ in cluster.go_members[2]] == ["0", "2"]
    assert cluster.group.accounting.restarts == {"node_lost": 1}
    assert 0 < cluster.group.accounting.lost_seconds["node_lost"] < 2


def test_a_silent_node_is_lost_and_rejoins_a_new_group() -> None:
    cluster, nodes = start_running(lease_seconds=20)
    nodes[1].is_frozen = True
    cluster.run(2)
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == ["0", "2"]
    nodes[1].is_frozen = False
    cluster.run(3)
    assert len(cluster.go_members[cluster.gone]) == 3
    assert of_kind(nodes[0], Plan)[-1].hard is False


def test_a_join_waits_for_a_step_boundary() -> None:
    cluster, nodes = start_running("01")
    cluster.start(3)
    cluster.run_until_running()
    cluster.run(1)
    plan = of_kind(nodes[0], Plan)[-1]
    assert (plan.hard, plan.reason) == (False, "node 3 joined")
    assert len(cluster.go_members[2]) == 3


def set_bounds(cluster: Cluster, low: int, high: int) -> None:
    cluster.carry_out(
        events.set_bounds(cluster.group, min_nodes=low, max_nodes=high, now=cluster.now)
    )


def test_a_lowered_maximum_makes_spares_at_a_step_boundary_and_a_raised_one_readmits_them() -> (
    None
):
    cluster, _ = start_running("0123")
    step = cluster.newest_step()
    set_bounds(cluster, 1, 2)
    cluster.run(3)
    assert [node.name for node in cluster.members_of(cluster.group.generation)] == [
        "0",
        "1",
    ]
    assert cluster.newest_step() > step
    set_bounds(cluster, 1, 4)
    cluster.run(3)
    assert [node.name for node in cluster.members_of(cluster.group.generation)] == [
        "0",
        "1",
        "2",
        "3",
    ]


def test_a_lowered_failure_budget_applies_at_once_and_a_raised_one_lets_the_run_continue() -> (
    None
):
    cluster, _ = start_running("012", max_failures_without_progress=1)
    cluster.train = lambda: None  # type: ignore[method-assign]
    group = cluster.group

    def allow(failures: int) -> None:
        cluster.carry_out(
            events.set_bounds(
                group, min_nodes=2, max_nodes=4, max_failures=failures, now=cluster.now
            )
        )

    fail_often(cluster, 1)
    allow(3)
    fail_often(cluster, 2)
    assert (cluster.exit_code, group.budget.used) == (None, 3)
    allow(2)
    cluster.run(0.2)
    assert cluster.exit_code == 70


def test_unchanged_bounds_have_no_effect() -> None:
    cluster, _ = start_running("012")
    generation = cluster.group.generation
    set_bounds(cluster, cluster.group.settings.min_nodes, cluster.group.settings.max_nodes)
    cluster.run(2)
    assert cluster.group.generation == generation


def test_a_lowered_minimum_lets_a_waiting_run_continue() -> None:
    cluster, nodes = start_running("012", min_nodes=3)
    nodes[2].die()
    cluster.run(3)
    assert cluster.condition.phase == "Waiting"
    set_bounds(cluster, 2, 3)
    cluster.run_until_running()
    assert len(cluster.members_of(cluster.group.generation)) == 2


def test_a_raised_minimum_does_not_interrupt_the_training_group() -> None:
    cluster, _ = start_running("01")
    step = cluster.newest_step()
    set_bounds(cluster, 4, 4)
    cluster.run(3)
    assert cluster.newest_step() > step


def test_nodes_beyond_the_maximum_are_spares_and_interrupt_no_member() -> None:
    cluster, nodes = start_running(max_nodes=3)
    spare = cluster.start(9)
    cluster.run(3)
    assert cluster.group.generation == 1
    nodes[0].die()
    cluster.run_until_running()
    assert [node.name for node, _ in cluster.go_members[2]] == ["1", "2", "9"]
    low = cluster.start("0")
    cluster.run(3)
    assert cluster.group.generation == 2 and low.is_alive and spare.group


def test_events_within_the_debounce_time_make_one_plan() -> None:
    cluster, nodes = start_running("0123", min_nodes=1)
    nodes[1].die()
    nodes[2].die()
    cluster.run_until_running()
    assert cluster.group.generation == 2


def due_in(cluster: Cluster) -> float:
    """Seconds until the next review."""
    return events.next_tick(cluster.group, now=cluster.now) - cluster.now


def test_a_lost_member_is_planned_sooner_than_a_join() -> None:
    cluster, nodes = start_running("012", min_nodes=1)
    debounce = cluster.settings.debounce_seconds
    cluster.start(3)
    assert due_in(cluster) == pytest.approx(debounce)
    nodes[1].die()
    assert due_in(cluster) == pytest.approx(0.005)


def test_members_lost_shortly_after_a_plan_share_the_next_plan() -> None:
    cluster, nodes = start_running("0123", min_nodes=1)
    debounce = cluster.settings.debounce_seconds
    nodes[1].die()
    cluster.now += due_in(cluster)
    cluster.carry_out(events.on_tick(cluster.group, now=cluster.now))
    assert cluster.group.generation == 2 and cluster.group.planned_at == cluster.now

    nodes[2].die()
    assert due_in(cluster) == pytest.approx(debounce)
    cluster.now += debounce / 2
    nodes[3].die()
    assert due_in(cluster) == pytest.approx(debounce / 2)
    cluster.run_until_running()
    assert cluster.group.generation == 3


def test_connections_that_all_end_together_stop_no_group() -> None:
    cluster, nodes = start_running("012")
    for node in nodes:
        node.disconnect()
        cluster.now += 0.001
    cluster.run_until_running()
    assert (
        cluster.group.generation == 1 and nodes[0].group and not of_kind(nodes[0], Plan)[1:]
    )


@pytest.mark.parametrize("deed", ["leaves", "is no member", "is done"])
def test_the_loss_of_a_node_that_the_group_does_not_need_waits_for_the_debounce_time(
    deed: str,
) -> None:
    recovery = "fresh" if deed == "is done" else "in-process"
    cluster, nodes = start_running("012", max_nodes=3, min_nodes=1, recovery=recovery)
    node = cluster.start(9) if deed == "is no member" else nodes[2]
    if deed == "leaves":
        node.is_leaving = True
        node.send(Leaving())
    if deed == "is done":
        node.send(Done(1))
    cluster.group.review_at = None
    node.die()
    assert due_in(cluster) == pytest.approx(cluster.settings.debounce_seconds)


@pytest.mark.capability("O-42")
def test_a_member_lost_during_preparation_causes_a_new_plan() -> None:
    cluster, nodes = start_running("0123")
    nodes[2].has_answered = False
    nodes[1].die()
    cluster.run(0.5)
    assert cluster.condition.reason == "MembersGettingReady"
    nodes[2].die()
    cluster.run_until_running()
    assert [node.name for node, _ in cluster.go_members[3]] == ["0", "3"]
    assert 2 not in cluster.go_members


def test_a_member_that_never_becomes_ready_is_dropped() -> None:
    cluster, nodes = start_running("0123", ready_limit_seconds=2)
    nodes[2].has_answered = False
    nodes[1].die()
    cluster.run(4)
    names = [node.name for node, _ in cluster.go_members[cluster.gone]]
    assert names == ["0", "3"]


def test_a_soft_plan_without_a_boundary_becomes_hard() -> None:
    cluster, nodes = start_running("01", soft_limit_seconds=3, up_limit_seconds=60)
    nodes[1].has_answered = False
    cluster.start(3)
    cluster.run(2)
    assert of_kind(nodes[0], Plan)[-1].hard is False
    cluster.run(2)
    assert of_kind(nodes[0], Plan)[-1].hard is True


def test_a_group_that_does_not_come_up_is_planned_again() -> None:
    cluster, nodes = start_running("012", up_limit_seconds=2)
    nodes[1].has_answered = False
    nodes[2].watch_group = lambda: None  # type: ignore[method-assign]
    nodes[0].die()
    cluster.run(0.2)
    nodes[1].get_ready(2)
    assert cluster.condition.reason == "MembersStarting"
    cluster.run(2.5)
    assert cluster.group.generation > 2
    assert (
        cluster.group.budget.last
        and cluster.group.budget.last.report.cause == "setup_failed"
    )


def test_a_start_may_last_while_its_members_report_that_their_state_grows() -> None:
    cluster, nodes = start_running("012", up_limit_seconds=2)
    nodes[1].has_answered = False
    nodes[2].watch_group = lambda: None  # type: ignore[method-assign]
    nodes[0].die()
    cluster.run(0.2)
    nodes[1].get_ready(2)
    generation = cluster.group.generation
    assert cluster.condition.reason == "MembersStarting"
    for number in range(1, 8):
        nodes[1].send(Restoring(generation, number * 1000))
        cluster.run(1)
    assert cluster.group.generation == generation

    # The same number again is not progress.
    for _ in range(3):
        nodes[1].send(Restoring(generation, 7000))
        cluster.run(1)
    assert cluster.group.generation > generation
    failure = cluster.group.budget.last
    assert failure and failure.report.cause == "setup_failed"


def test_too_few_nodes_leave_their_group_and_wait() -> None:
    cluster, nodes = start_running("01")
    nodes[1].die()
    cluster.run(1)
    assert (cluster.condition.phase, cluster.condition.reason) == (
        "Waiting",
        "WaitingForNodes",
    )
    assert nodes[0].group is None and nodes[0].is_alive
    cluster.start(1)
    cluster.run_until_running()
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == ["0", "1"]


def test_a_member_that_reconnects_without_its_workers_breaks_the_group() -> None:
    cluster, nodes = start_running()
    for node in nodes:
        node.watch_group = lambda: None  # type: ignore[method-assign]
    nodes[1].disconnect()
    nodes[1].group = None
    nodes[1].connect()
    cluster.run(1)
    assert [node.name for node, _ in cluster.go_members[2]] == ["0", "1", "2"]
    assert of_kind(nodes[0], Plan)[-1].hard is True


def test_a_member_that_reconnects_during_planning_gets_the_plan_again() -> None:
    cluster, nodes = start_running("0123", ready_limit_seconds=60)
    nodes[1].die()
    nodes[3].has_answered = False
    cluster.run(0.2)
    assert cluster.group.proposal and {
        name for name, _ in cluster.group.proposal.waits_for
    } == {"3"}
    nodes[0].disconnect()
    nodes[3].get_ready(2)
    nodes[0].connect()
    nodes[3].has_answered = True
    cluster.run(1)
    assert cluster.condition.phase == "Running"
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == ["0", "2", "3"]


def test_the_loss_of_all_connections_restarts_nothing() -> None:
    cluster, nodes = start_running()
    for node in nodes:
        node.disconnect()
    cluster.run(2)
    assert cluster.condition.phase == "Running"
    assert cluster.group.generation == 1


def test_a_suspended_coordinator_declares_no_node_lost() -> None:
    cluster, _ = start_running()
    cluster.now += 60
    cluster.run(1)
    assert (cluster.condition.phase, cluster.group.generation) == ("Running", 1)


def test_a_node_that_spoke_first_after_a_suspension_of_the_coordinator_is_lost_in_time() -> (
    None
):
    cluster, nodes = start_running()
    # The coordinator's host was suspended for a minute. Messages from this time are read before its timers
    # run.
    cluster.now += 60
    for node in nodes:
        node.send(Ping())
    cluster.carry_out(events.on_tick(cluster.group, now=cluster.now))
    nodes[0].is_cut = True
    cluster.run(2 * cluster.settings.silence_seconds)
    assert "0" not in cluster.group.nodes


def test_an_up_repeated_on_a_new_connection_does_not_lower_the_step() -> None:
    cluster, nodes = start_running()
    assert nodes[0].group
    generation = nodes[0].group.generation
    nodes[0].send(Progress(generation, 500))
    # A node repeats messages that may have been lost: its group came up long ago.
    nodes[1].disconnect()
    nodes[1].connect()
    nodes[1].send(Up(generation, 5))
    assert build_status(cluster.group, now=cluster.now)["step"] == 500


# ---- draining
# ------------------------------------------------------------------------------------------------


def leave(node: FakeNode) -> None:
    node.is_leaving = True
    node.send(Leaving())


def test_a_draining_node_leaves_without_saving_while_others_hold_the_state() -> None:
    cluster, nodes = start_running()
    leave(nodes[0])
    cluster.run_until_running()
    cluster.run(0.5)
    assert of_kind(nodes[1], Plan)[-1].hard is False
    assert of_kind(nodes[0], Leave) == [Leave(2, save=False)]
    assert cluster.saved == []
    assert cluster.group.accounting.restarts == {"node_left": 1}


def test_if_all_nodes_drain_exactly_one_saves_and_the_run_stops() -> None:
    cluster, nodes = start_running()
    step = cluster.newest_step()
    for node in nodes:
        leave(node)
    cluster.run(2)
    assert cluster.saves_asked == ["0"]
    assert len(cluster.saved) == 1 and cluster.saved[0] >= step >= 0
    assert cluster.condition.phase == "Stopped"


def test_a_group_without_remaining_nodes_saves_together_before_it_is_left() -> None:
    cluster, nodes = start_running()
    leave(nodes[0])
    cluster.run_until_running()
    assert not of_kind(nodes[1], Plan)[-1].saves, "the others go on with the state"
    for node in nodes[1:]:
        leave(node)
    cluster.run(2)
    assert of_kind(nodes[1], Plan)[-1].saves and of_kind(nodes[2], Plan)[-1].saves


def test_if_too_few_nodes_remain_the_draining_node_saves() -> None:
    cluster, nodes = start_running("01")
    leave(nodes[1])
    cluster.run(2)
    assert cluster.saves_asked == ["1"]
    assert nodes[0].is_alive
    leave(nodes[0])
    cluster.run(2)
    assert cluster.saves_asked == ["1"], "the same step is not saved again"
    assert not nodes[0].is_alive


def test_joining_nodes_wait_until_the_only_state_is_saved() -> None:
    cluster, nodes = start_running("01", max_nodes=2)
    for name in "23":
        cluster.start(name)
    cluster.run(0.5)
    for node in nodes:
        leave(node)
    cluster.run(0.3)
    cluster.run_until_running()
    assert cluster.saves_asked == ["0"]
    assert [node.name for node, _ in cluster.go_members[2]] == ["2", "3"]
    left = next(
        number
        for number, line in enumerate(cluster.logs)
        if line.event == "gone" and line.fields["node"] == "0"
    )
    went = next(
        number
        for number, line in enumerate(cluster.logs)
        if line.event == "go" and line.fields["generation"] == 2
    )
    assert left < went


def test_fresh_workers_are_never_asked_to_save() -> None:
    cluster, nodes = start_running(recovery="fresh")
    for node in nodes:
        leave(node)
    cluster.run(2)
    assert cluster.saves_asked == []
    assert all(not node.is_alive for node in nodes)


def test_a_spare_leaves_at_once() -> None:
    cluster, _ = start_running(max_nodes=3)
    spare = cluster.start(9)
    cluster.run(0.3)
    leave(spare)
    cluster.run(0.3)
    assert not spare.is_alive
    assert cluster.group.generation == 1


@pytest.mark.parametrize(("saves", "code"), [(True, 75), (False, 76)])
def test_exit_when_empty_reports_whether_the_state_was_saved(
    saves: bool, code: int
) -> None:
    cluster, nodes = start_running("01", exit_when_empty=True)
    for node in nodes:
        leave(node)
        if not saves:
            node.has_answered = False
    if saves:
        cluster.run(2)
    else:
        for node in nodes:
            node.get_ready(2)
        cluster.run(0.3)
        for node in nodes:
            node.get_ready(2)
            node.die()
        cluster.run(1)
    assert cluster.exit_code == code


# ---- identity ----------------------------------------------------------------------------------------------


def test_the_newest_process_of_a_node_permanently_replaces_the_older_one() -> None:
    cluster, nodes = start_running()
    twin = cluster.start(1)
    cluster.run_until_running()
    assert nodes[1].exit_code == 75
    assert twin.group is not None
    effects = events.on_hello(
        cluster.group,
        999,
        Hello("r", "1", nodes[1].incarnation, "a", 1, "in-process", token=TOKEN),
        now=cluster.now,
    )
    assert [
        effect.message.exit_code
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, End)
    ] == [75]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"run": "other"}, "WrongRun", "hello.run: other"),
        ({"token": "no"}, "WrongToken", "hello.token"),
        ({"token": "é"}, "WrongToken", "hello.token"),
        ({"protocol": 99}, "ProtocolVersion", "hello.protocol: 99"),
        ({"recovery": "fresh"}, "RecoveryDiffers", "hello.recovery: fresh"),
        (
            {"fingerprint": {"torch": "2.1"}},
            "FingerprintDiffers",
            "hello.fingerprint.torch: 2.1; the group's first member has nothing",
        ),
        ({"node": ""}, "WrongValue", "hello.node"),
        ({"workers": -1}, "WrongValue", "hello.workers: -1"),
        ({"known_generation": 2**53 - 1}, "WrongValue", "hello.generation"),
    ],
)
def test_a_node_of_another_run_is_refused_with_a_reason(
    changes: dict[str, Any], reason: str, words: str
) -> None:
    cluster, _ = start_running()
    answer = hello(cluster, **changes)
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.exit_code) == (reason, 70), (
        "it concerns that node, never the run"
    )
    assert words in answer.message
    assert "7" not in cluster.group.nodes


@pytest.mark.parametrize("token", ["", "no", "é", TOKEN[:-1], f"{TOKEN} "])
def test_without_the_token_a_refusal_reveals_nothing_of_the_run_and_changes_nothing(
    token: str,
) -> None:
    cluster, nodes = start_running()
    before = (cluster.group.world, cluster.group.generation, dict(cluster.group.nodes))
    wrong = {
        "run": "other",
        "protocol": 99,
        "recovery": "fresh",
        "fingerprint": {"torch": "2.1"},
        "node": "0",
        "workers": -1,
    }
    answers = {repr(hello(cluster, token=token, **dict([one]))) for one in wrong.items()}
    answers.add(repr(hello(cluster, token=token, node="0", known_generation=2**40)))
    assert answers == {repr(Refused("WrongToken", WRONG_TOKEN, ExitCode.INTERNAL))}, (
        "whatever else is wrong or right"
    )
    cluster.run(2)
    assert (
        cluster.group.world,
        cluster.group.generation,
        dict(cluster.group.nodes),
    ) == before
    assert all(node.is_alive and node.group for node in nodes)


def test_a_coordinator_without_a_token_admits_no_node() -> None:
    for settings in (
        GroupSettings("r", 1, 2, 2, token=""),
        GroupSettings("r", 1, 2, 2, token=TOKEN),
    ):
        effects = events.on_hello(
            new_group(settings, generation=0, now=0.0),
            1,
            Hello("r", "0", "x", "a", 1, "in-process"),
            now=0.0,
        )
        assert [
            one.message.reason
            for one in effects
            if isinstance(one, Send) and isinstance(one.message, Refused)
        ] == ["WrongToken"]


def test_a_node_with_heartbeats_is_lost_only_if_it_is_silent_itself_for_a_lease() -> None:
    cluster, nodes = start_running(silence_seconds=0.6, lease_seconds=3)
    slow, mute = nodes[1], nodes[2]
    slow.is_frozen = mute.is_frozen = True
    for _ in range(15):
        events.on_beat(cluster.group, slow.key, now=cluster.now)
        events.on_beat(cluster.group, (mute.name, "another process of it"), now=cluster.now)
        cluster.run(0.1)
    assert set(cluster.group.nodes) == {"0", "1"}
    while "1" in cluster.group.nodes:
        assert cluster.now < 1100
        events.on_beat(cluster.group, slow.key, now=cluster.now)
        cluster.run(0.1)


def test_connections_beyond_the_limit_are_refused() -> None:
    cluster, _ = start_running(max_members=3)
    answer = hello(cluster)
    assert isinstance(answer, Refused)
    assert answer.reason == "TooManyMembers"


# ---- failures ----------------------------------------------------------------------------------------------


def test_a_broken_group_is_planned_again_with_all_nodes() -> None:
    cluster, nodes = start_running()
    break_group(nodes[1], "peer_lost")
    cluster.run_until_running()
    assert [node.name for node, _ in cluster.go_members[2]] == ["0", "1", "2"]
    assert cluster.group.budget.used == 0
    assert cluster.group.accounting.restarts == {"peer_lost": 1}


@pytest.mark.parametrize("cause", ["worker_crash", "stuck", "peer_lost"])
def test_a_plan_has_its_cause_as_a_value_separate_from_its_reason(
    cause: BreakCause,
) -> None:
    cluster, nodes = start_running()
    break_group(nodes[1], cause)
    cluster.run_until_running()
    assert [plan.cause for plan in of_kind(nodes[0], Plan)] == ["node_joined", cause]


def break_whole_group(cluster: Cluster, *, step: int = 5) -> None:
    """All nodes see their peers fail, but no node is lost."""
    for node in [one for one in cluster.nodes if one.group]:
        node.step = step
        break_group(node, "peer_lost", step=step, message="Timed out waiting")
    cluster.run(0.2)


def test_a_group_that_repeatedly_breaks_at_the_same_step_uses_up_the_failure_budget() -> (
    None
):
    cluster, nodes = start_running(max_failures_without_progress=2)
    cluster.train = lambda: None  # type: ignore[method-assign]
    used = []
    for _ in range(4):
        break_whole_group(cluster)
        if cluster.exit_code is None:
            cluster.run_until_running()
        used.append(cluster.group.budget.used)
    assert (used, cluster.exit_code) == ([0, 1, 2, 3], 70)
    message = of_kind(nodes[0], End)[-1].message
    for words in (
        "after step 5 although no node was lost; 3 failures",
        "2 allowed",
        "Timed out",
        "--address",
        "collective",
    ):
        assert words in message
    assert [len(of_kind(node, End)) for node in nodes] == [1, 1, 1]


def test_breaks_with_progress_between_them_count_no_failure() -> None:
    cluster, _ = start_running(max_failures_without_progress=0)
    cluster.train = lambda: None  # type: ignore[method-assign]
    for step in range(5, 10):
        break_whole_group(cluster, step=step)
        cluster.run_until_running()
    assert cluster.group.budget.used == 0


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_a_break_by_a_lost_node_counts_no_failure_although_the_loss_is_detected_later(
    delay: float,
) -> None:
    cluster, _ = start_running("0123", max_failures_without_progress=0)
    cluster.train = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        victim = cluster.newest("1")
        assert victim
        victim.is_frozen = True
        break_whole_group(cluster)
        cluster.run(delay)
        victim.die()
        cluster.start("1")
        cluster.run_until_running()
    assert (cluster.exit_code, cluster.group.budget.used) == (None, 0)


def test_a_group_whose_nodes_repeatedly_fall_silent_and_return_uses_up_the_failure_budget() -> (
    None
):
    cluster, nodes = start_running(max_failures_without_progress=2)
    nodes[0].send(Progress(1, 5))
    cluster.train = lambda: None  # type: ignore[method-assign]
    for number in range(1, 20):
        slow = nodes[number % 3]
        slow.is_cut = True
        cluster.run(1)
        assert slow.name not in cluster.group.nodes, "silent"
        slow.is_cut = False
        cluster.run(1)
        if cluster.exit_code is not None:
            break
        cluster.run_until_running()
    assert (cluster.exit_code, number) == (70, 4), "the first is free, two are allowed"
    message = of_kind(nodes[0], End)[-1].message
    for words in (
        "although every node is there",
        "2 such failures are allowed",
        "was silent for a while and came back",
        "CPU",
    ):
        assert words in message


def test_silences_with_progress_between_them_count_no_failure() -> None:
    cluster, nodes = start_running(max_failures_without_progress=0)
    for number in range(8):
        nodes[1].is_cut = True
        cluster.run(1)
        nodes[1].is_cut = False
        cluster.run_until_running()
        cluster.run(1)
        assert nodes[0].group
        nodes[0].send(Progress(nodes[0].group.generation, nodes[0].step))
        assert cluster.exit_code is None, number


def lose_for_good(cluster: Cluster, name: str) -> None:
    victim = cluster.newest(name)
    assert victim
    victim.die()
    cluster.run(0.5)
    cluster.start(name)
    cluster.run(0.5)


def test_fifty_preemptions_with_progress_between_them_count_no_failure() -> None:
    cluster, _ = start_running("0123", max_failures_without_progress=0, min_nodes=1)
    for number in range(50):
        lose_for_good(cluster, str(number % 4))
        cluster.run_until_running()
        first = next(node for node in cluster.nodes if node.group)
        assert first.group
        first.send(Progress(first.group.generation, first.step))
    assert (cluster.exit_code, cluster.group.budget.used) == (None, 0)


def test_nodes_that_are_lost_repeatedly_without_progress_end_the_run_eventually() -> None:
    cluster, nodes = start_running("0123", max_failures_without_progress=1)
    nodes[0].send(Progress(1, 5))
    cluster.train = lambda: None  # type: ignore[method-assign]
    losses = 0
    while cluster.exit_code is None:
        assert losses < 100
        lose_for_good(cluster, str(losses % 4))
        losses += 1
        while cluster.condition.phase not in ("Running", "Failed"):
            cluster.run(0.1)
    assert (cluster.exit_code, losses) == (70, 20), "ten are one failure"
    assert (
        cluster.group.finished
        and "nodes or their hosts were lost 20 times in a row without progress"
        in cluster.group.finished.message
    )


def test_nodes_that_are_repeatedly_asked_to_drain_count_no_failure() -> None:
    cluster, _ = start_running("0123", max_failures_without_progress=0)
    cluster.train = lambda: None  # type: ignore[method-assign]
    for number in range(30):
        leaver = cluster.newest(str(number % 4))
        assert leaver
        leave(leaver)
        cluster.run(1)
        if leaver.is_alive:
            leaver.die()
        cluster.start(leaver.name)
        cluster.run_until_running()
    assert (cluster.exit_code, cluster.group.budget.used) == (None, 0)


def test_a_report_about_an_older_generation_is_ignored() -> None:
    cluster, nodes = start_running()
    nodes[0].die()
    cluster.run_until_running()
    nodes[1].send(Broken(1, "worker_crash"))
    cluster.run(1)
    assert cluster.group.generation == 2


def fail_often(cluster: Cluster, times: int) -> None:
    for _ in range(times):
        nodes = [node for node in cluster.nodes if node.group]
        for node in nodes:
            node.step = 5
        break_group(nodes[2], "peer_lost", step=5)
        break_group(
            nodes[1],
            "worker_crash",
            rank=1,
            step=5,
            exit_code=-11,
            message="it fell",
            time_since=0.01,
        )
        cluster.run(0.2)
        if cluster.exit_code is not None:
            return
        cluster.run_until_running()


def test_failures_without_progress_end_the_run_and_name_the_root_cause() -> None:
    cluster, nodes = start_running(max_failures_without_progress=2)
    cluster.train = lambda: None  # type: ignore[method-assign]
    fail_often(cluster, 3)
    assert cluster.exit_code == 70
    message = of_kind(nodes[0], End)[-1].message
    for words in (
        "3 times",
        "2 such failures",
        "worker_crash",
        "rank 1",
        "node 1",
        "step 5",
        "exit code -11",
        "it fell",
    ):
        assert words in message
    assert cluster.condition.phase == "Failed"


def test_progress_resets_the_failure_count() -> None:
    cluster, nodes = start_running(max_failures_without_progress=2)
    cluster.train = lambda: None  # type: ignore[method-assign]
    fail_often(cluster, 2)
    assert cluster.group.budget.used == 2
    assert nodes[0].group
    nodes[0].send(Progress(nodes[0].group.generation, 5))
    assert cluster.group.budget.used == 2
    nodes[0].send(Progress(nodes[0].group.generation, 6))
    assert cluster.group.budget.used == 0


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_step_finished_before_a_failure_but_reported_later_is_not_progress(
    is_reported: bool,
) -> None:
    cluster, nodes = start_running(max_failures_without_progress=2)
    cluster.train = lambda: None  # type: ignore[method-assign]
    nodes[0].send(Progress(1, 19))
    for number in (1, 2, 3):
        # All finish step 20, and one worker crashes before rank 0 has reported the step.
        group = nodes[0].group
        assert group is not None
        for node in nodes:
            node.step = 20
        break_group(nodes[1], "worker_crash", step=19)
        if is_reported:
            nodes[0].send(Progress(group.generation, 20))
        assert cluster.group.budget.used == number
        cluster.run(0.2)
        if number == 3:
            break
        # The new group comes up at step 20, which its members have in memory.
        cluster.run_until_running()
        assert cluster.group.training.step == 20
        assert cluster.group.budget.used == number
    assert cluster.exit_code == 70


def test_new_steps_are_steps_that_a_whole_group_finishes_for_the_first_time() -> None:
    cluster, nodes = start_running()
    cluster.train = lambda: None  # type: ignore[method-assign]

    def report(step: int) -> Any:
        assert nodes[0].group
        nodes[0].send(Progress(nodes[0].group.generation, step))
        return build_status(cluster.group, now=cluster.now)["newSteps"]

    assert report(19) == 20
    assert report(19) == 20
    # A member is lost: the step may have been finished before.
    nodes[2].die()
    assert report(20) == 20
    cluster.start("2")
    cluster.run_until_running()
    assert report(20) == 20
    # A group that began at an older checkpoint trains known steps again.
    assert report(12) == 20
    assert report(21) == 21


def test_with_fresh_workers_only_a_newer_checkpoint_is_progress() -> None:
    cluster, nodes = start_running(recovery="fresh")
    break_group(nodes[0])
    cluster.run_until_running()
    assert nodes[0].group
    nodes[0].send(Progress(nodes[0].group.generation, 10_000))
    assert cluster.group.budget.used == 1
    nodes[0].send(Boundary(nodes[0].group.generation, 10))
    assert cluster.group.budget.used == 0


def test_a_failure_that_no_retry_can_resolve_ends_the_run_with_64() -> None:
    cluster, nodes = start_running()
    break_group(nodes[0], "user_error", is_final=True, exit_code=64, message="no such file")
    cluster.run(0.2)
    assert cluster.exit_code == 64
    assert {node.exit_code for node in nodes} == {64}
    assert of_kind(nodes[2], End)[-1].message == "no such file"


def test_repeatedly_broken_groups_are_planned_with_growing_pauses() -> None:
    cluster, _ = start_running(max_failures_without_progress=1000)
    cluster.train = lambda: None  # type: ignore[method-assign]
    for _ in range(200):
        for node in cluster.nodes:
            if node.group:
                break_group(node, "peer_lost")
        cluster.run(0.1)
    assert cluster.group.generation < 40


# ---- the end -----------------------------------------------------------------------------------------------


def test_the_result_ends_the_run_for_all_nodes_and_for_late_joiners() -> None:
    cluster, nodes = start_running()
    nodes[0].send(Result(1, 100))
    cluster.run(0.2)
    assert cluster.exit_code == 0
    assert {node.exit_code for node in nodes} == {0}
    assert hello(cluster, fingerprint={"other": "image"}) == End(0, "complete")
    assert cluster.condition.phase == "Complete"


def test_a_finished_run_uses_no_cpu() -> None:
    cluster, nodes = start_running()
    leave(nodes[1])
    nodes[0].send(Result(1, 100))
    cluster.run(2)
    assert events.next_tick(cluster.group, now=cluster.now) > cluster.now + 0.1


def test_a_result_of_an_older_generation_is_ignored() -> None:
    cluster, nodes = start_running()
    nodes[0].die()
    cluster.run_until_running()
    nodes[1].send(Result(1, 100))
    assert cluster.exit_code is None


def test_a_run_with_fresh_workers_is_done_if_all_nodes_are_done() -> None:
    cluster, nodes = start_running(recovery="fresh")
    for node in nodes:
        assert cluster.exit_code is None
        node.group = None
        node.send(Done(1))
    assert cluster.exit_code == 0


def test_the_status_names_finished_workers_and_the_other_nodes_get_finishing() -> None:
    cluster, nodes = start_running(recovery="fresh")
    nodes[0].group = None
    nodes[0].send(Finished(1, 1))
    nodes[0].send(Finished(1, 0))
    status = build_status(cluster.group, now=cluster.now)
    assert (status["phase"], status["reason"]) == ("Running", "SomeWorkersFinished")
    # A node reports only its own ranks.
    assert status["message"] == "rank 0 has finished, ranks 1-2 have not"
    nodes[0].send(Done(1))
    cluster.run(0.1)
    assert [of_kind(node, Finishing) for node in nodes[1:]] == [[Finishing(1)]] * 2
    nodes[2].group = None
    nodes[2].send(Done(1))
    status = build_status(cluster.group, now=cluster.now)
    assert status["message"] == "ranks 0, 2 have finished, rank 1 has not"
    assert [len(of_kind(node, Finishing)) for node in nodes[1:]] == [1, 1]


def test_a_node_lost_after_it_was_done_causes_no_plan() -> None:
    cluster, nodes = start_running(recovery="fresh")
    nodes[0].group = None
    nodes[0].send(Done(1))
    nodes[0].die()
    cluster.run(0.3)
    assert cluster.group.generation == 1
    for node in nodes[1:]:
        node.group = None
        node.send(Done(1))
    assert cluster.exit_code == 0


def test_unfinished_nodes_restart_even_below_the_minimum_if_a_member_is_lost() -> None:
    cluster, nodes = start_running(recovery="fresh")
    nodes[0].group = None
    nodes[0].send(Done(1))
    nodes[1].die()
    cluster.run(1)
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == ["2"]
    nodes[2].send(Done(cluster.gone))
    assert cluster.exit_code == 0


# ---- holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_one_there", [False, True])
def test_a_held_join_waits_for_a_later_checkpoint_and_not_an_earlier_one(
    is_one_there: bool,
) -> None:
    cluster, nodes = start_running(
        recovery="fresh", hold_joins=True, longest_hold_seconds=50
    )
    if is_one_there:
        nodes[0].send(Boundary(1, 10))
        cluster.run(1)
    cluster.start(7)
    cluster.run(5)
    assert cluster.group.generation == 1
    nodes[0].send(Boundary(1, 20))
    cluster.run(1)
    assert len(cluster.go_members[2]) == 4


def test_a_hold_ends_after_a_bounded_time() -> None:
    cluster, _ = start_running(recovery="fresh", hold_joins=True, longest_hold_seconds=5)
    cluster.start(7)
    cluster.run(4)
    assert cluster.group.generation == 1
    cluster.run(3)
    assert len(cluster.go_members[2]) == 4


def test_no_join_is_held_while_nodes_are_missing() -> None:
    cluster, nodes = start_running(
        recovery="fresh", hold_joins=True, longest_hold_seconds=50
    )
    nodes[0].die()
    cluster.run_until_running()
    cluster.start(0)
    cluster.run(1)
    assert len(cluster.go_members[3]) == 3


def test_only_a_plan_for_joining_nodes_leaves_time_for_a_running_save() -> None:
    cluster, nodes = start_running(save_patience_seconds=1.0)
    cluster.start(7)
    cluster.run(1)
    cluster.run_until_running()
    leave(nodes[1])
    cluster.run(1)
    cluster.run_until_running()
    nodes[2].die()
    cluster.run(1)
    plans = of_kind(nodes[0], Plan)[1:]
    assert [(plan.hard, plan.patience_seconds) for plan in plans] == [
        (False, 1.0),
        (False, 0.0),
        (True, 0.0),
    ]


# ---- restart of the coordinator ----------------------------------------------------------------------------


def test_a_running_group_is_adopted_without_a_plan() -> None:
    cluster, nodes = start_running()
    step = cluster.newest_step()
    cluster.restart_coordinator()
    cluster.run(1)
    assert cluster.condition.phase == "Running"
    assert cluster.group.generation == 1
    assert cluster.newest_step() > step
    assert len(of_kind(nodes[0], Plan)) == 1


@pytest.mark.parametrize("recovery", ["in-process", "fresh"])
def test_a_joining_node_with_other_settings_does_not_disturb_the_adopted_group(
    recovery: str,
) -> None:
    cluster, nodes = start_running(recovery=recovery)
    cluster.restart_coordinator(epoch=1)
    newcomers = [cluster.start(name, script="edited since") for name in "78"]
    cluster.run_until_running(within=2)
    cluster.run(5)
    assert cluster.gone == 1, "the living group was adopted"
    assert [node.exit_code for node in (*nodes, *newcomers)] == [None, None, None, 70, 70]
    assert (
        "edited since; the group's first member has "
        in of_kind(newcomers[0], Refused)[0].message
    )


def test_an_incomplete_group_is_planned_again_after_a_lease() -> None:
    cluster, nodes = start_running(lease_seconds=1.5)
    cluster.restart_coordinator()
    nodes[1].die()
    cluster.run(1)
    assert cluster.condition.reason == "WaitingForReconnects"
    cluster.run(2)
    assert [node.name for node, _ in cluster.go_members[2]] == ["0", "2"]


def test_a_generation_is_never_used_twice_although_the_journal_is_lost() -> None:
    cluster, nodes = start_running()
    nodes[0].die()
    cluster.run_until_running()
    cluster.restart_coordinator(durable=0)
    cluster.run(5)
    assert cluster.gone == 3


@pytest.mark.parametrize("recovery", ["in-process", "fresh"])
def test_a_new_epoch_with_an_empty_journal_adopts_the_running_group_without_a_plan(
    recovery: str,
) -> None:
    cluster, nodes = start_running(recovery=recovery)
    plans, step = [len(of_kind(node, Plan)) for node in nodes], cluster.newest_step()
    for epoch in (1, 2):
        cluster.restart_coordinator(epoch=epoch)
        cluster.run_until_running(within=2)
        cluster.run(5)
        assert [len(of_kind(node, Plan)) for node in nodes] == plans, (
            "no worker was asked to stop"
        )
        assert (cluster.gone, cluster.condition.phase) == (1, "Running")
    assert cluster.newest_step() >= step + 100, "it trained in every tick"
    cluster.start(7)
    cluster.run(1)
    assert not of_kind(nodes[0], Plan)[-1].hard, (
        "the group that was adopted changes at a step boundary"
    )
    assert cluster.gone == (2 << 32) + 1, "numbers only grow"


def test_a_new_epoch_repeats_an_unanswered_plan_and_nodes_stop_only_at_a_boundary() -> None:
    cluster, nodes = start_running(recovery="fresh")
    for node in nodes:
        node.has_answered = False
    cluster.start(7)
    cluster.run(0.3)
    assert [type(one) for one in nodes[0].inbox] == [Plan]
    cluster.restart_coordinator(epoch=1)
    for node in nodes:
        node.known, node.has_answered = 2, True
    cluster.is_graceful = True
    cluster.run_until_running()
    cluster.run(1)
    assert not any(plan.hard for node in nodes for plan in of_kind(node, Plan)[1:])
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == [
        "0",
        "1",
        "2",
        "7",
    ]


def test_a_new_epoch_waits_a_lease_for_a_missing_member_and_plans_without_it() -> None:
    cluster, nodes = start_running(lease_seconds=4)
    cluster.restart_coordinator(epoch=1)
    nodes[1].die()
    for name in "56":
        cluster.start(name)
    cluster.run(3)
    assert (cluster.gone, cluster.condition.reason) == (1, "WaitingForReconnects")
    cluster.run(4)
    assert [node.name for node, _ in cluster.go_members[(1 << 32) + 1]] == [
        "0",
        "2",
        "5",
        "6",
    ]


def test_a_later_epoch_waits_for_no_old_group_if_nothing_runs_except_after_its_own_restart() -> (
    None
):
    cluster = Cluster(make_settings(expect=2, lease_seconds=60, nothing_runs=True, epoch=3))
    cluster.start(0), cluster.start(1)
    cluster.run(0.5)
    assert cluster.gone == (3 << 32) + 1
    for node in cluster.nodes:
        node.is_cut = True
    cluster.restart_coordinator()
    for name in "567":
        cluster.start(name)
    cluster.run(10)
    assert cluster.gone == (3 << 32) + 1, (
        "its container started anew with the same arguments"
    )


def test_messages_of_a_member_before_its_group_is_adopted_are_kept() -> None:
    cluster, nodes = start_running(recovery="fresh")
    cluster.restart_coordinator(epoch=1)
    nodes[2].is_cut = True
    cluster.run(0.3)
    nodes[0].send(Boundary(1, 77))
    nodes[0].send(Commit(request=5, generation=1))
    nodes[1].send(Done(1))
    assert not of_kind(nodes[0], Permit)
    nodes[2].is_cut = False
    cluster.run(0.5)
    assert [one.granted for one in of_kind(nodes[0], Permit)] == [True]
    assert cluster.group.training.checkpoint_step == 77
    assert cluster.group.world and cluster.group.world.done == {nodes[1].key}


def test_a_group_that_may_not_continue_may_not_commit_either() -> None:
    cluster, nodes = start_running()
    cluster.restart_coordinator(epoch=1)
    nodes[2].die()
    cluster.run(0.3)
    nodes[0].send(Commit(request=5, generation=1))
    cluster.run(0.3)
    assert not of_kind(nodes[0], Permit)
    cluster.run(3)
    assert [one.granted for one in of_kind(nodes[0], Permit)] == [False]


@pytest.mark.parametrize("is_stunned", [False, True])
@pytest.mark.parametrize("code", [75, 76])
def test_a_lost_lease_is_not_a_request_to_stop(code: int, is_stunned: bool) -> None:
    cluster, nodes = start_running(recovery="fresh")
    if is_stunned:
        # The coordinator's host was suspended, but the connections stayed open.
        cluster.now += 3
        cluster.carry_out(events.on_tick(cluster.group, now=cluster.now))
    else:
        for node in nodes:
            node.is_cut = True
        cluster.run(3)
        for node in nodes:
            node.is_cut = False
            node.connect()
    nodes[0].group = None
    nodes[0].send(Result(1, 500, exit_code=code, reason="stopped"))
    assert cluster.group.finished is None
    cluster.run_until_running()
    assert [node.name for node, _ in cluster.go_members[cluster.gone]] == ["0", "1", "2"]


def test_a_stop_request_on_a_new_connection_counts() -> None:
    cluster, nodes = start_running(recovery="fresh", lease_seconds=3)
    for node in nodes:
        node.disconnect()
    cluster.run(0.5)
    nodes[0].send(Result(1, 500, exit_code=75, reason="stopped"))
    assert cluster.exit_code == 75


@pytest.mark.parametrize("recovery", ["fresh", "in-process"])
def test_a_run_that_stopped_without_a_coordinator_is_not_started_again(
    recovery: str,
) -> None:
    """Its workers have ended: a node that reconnects has no place in a group any more, and receives the run's
    outcome."""
    cluster, nodes = start_running(recovery=recovery)
    generation = cluster.group.generation
    for node in nodes:
        node.disconnect()
    cluster.restart_coordinator()
    for node in nodes:
        node.group = None
        node.connect()
    nodes[0].send(Result(generation, 500, exit_code=75, reason="stop_file"))
    assert cluster.exit_code == 75


@pytest.mark.parametrize(
    ("reason", "told"),
    [("non_finite", "NonFinite"), ("stop_file", "StopFile"), ("after-step", "AfterStep")],
)
def test_the_reason_of_a_stop_is_reported_as_a_kubernetes_reason(
    reason: str, told: str
) -> None:
    cluster, nodes = start_running("01")
    nodes[0].send(Result(cluster.group.generation, 500, exit_code=75, reason=reason))
    status = build_status(cluster.group, now=cluster.now)
    assert (status["phase"], status["reason"]) == ("Stopped", told)


def test_other_nodes_do_not_start_while_a_group_may_run_unobserved() -> None:
    cluster, nodes = start_running("01", lease_seconds=4)
    for node in nodes:
        node.is_cut = True
    cluster.restart_coordinator()
    for name in "567":
        cluster.start(name)
    cluster.run(3.5)
    assert cluster.gone == 1
    cluster.run(3)
    assert [node.name for node, _ in cluster.go_members[2]] == ["5", "6", "7"]


def test_if_nothing_runs_the_start_waits_for_no_old_group() -> None:
    cluster = Cluster(
        make_settings(expect=2, lease_seconds=60, nothing_runs=True), generation=7
    )
    cluster.start(0), cluster.start(1)
    cluster.run(0.5)
    assert cluster.gone == 8


def test_the_epoch_is_in_the_high_bits_of_a_generation() -> None:
    cluster = Cluster(make_settings(expect=2, epoch=3))
    cluster.start(0), cluster.start(1)
    cluster.run_until_running()
    assert cluster.group.generation == (3 << 32) + 1


def test_a_replaced_coordinator_admits_no_node_of_its_successor() -> None:
    cluster = Cluster(make_settings(expect=2, epoch=3))
    effects = events.on_hello(
        cluster.group,
        1,
        Hello("r", "0", "x", "a", 1, "in-process", token=TOKEN, known_generation=4 << 32),
        now=cluster.now,
    )
    assert not any(isinstance(effect, Send) for effect in effects)
    assert cluster.group.nodes == {}


def test_a_break_before_the_coordinator_restart_is_planned_after_adoption() -> None:
    cluster, nodes = start_running()
    cluster.restart_coordinator()
    for node in nodes:
        node.connect()
    break_group(nodes[0], "stuck")
    cluster.run(1)
    assert len(cluster.go_members[2]) == 3


# ---- fences ------------------------------------------------------------------------------------------------


def test_a_group_of_other_nodes_waits_until_the_old_group_has_lost_its_lease() -> None:
    cluster, nodes = start_running(lease_seconds=3)
    cut_at = cluster.now
    for node in nodes:
        node.is_cut = True
    for name in "4567":
        cluster.start(name)
    cluster.run(2.5)
    assert cluster.condition.reason == "WaitingForLease"
    cluster.run_until_running()
    assert cluster.group.world and cluster.group.world.started_at >= cut_at + 4
    assert all(node.group is None for node in nodes)


def test_the_start_does_not_wait_for_a_group_that_drained() -> None:
    cluster, nodes = start_running("01", lease_seconds=60)
    for node in nodes:
        leave(node)
    cluster.run(1)
    for name in "01":
        cluster.start(name)
    cluster.run(2)
    assert cluster.condition.phase == "Running"


def may_commit(cluster: Cluster, node: FakeNode, generation: int) -> bool:
    assert node.peer is not None
    effects = events.on_message(
        cluster.group, node.peer, Commit(request=1, generation=generation), now=cluster.now
    )
    return next(
        effect.message.granted
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Permit)
    )


def test_only_the_running_generation_may_commit() -> None:
    cluster, nodes = start_running()
    assert may_commit(cluster, nodes[0], 1)
    nodes[1].die()
    cluster.run_until_running()
    assert not may_commit(cluster, nodes[0], 1)
    assert may_commit(cluster, nodes[0], 2)
    assert not may_commit(cluster, nodes[0], 3)


def test_a_draining_node_that_was_asked_to_save_may_commit() -> None:
    cluster, nodes = start_running("01")
    nodes[1].has_answered = False
    leave(nodes[1])
    cluster.run(0.2)
    nodes[1].get_ready(2)
    nodes[0].get_ready(2)
    assert cluster.saves_asked == ["1"]
    assert may_commit(cluster, nodes[1], 2)
    assert not may_commit(cluster, nodes[0], 2)


# ---- invalid messages
# ----------------------------------------------------------------------------------------


def test_an_unobserved_group_is_waited_for_although_the_first_connected_node_is_replaced() -> (
    None
):
    cluster, nodes = start_running()
    for node in nodes:
        node.is_cut = True
    cluster.restart_coordinator()
    cluster.start("7")
    cluster.start("7")  # replaces the only connected node: briefly no node is connected
    cluster.start("8")
    cluster.run(0.5)
    assert find_phase(cluster.group) is GroupPhase.ADOPTING
    cluster.run_until_running()
    assert cluster.gone > 1 and {
        node.name for node in cluster.members_of(cluster.gone)
    } == {
        "7",
        "8",
    }


def test_messages_of_unknown_connections_are_ignored() -> None:
    cluster, _ = start_running()
    assert events.on_message(cluster.group, 12345, Up(1, 1), now=cluster.now) == []
    assert events.on_lost(cluster.group, 12345, "x", now=cluster.now) == []


def test_a_node_of_an_older_group_is_asked_to_leave_it() -> None:
    cluster, _ = start_running(max_nodes=3)
    answers = events.on_hello(
        cluster.group,
        999,
        Hello(
            "r",
            "7",
            "x",
            "a",
            1,
            "in-process",
            token=TOKEN,
            had=Placement(1, 3, 1, 4),
            known_generation=1,
        ),
        now=cluster.now,
    )
    assert not any(isinstance(effect, Finish) for effect in answers)
    cluster.restart_coordinator()
    cluster.run(5)
    assert cluster.condition.phase == "Running"
