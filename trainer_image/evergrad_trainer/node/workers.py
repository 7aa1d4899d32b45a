"""Starts, watches and ends the worker processes of a node.

No orphaned process remains, whether the node or a worker ends first.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Protocol

from evergrad_coordinator.edge.stacks import register_stacks
from evergrad_trainer.node.failures import count_oom_kills
from evergrad_trainer.node.log import fall_silent
from evergrad_trainer.worker.channel import Channel, Failed, channel_pair
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.processes import (
    die_with_client,
    die_with_parent,
    run_and_exit,
    stop_signals_blocked,
    unblock_stop_signals,
)

StartMethod = Literal["fork", "forkserver", "spawn"]
Captures = Literal["nothing", "stderr", "both"]
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FOREIGN = ("anon_inode:[eventpoll]", "anon_inode:[pidfd]")
"""Descriptors of a node's event loop, in addition to its sockets."""


class Target(Protocol):
    """The work of a worker process; returns its exit code. ``variables`` are already in its environment."""

    def __call__(self, channel: Channel, heartbeat: WorkerHeartbeat) -> int: ...


@dataclass
class Worker:
    """The supervisor's view of one worker process.

    ``serial`` counts the processes that this node has started for ``local_rank``.
    """

    local_rank: int
    serial: int
    process: BaseProcess
    channel: Channel
    heartbeat: WorkerHeartbeat
    output: int | None
    """Read end of the pipe for the worker's output; None if the worker writes to the node's own streams."""
    state: Literal["starting", "idle", "inside", "ended"] = "starting"
    ready_generation: int = -1
    """Generation of the newest change that this worker has answered."""
    inside_generation: int = -1
    up_generation: int = -1
    step: int = -1
    rank: int = -1
    last_heard: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    failure: Failed | None = None
    """The worker's own report of the error that ended it."""
    last_lines: Callable[[], str] | None = None
    """Returns the last lines that the worker printed."""
    was_killed: bool = False
    """Whether the supervisor killed the worker."""
    why_killed: str = ""
    """The problem for which the supervisor killed the worker, or an empty string."""
    printed_at: float = float("-inf")
    """Monotonic time of the worker's last output."""
    has_hung: bool = False
    """Whether the supervisor killed the worker because its start took too long."""
    moved_bytes: int = 0
    """Bytes of state that the worker had read at the supervisor's last check."""
    moved_at: float = 0.0
    """Monotonic time of the last check at which ``moved_bytes`` had grown."""
    oom_kills_before: int | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None  # noqa: S101 - a worker is made by starting its process
        return self.process.pid

    @property
    def is_warm(self) -> bool:
        return self.state in ("idle", "inside")

    def was_oom_killed(self) -> bool:
        """Return whether the kernel probably killed the worker because memory ran out.

        This is the case if SIGKILL ended the worker, the supervisor did not send it, and the container's
        count of OOM kills has grown since the worker started.
        """
        now = count_oom_kills()
        is_more = (
            now is not None
            and self.oom_kills_before is not None
            and now > self.oom_kills_before
        )
        return is_more and not self.was_killed and self.process.exitcode == -signal.SIGKILL

    def note_output(self) -> None:
        """Record that the worker has printed something."""
        self.printed_at = time.monotonic()

    def send_signal(self, number: int) -> None:
        """Send a signal if the worker still runs."""
        if self.process.is_alive():
            os.kill(self.pid, number)

    def end_descendants(self) -> None:
        """Kill the processes that the worker started, which share its process group, after it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the worker with SIGKILL, which also works if the worker is frozen or stuck."""
        self.was_killed = True
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class WorkerOrder:
    """Describes which worker to start, by which method, and which of its output streams go into a pipe."""

    local_rank: int
    serial: int
    method: StartMethod
    captures: Captures
    name: str
    """Node and local rank, shown in process lists."""


def start_worker(
    target: Target,
    order: WorkerOrder,
    *,
    variables: Mapping[str, str],
) -> Worker:
    """Start one worker, with ``variables`` set in its environment, and return it."""
    ours, theirs = channel_pair()
    heartbeat = WorkerHeartbeat()
    # Only the worker keeps the write end, because the pipe closes with the last process that holds it.
    read_end, write_end = os.pipe() if order.captures != "nothing" else (None, None)
    context = multiprocessing.get_context(order.method)
    output = None if write_end is None else _Descriptor(write_end)
    start = _Start(target, theirs, heartbeat, dict(variables), os.getpid(), output, order)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_worker_main, args=(start,), name=f"evergrad-worker-{order.local_rank}"
    )
    # Flush first: a fork copies unwritten output and would write it again.
    sys.stdout.flush()
    sys.stderr.flush()
    with stop_signals_blocked():
        process.start()
    theirs.close()
    if write_end is not None:
        os.close(write_end)
    return Worker(
        order.local_rank,
        order.serial,
        process,
        ours,
        heartbeat,
        read_end,
        oom_kills_before=count_oom_kills(),
    )


@dataclass(frozen=True)
class _Start:
    target: Target
    channel: Channel
    heartbeat: WorkerHeartbeat
    variables: dict[str, str]
    parent: int
    output: "_Descriptor | None"
    order: WorkerOrder


class _Descriptor:
    """An open file descriptor that a worker receives with every start method.

    A fork inherits the descriptor; the other methods pass it on when they pickle this object.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _take_descriptor, (reduction.DupFd(self.number),)


class _Passed(Protocol):
    def detach(self) -> int: ...


def _take_descriptor(passed: _Passed) -> _Descriptor:
    return _Descriptor(passed.detach())


def _worker_main(start: _Start) -> None:
    # Do this first: a worker whose node has already ended must not continue to run.
    if start.order.method == "forkserver":
        die_with_client()
    else:
        die_with_parent(start.parent)
    # Leave the terminal's foreground process group, so that Ctrl-C reaches only the node, which then stops
    # its workers.
    os.setpgid(0, 0)
    fall_silent()
    name_process(f"evergrad-w{start.order.name}")
    # Reset the state that a fork copies: the node's signal handling, and its sockets. The peers of these
    # sockets wait until every copy is closed.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        is_request = number in (signal.SIGTERM, signal.SIGINT)
        signal.signal(number, signal.SIG_IGN if is_request else signal.SIG_DFL)
    unblock_stop_signals()
    kept = {0, 1, 2, start.channel.socket.fileno()}
    if start.output is not None:
        kept.add(start.output.number)
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - kept:
        # The descriptor that listed the folder is already closed, so its link cannot be read.
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{descriptor}")
            if kind.startswith("socket:") or kind in _FOREIGN:
                os.close(descriptor)
    os.environ.update(start.variables)
    rank = start.variables.get("RANK")
    register_stacks("" if rank is None else f"rank {rank}")

    def run() -> int:
        # Redirect inside ``run_and_exit``, so that it prints an error to the worker's output.
        if start.output is not None:
            if start.order.captures == "both":
                os.dup2(start.output.number, 1)
            os.dup2(start.output.number, 2)
            os.close(start.output.number)
        return start.target(start.channel, start.heartbeat)

    run_and_exit(run)


def name_process(name: str) -> None:
    """Name this process for ``ps`` and ``pkill -x``; the kernel keeps 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of the processes that its workers leave behind.

    The first process of a container is their parent without this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(*, known: Collection[int]) -> None:
    """Kill and reap the processes that workers have started and left behind.

    ``known`` contains the process ids of the workers themselves. Helpers of this process are not affected:
    they are in its process group, whereas an orphan is in the process group of its worker.
    """
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii")
    except OSError:
        return
    for child in map(int, text.split()):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if child not in known and os.getpgid(child) != os.getpgrp():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, os.WNOHANG)
