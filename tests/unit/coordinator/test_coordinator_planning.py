"""Pure choices: members, ranks, savers, root causes, budgets, lost seconds."""

import pytest

from evergrad_common.causes import BreakCause
from evergrad_common.contract import UNDISTURBED_SECONDS
from evergrad_coordinator.protocol import Broken, Placement
from evergrad_coordinator.rules.budget import (
    LOSSES_PER_FAILURE,
    Break,
    FailureBudget,
    GenerationFailure,
    find_root_cause,
)
from evergrad_coordinator.rules.interruptions import Accounting
from evergrad_coordinator.rules.planning import (
    assign_places,
    choose_members,
    choose_saver,
    find_running,
)
from evergrad_coordinator.rules.state import (
    GroupWorld,
    Node,
    RankPlacement,
    TrainingState,
    node_order,
)


def build_node(
    name: str, *, workers: int = 1, step: int | None = None, had: Placement | None = None
) -> Node:
    return Node(int(name), name, "i", "a", workers, 0.0, had=had, step=step)


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for node in nodes]


def test_indices_are_sorted_as_numbers_and_other_names_come_last() -> None:
    assert sorted(["10", "b", "9", "a", "2"], key=node_order) == ["2", "9", "10", "a", "b"]


def test_members_are_kept_before_spares_of_a_lower_index() -> None:
    world = GroupWorld(
        1, {("5", "i"): RankPlacement(0, 1), ("6", "i"): RankPlacement(1, 1)}, 0.0
    )
    nodes = [build_node(name) for name in ("1", "5", "6", "2")]
    assert names(choose_members(nodes, world=world, proposal=None, max_nodes=3)) == [
        "1",
        "5",
        "6",
    ]


def test_rank_placements_are_consecutive() -> None:
    nodes = [build_node("0", workers=2), build_node("1", workers=3), build_node("2")]
    assert list(assign_places(nodes).values()) == [
        RankPlacement(0, 2),
        RankPlacement(2, 3),
        RankPlacement(5, 1),
    ]


@pytest.mark.parametrize(
    ("places", "is_whole"),
    [
        ([(0, 2, 4), (2, 2, 4)], True),
        ([(2, 2, 4), (0, 2, 4)], True),
        ([(0, 2, 4)], False),
        ([(0, 2, 4), (0, 2, 4)], False),
        ([(0, 2, 4), (1, 2, 4)], False),
        ([(0, 2, 4), (2, 2, 5)], False),
        ([(0, 4, 4), (4, 0, 4)], False),
        ([], False),
    ],
)
def test_a_group_is_found_running_only_if_every_rank_is_covered_once(
    places: list[tuple[int, int, int]], is_whole: bool
) -> None:
    nodes = [
        build_node(str(number), had=Placement(7, *place))
        for number, place in enumerate(places)
    ]
    assert (find_running(nodes, generation=7) is not None) is is_whole
    assert find_running(nodes, generation=8) is None


@pytest.mark.parametrize(
    ("leavers", "staying", "saved", "saver"),
    [
        ([("2", 5), ("1", 5), ("3", 4)], [], -1, "1"),
        ([("2", 5)], [("0", 5)], -1, None),
        ([("2", 5)], [("0", 0)], -1, None),
        ([("2", 5)], [("0", -1), ("1", None)], -1, "2"),
        ([("2", 5)], [], 5, None),
        ([("2", 6)], [], 5, "2"),
        ([("2", -1), ("3", None)], [], -1, None),
        ([("2", 0)], [], -1, "2"),
        ([], [], -1, None),
    ],
)
def test_one_draining_node_saves_a_state_that_no_other_node_continues_with(
    leavers: list[tuple[str, int | None]],
    staying: list[tuple[str, int | None]],
    saved: int,
    saver: str | None,
) -> None:
    found = choose_saver(
        [build_node(name, step=step) for name, step in leavers],
        staying=[build_node(name, step=step) for name, step in staying],
        saved_step=saved,
    )
    assert (found.name if found else None) == saver


def build_failure(
    cause: BreakCause, at: float, *, generation: int = 1, step: int = 3
) -> GenerationFailure:
    return GenerationFailure("0", at, Broken(generation, cause, step=step))


def test_the_root_cause_is_the_earliest_that_is_not_a_consequence() -> None:
    peer, late, early = (
        build_failure("peer_lost", 1.0),
        build_failure("stuck", 3.0),
        build_failure("out_of_memory", 2.0),
    )
    assert find_root_cause([peer, late, early]) is early
    assert find_root_cause([peer]) is peer
    assert find_root_cause([]) is None


def test_a_broken_generation_counts_once() -> None:
    budget = FailureBudget(1, "in-process")
    for at in (1.0, 2.0, 3.0):
        budget.report(build_failure("worker_crash", at), TrainingState())
    budget.report(build_failure("peer_lost", 0.0, generation=2), TrainingState())
    assert (budget.used, budget.is_exhausted) == (1, False)
    budget.report(build_failure("stuck", 4.0, generation=3), TrainingState())
    assert budget.is_exhausted


def test_the_root_cause_is_found_among_the_consequences_of_a_thousand_nodes() -> None:
    budget = FailureBudget(3, "in-process")
    for at in range(1000):
        budget.report(build_failure("peer_lost", 1.0 + at / 1000), TrainingState())
    budget.report(build_failure("out_of_memory", 0.5), TrainingState())
    assert budget.last is not None
    assert budget.last.report.cause == "out_of_memory"
    assert "out_of_memory on a worker without a rank" in budget.describe()


def test_a_host_fault_is_not_a_failure_of_the_run_in_a_large_group_either() -> None:
    budget = FailureBudget(0, "in-process")
    for generation in (1, 2):
        for at in range(100):
            budget.report(
                build_failure("peer_lost", float(at), generation=generation),
                TrainingState(),
            )
        budget.report(
            build_failure("environment", 200.0, generation=generation), TrainingState()
        )
        budget.conclude(Break(generation, 300.0), TrainingState(step=3))
    assert budget.used == 0


def test_progress_is_a_step_above_the_highest_step_ever_reached() -> None:
    budget = FailureBudget(3, "in-process")
    budget.report(build_failure("stuck", 1.0, step=3), TrainingState(step=10))
    budget.observe(TrainingState(step=10))
    assert budget.used == 1
    budget.observe(TrainingState(step=11))
    assert budget.used == 0


def test_a_run_without_step_reports_makes_progress_by_running_long() -> None:
    budget = FailureBudget(1, "fresh")
    at = 0.0
    for generation in range(1, 6):
        budget.report(
            build_failure("worker_crash", at, generation=generation, step=-1),
            TrainingState(),
        )
        assert (budget.used, budget.is_exhausted) == (1, False)
        at += UNDISTURBED_SECONDS
    budget.report(
        build_failure("worker_crash", at - 1, generation=6, step=-1), TrainingState()
    )
    assert budget.is_exhausted


def conclude(
    budget: FailureBudget,
    generation: int,
    training: TrainingState,
    *,
    at: float = 0.0,
    is_whole: bool = True,
) -> None:
    """Break one more group by the loss of peers alone."""
    budget.report(build_failure("peer_lost", at, generation=generation, step=-1), training)
    lost = frozenset() if is_whole else frozenset({("7", "x")})
    budget.conclude(Break(generation, at, lost=lost), training)


def test_the_loss_of_a_node_resets_the_count_of_unexplained_breaks() -> None:
    budget = FailureBudget(3, "fresh")
    for generation, is_whole in enumerate((True, False, True, True, True), start=1):
        conclude(
            budget, generation, TrainingState(step=9, checkpoint_step=5), is_whole=is_whole
        )
    assert budget.used == 2


def test_with_fresh_workers_an_unexplained_break_after_a_newer_checkpoint_counts_no_failure() -> (
    None
):
    budget = FailureBudget(3, "fresh")
    conclude(budget, 1, TrainingState(step=9, checkpoint_step=5))
    conclude(budget, 2, TrainingState(step=12, checkpoint_step=10))
    assert budget.used == 0
    conclude(budget, 3, TrainingState(step=14, checkpoint_step=10))
    assert budget.used == 1


def test_unexplained_breaks_far_apart_count_no_failure_if_nothing_is_reported() -> None:
    budget = FailureBudget(3, "fresh")
    for generation in range(1, 4):
        conclude(budget, generation, TrainingState(), at=generation * UNDISTURBED_SECONDS)
    assert budget.used == 0
    conclude(budget, 4, TrainingState(), at=3 * UNDISTURBED_SECONDS + 1)
    assert budget.used == 1
    assert (
        "before a step was reported although no node was lost; 1 failure without"
        in budget.describe()
    )


def test_a_host_fault_counts_a_tenth_although_other_nodes_report_only_a_lost_peer() -> None:
    budget = FailureBudget(0, "in-process")
    for generation in range(1, LOSSES_PER_FAILURE + 1):
        assert not budget.is_exhausted
        budget.report(
            build_failure("peer_lost", 0.0, generation=generation), TrainingState(step=3)
        )
        budget.report(
            build_failure("environment", 1.0, generation=generation), TrainingState(step=3)
        )
        budget.conclude(Break(generation, 2.0), TrainingState(step=3))
    assert budget.is_exhausted
    assert (
        "nodes or their hosts were lost 10 times in a row without progress"
        in budget.describe()
    )


def test_a_generation_with_a_cause_counts_once_and_only_for_that_cause() -> None:
    budget = FailureBudget(3, "in-process")
    for generation in (1, 2):
        budget.report(
            build_failure("peer_lost", 0.0, generation=generation), TrainingState(step=3)
        )
        budget.report(
            build_failure("worker_crash", 1.0, generation=generation), TrainingState(step=3)
        )
        budget.conclude(Break(generation, 2.0), TrainingState(step=3))
    assert budget.used == 2
    assert "worker_crash" in budget.describe()


def test_lost_seconds_are_attributed_to_the_cause_and_not_to_its_consequence() -> None:
    accounting = Accounting()
    accounting.begin("peer_lost", at=10.0)
    accounting.begin("worker_crash", at=9.5)
    accounting.begin("node_lost", at=11.0)
    assert accounting.observe_lost(now=12.0) == {"worker_crash": 2.5}
    accounting.end(now=13.0)
    accounting.end(now=20.0)
    assert accounting.restarts == {"worker_crash": 1}
    assert accounting.observe_lost(now=50.0) == {"worker_crash": 3.5}


def test_a_planned_change_that_fails_is_attributed_to_the_failure() -> None:
    accounting = Accounting()
    accounting.begin("node_joined", at=10.0)
    accounting.begin("node_lost", at=11.0)
    accounting.end(now=12.0)
    assert accounting.lost_seconds == {"node_lost": 2.0}
