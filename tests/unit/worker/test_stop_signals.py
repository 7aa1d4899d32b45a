"""Signals set a flag, a second interrupt ends the process immediately, and previous handlers are restored."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad_trainer.worker.signals import StopCount, StopSignals, describe_abrupt_end


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    one = StopSignals()
    one.install()
    yield one
    one.uninstall()


def wait_for(one: StopSignals) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not one.is_requested and time.monotonic() < deadline:
        time.sleep(0.001)
    return one.is_requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(signals: StopSignals, number: signal.Signals) -> None:
    assert not signals.is_requested
    os.kill(os.getpid(), number)
    assert wait_for(signals)


def test_several_terminations_are_one_request(signals: StopSignals) -> None:
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for(signals)


@pytest.mark.parametrize(
    ("later", "after", "meaning"),
    [
        (signal.SIGTERM, 0.0, "same"),
        (signal.SIGTERM, 0.9, "same"),
        (signal.SIGTERM, 1.1, "second"),
        (signal.SIGINT, 0.0, "second"),
        (signal.SIGINT, 9.0, "second"),
    ],
)
def test_a_second_request_is_distinguished_from_one_sent_to_process_and_group(
    later: int, after: float, meaning: str
) -> None:
    count = StopCount()
    assert count.note(signal.SIGTERM, now=5.0) == "first"
    assert count.note(later, now=5.0 + after) == meaning


def test_handlers_and_wakeup_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    one = StopSignals()
    one.install()
    assert [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    ] != before
    one.uninstall()
    assert [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    ] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_hangs(number: signal.Signals) -> None:
    """Stuck in C with the interpreter's lock released, as in a collective."""
    code = (
        "import threading; from evergrad_trainer.worker.signals import StopSignals; "
        "s = StopSignals(); s.install(); print('ready', flush=True); lock = threading.Lock(); "
        "lock.acquire(); "
        "[lock.acquire() for _ in range(1)]"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.3)
        process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 76
    assert (
        "interrupted twice: leaving at once, state since the last checkpoint is not saved"
        in errors
    )


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (
            ["step-40", "step-120", "latest", "quarantine"],
            "The newest checkpoint is of step 120: the same command resumes there",
        ),
        (["gen"], "There is no checkpoint: the same command starts again at step 1"),
    ],
)
def test_a_second_stop_request_names_the_checkpoint_that_is_kept(
    names: list[str], end: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert describe_abrupt_end(tmp_path / "checkpoints").endswith(end)
