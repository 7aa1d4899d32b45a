"""The log of a node's supervisor on stderr: one line per message, with the node in front, as in its workers'
lines."""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from evergrad_trainer.worker.silence import SAY_SECONDS, describe_silence

_log = logging.getLogger(__name__)
_logger = logging.getLogger("evergrad_trainer")
"""Not the root logger, because a script that runs in a forked process configures the root logger itself."""
_CLEAR_LINE = "\r\x1b[2K"


@contextmanager
def speaking_as(node: str, *, stream: TextIO | None = None) -> Iterator[None]:
    """Write what Evergrad logs in this process, from level INFO, to ``stream`` (default: stderr)."""
    handler = _NodeHandler(node, sys.stderr if stream is None else stream)
    before = _logger.level
    _logger.setLevel(logging.INFO)
    _logger.addHandler(handler)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(before)


def fall_silent() -> None:
    """Remove the node's log handlers in a worker that was forked from the node's process."""
    for handler in [one for one in _logger.handlers if isinstance(one, _NodeHandler)]:
        _logger.removeHandler(handler)
        _logger.setLevel(logging.NOTSET)


async def warn_of_silence(
    seconds_since_contact: Callable[[], float], *, address: str
) -> None:
    """Log a warning every 10 s while the coordinator at ``address`` does not respond, until cancelled.

    If ``seconds_since_contact`` returns infinity, the coordinator has never responded.
    """
    waited = 0.0
    while True:
        await asyncio.sleep(SAY_SECONDS)
        waited += SAY_SECONDS
        away = seconds_since_contact()
        if away >= SAY_SECONDS:
            was_there = math.isfinite(away)
            _log.warning(
                "%s",
                describe_silence(
                    address, seconds=away if was_there else waited, was_there=was_there
                ),
            )


class _NodeHandler(logging.StreamHandler[TextIO]):
    """Clears the line of a progress bar that another process draws on the same terminal, before it writes.
    The bar is drawn again below."""

    def __init__(self, node: str, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(_NodeFormatter(node, clears_line=stream.isatty()))


class _NodeFormatter(logging.Formatter):
    """Formats a record as ``[node 0] was asked to leave``.

    Writes only the first line, because a worker has already printed the other lines of its failure.
    """

    def __init__(self, node: str, *, clears_line: bool) -> None:
        super().__init__()
        self._node, self._start = node, _CLEAR_LINE if clears_line else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = record.message.removeprefix(f"node {self._node} ").partition("\n")[0]
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._start}[node {self._node}] {level}{text}"
