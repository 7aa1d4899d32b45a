"""One exit code for a group of workers."""

import signal

import pytest

from evergrad_trainer.worker.local import combine_exit_codes


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([0, 0, 0], 0),
        ([75, 75], 75),
        ([75, 76], 76),
        ([0, 75], 75),
        ([70, 64], 64),
        ([-signal.SIGKILL, 64], 64),
        ([-signal.SIGKILL, 70], 70),
        ([-signal.SIGKILL, 0], 70),
        ([-signal.SIGKILL, 75], 70),
        ([-signal.SIGSEGV], 70),
        ([1, 0], 70),
        ([0, 70], 70),
        ([], 0),
    ],
    ids=str,
)
def test_wrong_input_comes_first_then_failures_then_the_weaker_stop(ended: list[int], code: int) -> None:
    assert combine_exit_codes(dict(enumerate(ended))) == code
    assert combine_exit_codes(dict(enumerate(reversed(ended)))) == code
