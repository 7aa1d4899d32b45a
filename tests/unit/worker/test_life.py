"""A worker's life goes only from one state to the next that its table has."""

import pytest

from evergrad_trainer.worker.states import Held, Life, Phase


def test_a_life_goes_through_its_worlds_to_its_end() -> None:
    life = Life(Held.FRESH)
    for _ in range(2):
        for phase in (Phase.SETUP, Phase.SETTLE, Phase.TRAIN, Phase.LEAVING, Phase.IDLE):
            life.enter(phase)
            assert life.phase == phase
    life.enter(Phase.DEPARTING)
    life.enter(Phase.ENDED)


def test_a_world_that_breaks_is_given_up_wherever_it_breaks_and_the_life_goes_on() -> None:
    way = (Phase.SETUP, Phase.SETTLE, Phase.TRAIN, Phase.CLOSING)
    for length in range(1, len(way) + 1):
        life = Life(Held.FRESH)
        for phase in (*way[:length], Phase.GIVING_UP, Phase.IDLE):
            life.enter(phase)
        assert life.phase == Phase.IDLE


@pytest.mark.parametrize(
    "before", [(), (Phase.SETUP,), (Phase.SETUP, Phase.GIVING_UP), (Phase.DEPARTING,)]
)
def test_an_error_ends_a_life_in_any_state_and_only_once(before: tuple[Phase, ...]) -> None:
    life = Life(Held.FRESH)
    for phase in (*before, Phase.FAILED):
        assert not life.is_over
        life.enter(phase)
    assert life.is_over
    for phase in Phase:
        with pytest.raises(RuntimeError, match="cannot go from failed"):
            life.enter(phase)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], Phase.TRAIN),
        ([Phase.SETUP], Phase.TRAIN),
        ([Phase.SETUP], Phase.IDLE),
        ([Phase.SETUP, Phase.SETTLE], Phase.IDLE),
        ([Phase.SETUP, Phase.SETTLE, Phase.TRAIN], Phase.IDLE),
        ([Phase.SETUP, Phase.SETTLE, Phase.TRAIN, Phase.LEAVING], Phase.SETUP),
        ([Phase.ENDED], Phase.SETUP),
        ([Phase.ENDED], Phase.FAILED),
    ],
)
def test_what_the_table_does_not_have_is_an_error_of_this_program(
    before: list[Phase], after: Phase
) -> None:
    life = Life(Held.DIRTY)
    for phase in before:
        life.enter(phase)
    with pytest.raises(RuntimeError, match="cannot go from"):
        life.enter(after)
