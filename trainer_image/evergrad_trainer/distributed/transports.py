"""Transports: the ways of tensors between the processes of one group, and out of a group whose peers are
gone.

==============  ===============  ===================================  ========================================
transport       tensors on       a stuck operation is freed by        an operation of an abandoned group
==============  ===============  ===================================  ========================================
gloo            CPU              cutting its sockets (the watchdog)   raises, or never ends
NCCL            accelerator      aborting its communicators, once     may end without its data or an error
asynchronous    CPU, for tests   aborting, as NCCL does               ends without its data or an error
==============  ===============  ===================================  ========================================

One object serves one generation. Small integers and checkpoints always travel over gloo groups on the CPU.
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
"""``asynchronous`` makes CPU runs use the transport for tests."""
_ABORT_SECONDS = 2.0
"""How long whoever gives a group up waits for its abort before it cuts the sockets all the same."""
_DELAY_SECONDS = 0.002
"""How long after its data an operation of the asynchronous transport ends."""


class Pending(Protocol):
    """An operation with other processes that was started: torch's ``Work``, or a thread that
    waits for one."""

    def is_completed(self) -> bool:
        """Whether it has ended: its data have arrived, or never will."""

    def wait(self) -> object:
        """Raises RuntimeError where it has failed."""


class Transport(Protocol):
    """Operations that a world needs of the library that moves its tensors.

    ``give_up`` may come from any thread, at any time.
    """

    backend: str
    is_silent: bool
    """An operation of a group that was given up may end without its data and without an error: whether the
    group still stands is looked at before the data are used."""
    is_stream_ordered: bool
    """The wait of an operation is the device's: what is launched behind it runs behind it, and the host goes
    on at once."""

    def prepare(self) -> None:
        """Set this process up, before its first group."""

    def opened(self) -> None:
        """The groups are set up. If this one was given up in the meantime, it is aborted now."""

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        """Begin to sum ``values`` over all ranks, in place."""

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        """Begin to give ``values`` to one rank."""

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        """Begin to fill ``values`` with what ``source`` sends."""

    def mark_started(self) -> Pending:
        """Return what ends when everything that was started and waited for so far has ended."""

    def give_up(self) -> None:
        """Free every thread of this process that waits in an operation of this group, where cutting sockets
        does not."""

    def close(self) -> None:
        """Take the groups of this process down, whatever has become of them."""


class _Ended:
    """An operation that was over before anybody asked."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing."""


class _LaunchedWork:
    """All that was launched on the current stream of an accelerator so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def mark_launched(device: torch.device) -> Pending:
    """Return what ends when ``device`` has run what this thread has launched on it; a CPU has, when asked."""
    return _LaunchedWork(device) if device.type == "cuda" else _Ended()


class _ThreadWork:
    """A blocking call in a thread of its own, which is left behind if the call never ends."""

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
        # Dropped before it runs: a thread that never ends would keep the group through it.
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except RuntimeError as error:
            # Its words only: an error that is kept keeps its frames, and with them the group, in a circle
            # that the garbage collector would break at some later moment, waiting for dead peers with the
            # interpreter locked.
            self._failure = str(error)


class GlooTransport:
    """TCP between CPUs.

    An operation raises when its peer's connection ends, and so do those whose sockets the watchdog cuts.
    """

    backend = "gloo"
    is_silent = False
    is_stream_ordered = False

    def prepare(self) -> None:
        """Nothing."""

    def opened(self) -> None:
        """Nothing: the watchdog cuts until the group is left."""

    def start_sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        return _started(dist.all_reduce(values, group=group, async_op=True))

    def start_send(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, to: int
    ) -> Pending:
        # gloo's own handles of sends cannot be asked whether they are done, so that a thread waits for them.
        return _ThreadWork(lambda: dist.send(values, group=group, group_dst=to))

    def start_receive(
        self, values: torch.Tensor, group: dist.ProcessGroup | None, *, source: int
    ) -> Pending:
        return _ThreadWork(lambda: dist.recv(values, group=group, group_src=source))

    def mark_started(self) -> Pending:
        """Nothing to wait for: an operation that was waited for has ended."""
        return _Ended()

    def give_up(self) -> None:
        """Nothing: the watchdog cuts the sockets."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Abort:
    """Aborts the groups of one generation at most once, and never while they are being set up.

    torch's abort clears the default group: a second call finds none and raises AssertionError, and so does
    one that comes before there is a default group, in whatever thread asked for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._is_wanted = False
        self._is_over = False

    def opened(self) -> None:
        """All groups are there. If an abort was asked for in the meantime, it is made now."""
        with self._lock:
            self._is_open = True
            if self._is_wanted:
                self._abort()

    def ask(self) -> None:
        """Abort the groups; while they are being set up, as soon as they are."""
        # The lock is what makes one abort of several wishes: the watchdog's and the main thread's.
        with self._lock:
            self._is_wanted = True
            if self._is_open:
                self._abort()

    def close(self) -> None:
        """Set-up and training are over: no group may be left."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if dist.is_initialized():
                torch_private.abort_groups()


class NcclTransport:
    """Collectives of accelerators, launched on their streams.

    Lost peers were seen on one accelerator that three processes shared; never on several.
    """

    backend = "nccl"
    is_silent = True
    is_stream_ordered = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._abort = _Abort()

    def prepare(self) -> None:
        """Leave errors to this program: torch's watchdog would end the process, or abort a second time."""
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Where none is set every worker of a node opens a context on the first device.
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
        # Collectives run on a stream of their own; the current one is behind each that was waited for.
        return mark_launched(self._device)

    def give_up(self) -> None:
        # In a thread: should the driver hang in the abort, the sockets of the other groups are cut all the
        # same.
        aborting = threading.Thread(
            target=self._abort.ask, name="evergrad-abort", daemon=True
        )
        aborting.start()
        aborting.join(_ABORT_SECONDS)

    def close(self) -> None:
        self._abort.close()


class AsynchronousTransport:
    """For tests: works on the CPU as NCCL does on an accelerator.

    Operations run on a thread of their own, in the order they were started, and arrive some time after
    ``wait`` has returned. One whose peer is gone never ends by itself. An abort clears torch's groups; what
    had not arrived by then ends at once, without its data and without an error.
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
        """Nothing."""

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
        # Under the lock with the stream's thread, which writes nothing once this is seen.
        with self._lock:
            self._given_up.set()
        self._abort.ask()

    def close(self) -> None:
        with self._lock:
            self._given_up.set()
        # The stream's thread ends behind everything that was queued before.
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

    Its data go through a copy, so that nothing is written after an abort.
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
        """Nothing: what follows on the stream would come after it; only the host that reads too early sees
        old values."""

    def run(self, lock: threading.Lock) -> None:
        """On the stream's thread."""
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
            # Under the lock with ``give_up``: once the host has seen the abort nothing is written any more.
            if not self._given_up.is_set() and not has_failed:
                values.copy_(self._copy)
                self._arrived.set()


class _Arrival:
    """The end of one operation and, since they run in order, of all before it; its ``wait`` is the host's."""

    def __init__(self, work: _QueuedWork) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        while not self._work.is_completed():
            time.sleep(_DELAY_SECONDS / 10)


def choose_transport(device: torch.device) -> Transport:
    """Build the transport of tensors on ``device``, for one generation."""
    if device.type == "cuda":
        return NcclTransport(device)
    if os.environ.get(ENVIRONMENT_VARIABLE) == "asynchronous":
        return AsynchronousTransport()
    return GlooTransport()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - async_op=True returns a Work by contract
    return work
