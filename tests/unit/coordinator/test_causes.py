"""The vocabulary of causes: its content, and that causes are used as values."""

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


def test_causes_of_breaks_and_planned_changes_are_causes_of_a_restart() -> None:
    assert set(BREAKS) | set(PLANNED) < set(CHANGES)


def test_every_cause_has_its_own_text() -> None:
    texts = [*(one.text for one in CHANGES.values()), *LOSSES.values(), *ENDINGS.values()]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_only_breaks_and_losses_have_a_status_cause_of_the_run() -> None:
    # Planned changes end no pod, and an unknown cause counts as a crash in the operator.
    assert {cause for cause, one in CHANGES.items() if one.pod} == {
        *BREAKS,
        *get_args(Lost),
        # This is not a separate break: the trouble of an `environment` is named instead.
        "volume_full",
    }


@pytest.mark.parametrize("value", ["node 0 lost", "", None, 3, "NodeLost", ["node_lost"]])
def test_an_unknown_cause_becomes_other_and_is_not_interpreted(value: object) -> None:
    assert read_change(value) == "other"
    assert read_trouble(value) == "other"


def test_a_known_cause_is_parsed_unchanged() -> None:
    assert [read_change(cause) for cause in CHANGES] == list(CHANGES)
    assert [read_trouble(trouble) for trouble in TROUBLES] == list(TROUBLES)


def test_an_end_reason_has_a_text_and_an_exit_code_is_shown_unchanged() -> None:
    assert describe_ending("stop_file") == "stopped by the stop file"
    assert describe_ending("exit 70") == "exit 70"
