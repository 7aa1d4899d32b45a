"""A worker's life goes only from one state to the next that its table has."""

import pytest

from evergrad_trainer.worker.life import Held, Life, Phase


def test_a_life_goes_through_its_worlds_to_its_end() -> None:
    life = Life(Held.FRESH)
    for _ in range(2):
        for phase in (Phase.SETUP, Phase.SETTLE, Phase.TRAIN, Phase.LEAVING, Phase.IDLE):
            life.enter(phase)
            assert life.phase == phase
    life.enter(Phase.ENDED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], Phase.TRAIN),
        ([Phase.SETUP], Phase.TRAIN),
        ([Phase.SETUP], Phase.IDLE),
        ([Phase.SETUP, Phase.SETTLE], Phase.IDLE),
        ([Phase.ENDED], Phase.SETUP),
    ],
)
def test_what_the_table_does_not_have_is_an_error_of_this_program(before: list[Phase], after: Phase) -> None:
    life = Life(Held.DIRTY)
    for phase in before:
        life.enter(phase)
    with pytest.raises(RuntimeError, match="cannot go from"):
        life.enter(after)
