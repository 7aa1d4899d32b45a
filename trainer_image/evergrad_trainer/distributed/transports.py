"""Transports move tensors between the processes of one group and release threads whose peers are gone.

==============  ===============  ===================================  ========================================
transport       tensors on       a stuck operation is freed by        an operation of an abandoned group
==============  ===============  ===================================  ========================================
gloo            CPU              cutting its sockets (the watchdog)   raises, or never ends
NCCL            accelerator      aborting its communicators, once     may end without data or an error
asynchronous    CPU, for tests   aborting, as with NCCL               ends without data or an error
==============  ===============  ===================================  ========================================

One transport object serves one generation. Small integers and checkpoints always use gloo groups on the CPU.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from evergrad_trainer.base import torch_private

ENVIRONMENT_VARIABLE = "EVERGRAD_TRANSPORT"
"""If this environment variable is ``asynchronous``, CPU runs use the transport for tests."""
_ABORT_SECONDS = 2.0
"""How long ``give_up`` waits for the abort of a group. The caller cuts the sockets after this time even if
the abort has not returned."""
_DELAY_SECONDS = 0.002
"""Delay between the arrival of the data and the end of an operation of the asynchronous transport."""


class Pending(Protocol):
    """A started operation with other processes: torch's ``Work``, or a thread that waits for one."""

    def is_completed(self) -> bool:
        """Return whether the operation has ended: its data have arrived or will never arrive."""

    def wait(self) -> object:
        """Wait for the operation. Raises RuntimeError if it failed."""


class Transport(Protocol):
    """The operations that a world uses to move tensors.

    ``give_up`` may be called from any thread at any time.
    """

    backend: str
    is_silent: bool
    """Whether an operation of an abandoned group may end without its data and without an error. If so, check
    that the group is not abandoned before you use the data."""
    is_stream_ordered: bool
    """Whether ``wait`` of an operation blocks the device's stream and not the host. Kernels that are launched
    later run after the operation."""

    def prepare(self) -> None:
        """Prepare this process before its first group is created."""

    def opened(self) -> None:
        """Record that the groups are set up. If they were given up in the meantime, abort them now."""

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        """Start to sum ``values`` over all ranks, in place."""

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        """Start to send ``values`` to the rank ``to``."""

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        """Start to fill ``values`` with the data that the rank ``source`` sends."""

    def mark_started(self) -> Pending:
        """Return an operation that ends when all operations started and waited for so far have ended."""

    def give_up(self) -> None:
        """Release every thread of this process that is blocked in an operation of these groups.

        A transport whose threads are released when sockets are cut does nothing here.
        """

    def close(self) -> None:
        """Destroy the groups of this process in any state."""


class _Ended:
    """An operation that has already ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Return without waiting."""


class _LaunchedWork:
    """All work launched so far on the current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def mark_launched(device: torch.device) -> Pending:
    """Return an operation that ends when ``device`` has run all work that this thread has launched on it.

    For a CPU, this operation has already ended.
    """
    return _LaunchedWork(device) if device.type == "cuda" else _Ended()


class _ThreadWork:
    """A blocking call in a separate daemon thread. If the call never ends, the thread is left running."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._failure: str | None = None
        self._thread = threading.Thread(
            target=self._run, name="evergrad-exchange", daemon=True
        )
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _run(self) -> None:
        # Drop the reference before the call, because otherwise a thread that never ends would keep the group.
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except RuntimeError as error:
            # Keep only the message. The error's traceback refers to frames that refer to the group, which is
            # a reference cycle. The garbage collector would destroy the group later, and the destructor would
            # wait for dead peers while it holds the GIL.
            self._failure = str(error)


class GlooTransport:
    """Transport over TCP between CPUs.

    An operation raises an error if the connection to its peer ends, or if the watchdog cuts its socket.
    """

    backend = "gloo"
    is_silent = False
    is_stream_ordered = False

    def prepare(self) -> None:
        """Do nothing."""

    def opened(self) -> None:
        """Do nothing, because the watchdog cuts sockets until the process leaves the group."""

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        return _started(dist.all_reduce(values, group=group, async_op=True))

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        # gloo's handles of sends cannot report whether they have completed, so a thread waits for them.
        return _ThreadWork(lambda: dist.send(values, group=group, group_dst=to))

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        return _ThreadWork(lambda: dist.recv(values, group=group, group_src=source))

    def mark_started(self) -> Pending:
        """Return an ended operation, because with gloo a finished wait means that the data have arrived."""
        return _Ended()

    def give_up(self) -> None:
        """Do nothing, because the watchdog cuts the sockets."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Abort:
    """Aborts the groups of one generation at most once, and never while they are being set up.

    torch's abort clears the default group. A second call, or a call before the default group exists, would
    raise AssertionError in the calling thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._is_wanted = False
        self._is_over = False

    def opened(self) -> None:
        """Record that all groups exist. If an abort was requested in the meantime, abort them now."""
        with self._lock:
            self._is_open = True
            if self._is_wanted:
                self._abort()

    def ask(self) -> None:
        """Abort the groups. If they are still being set up, abort them when set-up has finished."""
        # The watchdog and the main thread may both request an abort. The lock ensures a single abort.
        with self._lock:
            self._is_wanted = True
            if self._is_open:
                self._abort()

    def close(self) -> None:
        """Abort any remaining groups, because set-up and training have ended."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if dist.is_initialized():
                torch_private.abort_groups()


class NcclTransport:
    """Transport between accelerators, whose collectives are launched on their streams.

    The loss of a peer was tested only with three processes that share one accelerator, not with several
    accelerators.
    """

    backend = "nccl"
    is_silent = True
    is_stream_ordered = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._abort = _Abort()

    def prepare(self) -> None:
        """Disable torch's error handling and set the device.

        Otherwise torch's watchdog would end the process or abort the groups a second time.
        """
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Without this call, every worker of a node would create a context on the first device.
        torch.cuda.set_device(self._device)

    def opened(self) -> None:
        self._abort.opened()

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        return _started(dist.all_reduce(values, group=group, async_op=True))

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        return _started(dist.isend(values, group=group, group_dst=to))

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        return _started(dist.irecv(values, group=group, group_src=source))

    def mark_started(self) -> Pending:
        # Collectives run on a separate stream. The current stream waits for each of them that was waited for.
        return mark_launched(self._device)

    def give_up(self) -> None:
        # The abort runs in a thread: the sockets of the other groups are cut even if the driver hangs in it.
        aborting = threading.Thread(
            target=self._abort.ask, name="evergrad-abort", daemon=True
        )
        aborting.start()
        aborting.join(_ABORT_SECONDS)

    def close(self) -> None:
        self._abort.close()


class AsynchronousTransport:
    """Transport for tests, which behaves on the CPU as NCCL does on an accelerator.

    Operations run on a separate thread in the order in which they were started. Their data arrive some time
    after ``wait`` has returned. An operation whose peer is gone never ends by itself. An abort clears torch's
    groups and immediately ends all unfinished operations, without their data and without an error.
    """

    backend = "gloo"
    is_silent = True
    is_stream_ordered = False

    def __init__(self) -> None:
        self._abort = _Abort()
        self._given_up = threading.Event()
        self._queue: queue.SimpleQueue[_QueuedWork | None] = queue.SimpleQueue()
        self._last: _QueuedWork | None = None
        self._lock = threading.Lock()
        self._stream: threading.Thread | None = None

    def prepare(self) -> None:
        """Do nothing."""

    def opened(self) -> None:
        self._abort.opened()

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        return self._start(
            values, lambda copy: dist.all_reduce(copy, group=group), is_input=True
        )

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        return self._start(
            values, lambda copy: dist.send(copy, group=group, group_dst=to), is_input=True
        )

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        return self._start(
            values,
            lambda copy: dist.recv(copy, group=group, group_src=source),
            is_input=False,
        )

    def mark_started(self) -> Pending:
        return _Ended() if self._last is None else _Arrival(self._last)

    def give_up(self) -> None:
        # The stream's thread takes the same lock before it writes, and does not write after this flag is set.
        with self._lock:
            self._given_up.set()
        self._abort.ask()

    def close(self) -> None:
        with self._lock:
            self._given_up.set()
        # The stream's thread ends after all operations that were queued before.
        self._queue.put(None)
        self._abort.close()

    def _start(
        self,
        values: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        *,
        is_input: bool,
    ) -> "_QueuedWork":
        if self._stream is None:
            self._stream = threading.Thread(
                target=self._run, name="evergrad-stream", daemon=True
            )
            self._stream.start()
        work = self._last = _QueuedWork(values, call, self._given_up, is_input=is_input)
        self._queue.put(work)
        return work

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run(self._lock)


class _QueuedWork:
    """One operation of the asynchronous transport.

    The operation works on a copy of its tensor, so that an abort prevents any later write to the tensor.
    """

    def __init__(
        self,
        values: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        given_up: threading.Event,
        *,
        is_input: bool,
    ) -> None:
        self._values: torch.Tensor | None = values
        self._copy = values.clone() if is_input else torch.empty_like(values)
        self._call: Callable[[torch.Tensor], object] | None = call
        self._given_up = given_up
        self._arrived = threading.Event()

    def is_completed(self) -> bool:
        return self._arrived.is_set() or self._given_up.is_set()

    def wait(self) -> None:
        """Return without waiting, as on an accelerator.

        Later work on a stream would run after this operation. A host that reads the tensor before the
        operation has ended sees the old values.
        """

    def run(self, lock: threading.Lock) -> None:
        """Run the operation. Called on the stream's thread."""
        call, self._call = self._call, None
        values, self._values = self._values, None
        assert call is not None and values is not None  # noqa: S101 - run once
        has_failed = False
        if not self._given_up.is_set():
            try:
                call(self._copy)
            except Exception:  # noqa: BLE001 - a kernel does not raise: it spins until it is aborted
                has_failed = True
                self._given_up.wait()
            time.sleep(_DELAY_SECONDS)
        with lock:
            # ``give_up`` takes the same lock, so nothing is written after the host has observed the abort.
            if not self._given_up.is_set() and not has_failed:
                values.copy_(self._copy)
                self._arrived.set()


class _Arrival:
    """The end of one operation and of all operations before it, because they run in order.

    Its ``wait`` blocks the host.
    """

    def __init__(self, work: _QueuedWork) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        while not self._work.is_completed():
            time.sleep(_DELAY_SECONDS / 10)


def choose_transport(device: torch.device) -> Transport:
    """Build the transport of tensors on ``device`` for one generation."""
    if device.type == "cuda":
        return NcclTransport(device)
    if os.environ.get(ENVIRONMENT_VARIABLE) == "asynchronous":
        return AsynchronousTransport()
    return GlooTransport()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - async_op=True returns a Work by contract
    return work
