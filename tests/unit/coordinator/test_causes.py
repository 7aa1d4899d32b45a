"""The vocabulary of causes: what is in it, and that it is used as values."""

from typing import get_args

import pytest

from evergrad_common.causes import (
    BREAKS,
    CHANGES,
    ENDINGS,
    LOSSES,
    PLANNED,
    TROUBLES,
    Lost,
    describe_ending,
    read_change,
    read_trouble,
)


def test_every_cause_of_a_break_and_of_a_planned_change_is_a_cause_of_a_change() -> None:
    assert set(BREAKS) | set(PLANNED) < set(CHANGES)


def test_every_cause_has_a_text_of_its_own() -> None:
    texts = [*(one.text for one in CHANGES.values()), *LOSSES.values(), *ENDINGS.values()]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_every_break_and_every_loss_has_a_word_in_the_status_of_a_run_and_nothing_else() -> (
    None
):
    # Planned changes end no pod, and what nobody has named is a crash to the operator.
    assert {cause for cause, one in CHANGES.items() if one.pod} == {
        *BREAKS,
        *get_args(Lost),
        # No break of its own: the trouble of an `environment` is named in its place.
        "volume_full",
    }


@pytest.mark.parametrize("value", ["node 0 lost", "", None, 3, "NodeLost", ["node_lost"]])
def test_what_is_no_cause_becomes_other_and_is_not_interpreted(value: object) -> None:
    assert read_change(value) == "other"
    assert read_trouble(value) == "other"


def test_a_cause_is_read_as_itself() -> None:
    assert [read_change(cause) for cause in CHANGES] == list(CHANGES)
    assert [read_trouble(trouble) for trouble in TROUBLES] == list(TROUBLES)


def test_an_ending_has_a_text_and_an_exit_code_is_its_own() -> None:
    assert describe_ending("stop_file") == "stopped by the stop file"
    assert describe_ending("exit 70") == "exit 70"
