"""A worker's life changes only from one state to the next state of its table."""

import pytest

from evergrad_trainer.worker.states import Life, StateStatus, WorkerState


def test_a_worker_life_passes_through_its_worlds_to_its_end() -> None:
    life = Life(StateStatus.FRESH)
    for _ in range(2):
        for phase in (
            WorkerState.SETUP,
            WorkerState.SETTLE,
            WorkerState.TRAIN,
            WorkerState.LEAVING,
            WorkerState.IDLE,
        ):
            life.enter(phase)
            assert life.phase == phase
    life.enter(WorkerState.DEPARTING)
    life.enter(WorkerState.ENDED)


def test_a_world_that_breaks_in_any_state_is_left_and_the_life_continues() -> None:
    way = (WorkerState.SETUP, WorkerState.SETTLE, WorkerState.TRAIN, WorkerState.CLOSING)
    for length in range(1, len(way) + 1):
        life = Life(StateStatus.FRESH)
        for phase in (*way[:length], WorkerState.GIVING_UP, WorkerState.IDLE):
            life.enter(phase)
        assert life.phase == WorkerState.IDLE


@pytest.mark.parametrize(
    "before",
    [
        (),
        (WorkerState.SETUP,),
        (WorkerState.SETUP, WorkerState.GIVING_UP),
        (WorkerState.DEPARTING,),
    ],
)
def test_an_error_ends_a_life_in_any_state_and_only_once(
    before: tuple[WorkerState, ...],
) -> None:
    life = Life(StateStatus.FRESH)
    for phase in (*before, WorkerState.FAILED):
        assert not life.is_over
        life.enter(phase)
    assert life.is_over
    for phase in WorkerState:
        with pytest.raises(RuntimeError, match="cannot go from failed"):
            life.enter(phase)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], WorkerState.TRAIN),
        ([WorkerState.SETUP], WorkerState.TRAIN),
        ([WorkerState.SETUP], WorkerState.IDLE),
        ([WorkerState.SETUP, WorkerState.SETTLE], WorkerState.IDLE),
        ([WorkerState.SETUP, WorkerState.SETTLE, WorkerState.TRAIN], WorkerState.IDLE),
        (
            [WorkerState.SETUP, WorkerState.SETTLE, WorkerState.TRAIN, WorkerState.LEAVING],
            WorkerState.SETUP,
        ),
        ([WorkerState.ENDED], WorkerState.SETUP),
        ([WorkerState.ENDED], WorkerState.FAILED),
    ],
)
def test_a_transition_outside_the_table_is_an_internal_error(
    before: list[WorkerState], after: WorkerState
) -> None:
    life = Life(StateStatus.DIRTY)
    for phase in before:
        life.enter(phase)
    with pytest.raises(RuntimeError, match="cannot go from"):
        life.enter(after)
