"""The rate of a script: the remaining time, computed from its reports."""

from evergrad_common.step_rate import Pace


def test_the_remaining_time_follows_from_the_steps_since_the_first_report() -> None:
    pace = Pace()
    assert not pace.has_begun
    assert pace.remaining_seconds(5, 10, now=0.0) is None
    pace.note(5, now=100.0)
    assert pace.has_begun
    assert pace.remaining_seconds(5, 10, now=101.0) is None
    pace.note(7, now=104.0)
    assert pace.remaining_seconds(7, 10, now=104.0) == 6.0
    assert pace.remaining_seconds(12, 10, now=104.0) == 0.0
    assert pace.remaining_seconds(7, None, now=104.0) is None


def test_steps_that_decrease_reset_the_rate() -> None:
    pace = Pace()
    pace.note(50, now=100.0)
    pace.note(10, now=200.0)
    assert pace.remaining_seconds(10, 20, now=210.0) is None
    assert pace.remaining_seconds(12, 20, now=204.0) == 16.0
