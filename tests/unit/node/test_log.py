"""A node's messages on stderr: about itself, and about a coordinator that does not respond."""

import asyncio
import contextlib
import io
import logging
import os

import pytest

from evergrad_trainer.node import log
from evergrad_trainer.node.log import fall_silent, speaking_as, warn_of_silence

_log = logging.getLogger("evergrad_trainer.node.supervisor")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_node_prefixes_its_log_lines_with_its_name_while_it_runs() -> None:
    stream = io.StringIO()
    with speaking_as("3", stream=stream):
        _log.info("node 3 was asked to leave")
        _log.warning("workers are started cold")
        _log.info(
            "node %s rank 1 ValueError: no label\nTraceback that the worker has printed",
            "3",
        )
        _log.debug("nothing for people")
        logging.getLogger("another.library").info("nor this")
    _log.info("node 3 is over")
    assert stream.getvalue().splitlines() == [
        "[node 3] was asked to leave",
        "[node 3] warning: workers are started cold",
        "[node 3] rank 1 ValueError: no label",
    ]


def test_on_a_terminal_the_line_of_the_progress_bar_is_cleared_first() -> None:
    stream = Terminal()
    with speaking_as("0", stream=stream):
        _log.info("node 0 has lost the coordinator: training pauses")
    assert (
        stream.getvalue() == "\r\x1b[2K[node 0] has lost the coordinator: training pauses\n"
    )


def test_a_forked_worker_does_not_log_as_its_node() -> None:
    stream = io.StringIO()
    with speaking_as("0", stream=stream):
        fall_silent()
        _log.warning("of a worker")
    assert stream.getvalue() == ""
    assert not logging.getLogger("evergrad_trainer").isEnabledFor(logging.INFO)


def test_an_unreachable_coordinator_is_logged_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "SAY_SECONDS", 0.01)
    away = [float("inf"), float("inf"), 0.001, 5.0]
    heard: list[float] = []

    def seconds_since_contact() -> float:
        if len(heard) == len(away):
            raise asyncio.CancelledError
        heard.append(away[len(heard)])
        return heard[-1]

    stream = io.StringIO()
    with speaking_as("0", stream=stream), contextlib.suppress(asyncio.CancelledError):
        asyncio.run(warn_of_silence(seconds_since_contact, address="coordinator:29400"))
    never, still, again = stream.getvalue().splitlines()
    assert never.startswith(
        "[node 0] warning: the coordinator at coordinator:29400 has never answered, in 0 s; still trying."
    )
    assert still == never
    assert "has not answered for 5 s" in again
    assert os.linesep not in again
