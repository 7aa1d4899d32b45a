"""Four functions for training scripts that run under Evergrad: ``report``, ``should_stop``, ``may_commit``
and ``generation``.

A script that calls them also runs without Evergrad: then ``report`` does nothing, ``should_stop`` only reacts
to SIGTERM, and ``may_commit`` is always True. For example::

    from evergrad import elastic

    for step in range(first_step, total_steps):
        loss = train_step()
        elastic.report(step, total_steps=total_steps, loss=loss)

A complete loop that stops and saves is in docs/train/elastic-scripts.md.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from evergrad.node_messages import (
    CODEC,
    MAX_LINE_BYTES,
    CommitAnswer,
    CommitRequest,
    Guard,
    NodeMessage,
    ScriptReport,
    Stopping,
)
from evergrad.node_state import (
    DIRECTORY_VARIABLE,
    GENERATION_VARIABLE,
    LEASE_LOST,
    SOCKET_NAME,
    STOP_SECONDS_VARIABLE,
    NodeState,
    NodeStateError,
    read_node_state,
)
from evergrad.report_values import read_values

__all__ = ["generation", "may_commit", "report", "should_stop"]

_TERMINATED = 143
"""Exit code of a worker that was asked to stop and did not end by itself in time."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 25.0
"""Below the 30 s after which torchrun kills a worker that was asked to stop.

A node of Evergrad sets its own limit in the environment.
"""
_ANSWER_SECONDS = 15.0


def report(
    step: object,
    *,
    total_steps: object = None,
    loss: object = None,
    tokens_per_second: object = None,
    checkpoint_step: object = None,
) -> None:
    """Report the progress of training. Never raises, and never waits for the node; only reports of global
    rank 0 are shown.

    Every value may be a number, a tensor or array of one element, or a numpy scalar. If a value is not a
    finite number (NaN, a text), it is left out, with one warning for each name; the other values are shown.
    If a value is a tensor on an accelerator, the call waits until the tensor is computed.

    ``checkpoint_step``: the newest step whose checkpoint is complete. Nodes that were held back until a
    checkpoint join then.

    For example: ``report(120, total_steps=1000, loss=loss, checkpoint_step=100)``.
    """
    _worker().report(
        {
            "step": step,
            "total_steps": total_steps,
            "loss": loss,
            "tokens_per_second": tokens_per_second,
            "checkpoint_step": checkpoint_step,
        }
    )


def should_stop() -> bool:
    """Return whether this rank was asked to stop.

    If it was, agree with the other ranks, save a checkpoint, and end the script with exit code 75.

    The first call (from the main thread) takes over SIGTERM and, under Evergrad, starts the guard: a thread
    that ends the process if it was asked to stop and its group is gone or its time is over
    (``spec.script.gracePeriodSeconds``; 25 seconds under torchrun), or if the node has lost its lease.
    """
    worker = _worker()
    worker.start_guard()
    return worker.should_stop()


def may_commit() -> bool:
    """Return whether this worker's generation may still publish a checkpoint.

    Call it just before the rename that makes the checkpoint visible. It waits for the coordinator's answer,
    and returns False if there is none. False is not an error: do not publish the checkpoint, and continue.
    For example::

        if may_commit():
            os.rename(temporary, final)
    """
    return _worker().may_commit()


def generation() -> int:
    """Return the number of the group that this worker belongs to; 0 without Evergrad."""
    return _worker().generation


class _Worker:
    """This process as a worker of a node, or as a plain process if there is no node state."""

    def __init__(self) -> None:
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self.process = os.getpid()
        self._directory = Path(directory) if directory else None
        self._reports: socket.socket | None = None
        self._guard: _Guard | None = None
        self._warned: set[str] = set()
        """Names of values that were left out before."""
        # Read once: this process belongs to one generation, even if the node writes a newer one later.
        given, state = os.environ.get(GENERATION_VARIABLE), self.read()
        if given is not None:
            self.generation = int(given)
        else:
            self.generation = state.own_generation if state else 0

    def read(self) -> NodeState | None:
        """Read the node state; None without one, or when the node has removed it."""
        if self._directory is None:
            return None
        try:
            return read_node_state(self._directory)
        except (OSError, NodeStateError):
            return None

    def report(self, values: dict[str, object]) -> None:
        if self._directory is None:
            return
        found, left_out = read_values(values)
        for name in [one for one in left_out if one not in self._warned]:
            self._warned.add(name)
            # A closed or odd stderr must not fail a report.
            with contextlib.suppress(Exception):
                print(f"evergrad: report(): {left_out[name]}", file=sys.stderr, flush=True)
        rank = os.environ.get("RANK", "")
        rank_number = int(rank) if rank.isdecimal() else None
        try:
            # Never waits: a node that is slow must not slow the training down.
            if self._reports is None:
                self._reports = self.connect(waits=False)
            self._reports.sendall(
                CODEC.encode(ScriptReport(self.generation, rank_number, **found))
            )
        except BlockingIOError:
            pass  # the node is behind: a later report replaces this one
        except OSError:
            if self._reports is not None:
                self._reports.close()
            self._reports = None

    def start_guard(self) -> None:
        if self._guard is None:
            self._guard = _Guard(self)

    def should_stop(self) -> bool:
        return self._guard is not None and self._guard.should_stop()

    def may_commit(self) -> bool:
        if self._directory is None:
            return True
        state = self.read()
        if state is None or time.monotonic() - state.contact > state.lease_seconds:
            return False
        try:
            with self.connect() as connection, connection.makefile("rb") as answers:
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(CODEC.encode(CommitRequest(self.generation)))
                answer = CODEC.decode(answers.readline(MAX_LINE_BYTES))
        # ValueError: the node has closed the connection, or its answer is not a valid message.
        except (OSError, ValueError):
            return False
        return isinstance(answer, CommitAnswer) and answer.granted

    def connect(self, *, waits: bool = True) -> socket.socket:
        """Return a connection to the node's socket.

        Raises OSError; without ``waits`` also if the connection cannot be made without waiting.
        """
        assert self._directory is not None  # noqa: S101 - all callers have checked
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(waits)
        try:
            connection.connect(str(self._directory / SOCKET_NAME))
        except OSError:
            connection.close()
            raise
        return connection

    @property
    def has_node(self) -> bool:
        return self._directory is not None


class _Guard:
    """Notices SIGTERM even while the main thread is inside a collective, and ends the process if it must
    not continue.

    Python runs signal handlers only between the main thread's instructions; the wake-up descriptor is written
    by the C handler, without waiting for the main thread.
    """

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._is_asked = threading.Event()
        self._asked_at: float | None = None
        self._is_told = False
        self._stop_seconds = float(os.environ.get(STOP_SECONDS_VARIABLE, _STOP_SECONDS))
        self._previous: Callable[[int, FrameType | None], object] | None = None
        self._previous_descriptor = -1
        self._connection: socket.socket | None = None
        self._read_end, self._write_end = os.pipe()
        for descriptor in (self._read_end, self._write_end):
            os.set_blocking(descriptor, False)
        self._take_signal()
        if worker.has_node:
            # The node may then delay a change of the group that can wait, because this worker stops in order.
            with contextlib.suppress(OSError):
                self._connection = worker.connect()
            self._tell(Guard(worker.generation))
            threading.Thread(target=self._watch, name="evergrad-guard", daemon=True).start()

    def should_stop(self) -> bool:
        if self._is_told:
            return True
        self._drain_pipe()
        state = self._worker.read()
        self._is_told = self._is_asked.is_set() or (state is not None and state.is_draining)
        if self._is_told:
            # Otherwise the node would take the end of this script for the end of training.
            self._tell(Stopping(self._worker.generation))
        return self._is_told

    def _take_signal(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            print(
                (
                    "evergrad: should_stop() was first called outside the main thread, so SIGTERM is not "
                    "handled."
                ),
                file=sys.stderr,
            )
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self._is_asked.set()
            if self._previous is not None:
                self._previous(number, frame)

        def leave_child() -> None:
            # A data loader's process must die by SIGTERM as ever, and must not write into our pipe.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

        previous = signal.signal(signal.SIGTERM, handle)
        self._previous = previous if callable(previous) else None
        self._previous_descriptor = signal.set_wakeup_fd(
            self._write_end, warn_on_full_buffer=False
        )
        os.register_at_fork(after_in_child=leave_child)

    def _tell(self, message: NodeMessage) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(CODEC.encode(message))

    def _drain_pipe(self) -> None:
        try:
            numbers = os.read(self._read_end, 256)
        except BlockingIOError:
            return
        if signal.SIGTERM in numbers:
            self._is_asked.set()
        # Another library set its descriptor before this one, and still expects all signals.
        if self._previous_descriptor != -1:
            os.write(self._previous_descriptor, numbers)

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            self._drain_pipe()
            now = time.monotonic()
            if self._asked_at is None and self._is_asked.is_set():
                self._asked_at = now

            # After a lease without contact another group may be training: two groups must not write.
            state = self._worker.read()
            if state is not None and now - state.contact > state.lease_seconds:
                _leave(
                    LEASE_LOST,
                    "the node has had no contact with the coordinator for longer than its lease",
                )
            if self._asked_at is None:
                continue
            # While the group drains it still exists, though the next one is announced.
            is_gone = state is None or (
                state.newest_generation > self._worker.generation and not state.is_draining
            )
            if is_gone:
                _leave(_TERMINATED, "asked to stop, and the group is gone")
            if now - self._asked_at > self._stop_seconds:
                _leave(_TERMINATED, f"asked to stop {self._stop_seconds:g} s ago")


def _leave(code: int, why: str) -> None:
    os.write(2, f"evergrad: {why}; leaving with exit code {code}\n".encode())
    os._exit(code)


_lock = threading.Lock()
_current: _Worker | None = None


def _worker() -> _Worker:
    global _current  # noqa: PLW0603 - one process is one worker
    with _lock:
        if _current is None or _current.process != os.getpid():
            _current = _Worker()
        return _current
