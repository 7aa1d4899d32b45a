"""Receives a node's requests to stop: the first SIGTERM or SIGINT starts a drain, and the second ends the
node without waiting."""

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from evergrad_common.contract import ExitCode
from evergrad_trainer.worker.signals import StopCount

_ALONE_SECONDS = 3.0
"""Time after the grace period for a node to leave without a coordinator. A pod has 5 s before the kubelet
kills it."""
_LAST_SECONDS = 1.5
"""Time for a node that ends without waiting to kill its workers. Afterwards the process is ended, even if
its event loop does not respond."""


class StopRequests:
    """Listens for stop signals in a thread, so that a blocked event loop cannot keep the process from ending.

    ``on_first`` is called on ``loop`` at the first signal. ``on_last`` is called on ``loop`` at the second
    signal, or when the grace period and 3 more seconds have ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_first: Callable[[], None],
        on_last: Callable[[], None],
        grace_seconds: float,
    ) -> None:
        self._loop = loop
        self._on_first, self._on_last = on_first, on_last
        self._seconds = grace_seconds + _ALONE_SECONDS
        self._count = StopCount()
        self._deadline: float | None = None
        self._is_last = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1
        self._thread = threading.Thread(
            target=self._listen, name="evergrad-signals", daemon=True
        )

    def install(self) -> None:
        """Start to listen; call this only from the main thread."""
        # The handlers do nothing. They make Python's C signal handler write each signal's number into the
        # pipe immediately.
        self._previous_wakeup = signal.set_wakeup_fd(
            self._write_end, warn_on_full_buffer=False
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, lambda *_: None)
        self._thread.start()

    def uninstall(self) -> None:
        """Stop listening, and restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _listen(self) -> None:
        while True:
            timeout = (
                None
                if self._deadline is None
                else max(0.0, self._deadline - time.monotonic())
            )
            if not select.select([self._read_end], [], [], timeout)[0]:
                self._end_at_once("its time is over")
                continue
            # A zero is written by ``uninstall``. Other signals, such as SIGCHLD, are also written here.
            for number in os.read(self._read_end, 64):
                if number == 0:
                    return
                if number not in (signal.SIGTERM, signal.SIGINT):
                    continue
                request = self._count.note(number, now=time.monotonic())
                if request == "first":
                    self._deadline = time.monotonic() + self._seconds
                    self._call(self._on_first)
                elif request == "second" and not self._is_last:
                    self._end_at_once("it was asked twice")

    def _end_at_once(self, why: str) -> None:
        if self._is_last:
            # The event loop has not ended the node in time. The workers die with this process.
            os.write(
                2,
                b"evergrad: the node does not answer; it is ended without a word to its coordinator\n",
            )
            os._exit(int(ExitCode.STOPPED_UNSAVED))
        os.write(
            2,
            f"evergrad: the node leaves at once, since {why}; what was not saved is lost\n".encode(),
        )
        self._is_last, self._deadline = True, time.monotonic() + _LAST_SECONDS
        self._call(self._on_last)

    def _call(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(act)
