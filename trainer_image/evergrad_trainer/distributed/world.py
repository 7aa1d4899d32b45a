"""The world of one generation: the processes that currently train together, and their collectives.

A ``World`` is one generation's group from the view of one process. The training loop reads it from a
``Membership`` only between two steps, so that group, rank and size may change there. All code with which
training waits for other processes is in this module, so that every wait ends if the group is given up.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from evergrad_trainer.base.errors import HostError, PeerLostError
from evergrad_trainer.distributed.transports import GlooTransport, Pending, Transport

_POLL_SECONDS = 0.0002
_OVERDUE_SECONDS = 0.1
"""How long a wait may continue after the group was given up. The sockets are cut then, so most operations end
by themselves within this time."""


class Interrupt:
    """A flag that any thread can set to give up a group, even while another thread waits."""

    def __init__(self, on_set: Callable[[], None] | None = None) -> None:
        """``on_set`` is called once, in the thread that gives the group up. It releases a main thread that is
        blocked on a device."""
        self._since: float | None = None
        self._on_set = on_set

    def set(self) -> None:
        """Give up the group."""
        if self._since is None:
            self._since = time.monotonic()
            if self._on_set is not None:
                self._on_set()

    @property
    def is_set(self) -> bool:
        return self._since is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the time in which operations may end by themselves has passed."""
        return self._since is not None and time.monotonic() - self._since > _OVERDUE_SECONDS


@dataclass(frozen=True)
class World:
    """One generation's group from the view of one process. The groups are None in a world of one process.

    ``group`` transfers the model's tensors on ``device``. ``control`` (always on the CPU) transfers small
    integers between steps. ``checkpoint`` (always on the CPU) is used only by the checkpoint thread. If
    ``interrupt`` is set, every wait ends when the group is given up and lasts at most ``timeout_seconds``,
    because not every transport has its own timeout.
    """

    generation: int
    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    checkpoint: dist.ProcessGroup | None = None
    interrupt: Interrupt | None = None
    transport: Transport = field(default_factory=GlooTransport, compare=False)
    timeout_seconds: float = math.inf
    unfinished: list[tuple[Pending, tuple[torch.Tensor, ...]]] = field(
        default_factory=list, compare=False
    )
    """Started collectives that were not waited for yet, with the tensors that they may still write to."""

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes the files that exist once per run."""
        return self.rank == 0

    def sum_integers(self, values: torch.Tensor) -> torch.Tensor:
        """Sum an int64 CPU tensor over all ranks in place, modulo 2**64, and return it.

        Raises PeerLostError if the collective fails or the group is given up.
        """
        if self.control is not None:
            self.wait(
                self._start(
                    lambda: dist.all_reduce(values, group=self.control, async_op=True),
                    values,
                )
            )
        return values

    def start_sum(self, values: torch.Tensor) -> Pending:
        """Start to sum ``values`` over all ranks in place. Call :meth:`wait` with the result.

        Requires a ``group``.
        """
        return self._start(lambda: self.transport.start_sum(values, self.group), values)

    def wait(self, work: Pending) -> None:
        """Wait until the data of a collective have arrived.

        Raises PeerLostError if the collective fails or the group is given up.
        """
        try:
            # Poll, because another thread cannot interrupt torch's work.wait(). If a peer is gone or frozen,
            # work.wait() may block for the whole timeout of the group.
            latest = time.monotonic() + self.timeout_seconds
            while self.interrupt is not None and not work.is_completed():
                if self.interrupt.is_overdue:
                    raise PeerLostError("the group was given up during a collective")
                if time.monotonic() > latest:
                    raise PeerLostError(
                        f"a collective did not end within {self.timeout_seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
            # The collective may have ended because it was aborted. Then its data are missing, and a silent
            # transport does not raise an error.
            if (
                self.interrupt is not None
                and self.transport.is_silent
                and self.interrupt.is_set
            ):
                raise PeerLostError("the group was given up during a collective")
            work.wait()
        except Exception as error:  # noqa: BLE001 - raised again as a more specific error
            raise self._explained(error) from None
        self.unfinished[:] = [entry for entry in self.unfinished if entry[0] is not work]

    def send(self, values: torch.Tensor, *, to: int) -> None:
        """Send ``values`` to the rank ``to``. Raises PeerLostError if the peer is gone."""
        self.wait(
            self._start(
                lambda: self.transport.start_send(values, self.group, to=to), values
            )
        )

    def receive(self, values: torch.Tensor, *, source: int) -> None:
        """Fill ``values`` with the data that the rank ``source`` sends, and wait for the data.

        Raises PeerLostError if the peer is gone.
        """
        self.wait(
            self._start(
                lambda: self.transport.start_receive(values, self.group, source=source),
                values,
            )
        )

    def raise_if_given_up(self) -> None:
        """Raise PeerLostError if the group was given up.

        Call this between two pieces of work, so that no work starts for a group that no longer exists.
        """
        if self.interrupt is not None and self.interrupt.is_set:
            raise PeerLostError("the group was given up")

    def follow(self, work: Pending) -> None:
        """Make later computation run after a collective.

        If the transport is ordered by a stream, the device waits and the host continues without waiting. Call
        :meth:`await_started` later in this case. For other transports, this method is :meth:`wait`. Raises
        PeerLostError.
        """
        if not self.transport.is_stream_ordered:
            self.wait(work)
            return
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - raised again as a more specific error
            raise self._explained(error) from None

    def await_started(self) -> None:
        """Wait until the data of all collectives that this rank has followed or waited for have arrived.

        Raises PeerLostError if the group was given up, because the collectives may have ended without data.
        """
        self.wait(self.transport.mark_started())
        self.unfinished[:] = [
            entry for entry in self.unfinished if not entry[0].is_completed()
        ]

    def confirm(self) -> None:
        """Wait until every rank has received all data. Raises PeerLostError unless this is certain.

        A collective of a silent transport may end without its data and without an error. A rank that detects
        this raises before the final barrier, so the barrier does not complete on any rank.
        """
        if self.group is None:
            return
        self.await_started()
        # Collective: each rank that reaches this barrier has all of its data.
        self.barrier()

    def _start(
        self, begin: Callable[[], Pending | None], *tensors: torch.Tensor
    ) -> Pending:
        try:
            work = begin()
        except Exception as error:  # noqa: BLE001 - raised again as a more specific error
            raise self._explained(error) from None
        assert work is not None  # noqa: S101 - async_op=True returns a Work by contract
        # Keep the tensors alive, because a collective of an abandoned group may still write to them.
        if self.interrupt is not None:
            self.unfinished.append((work, tensors))
        return work

    def _explained(self, error: Exception) -> Exception:
        """Return the error to raise: a PeerLostError, a HostError, or ``error`` itself.

        A lost peer becomes a new error with the message alone, because the traceback of ``error`` would keep
        operations and tensors alive.
        """
        is_given_up = self.interrupt is not None and self.interrupt.is_set
        if is_given_up or isinstance(error, PeerLostError):
            # An abort from another thread removes the groups during a call of torch, which may then raise any
            # error.
            return PeerLostError(str(error))
        if isinstance(error, torch.AcceleratorError):
            return HostError(f"{self.device}: {error}. Another host can continue.")
        return PeerLostError(str(error)) if isinstance(error, RuntimeError) else error

    def all_agree(self, fine: bool) -> bool:
        """Return whether ``fine`` is true on every rank. All ranks call this."""
        return int(self.sum_integers(torch.tensor([0 if fine else 1]))) == 0

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """Return the JSON value of rank ``source`` on every rank. Other ranks' ``value`` is ignored.

        All ranks call this. For example, ``broadcast_json(names if world.is_main else None)``.
        """
        if self.control is None:
            return value
        # Two collectives: the other ranks need the length to allocate the buffer for the bytes.
        data = json.dumps(value).encode() if self.rank == source else b""
        size = self.sum_integers(torch.tensor([len(data)]))
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.wait(
            self._start(
                lambda: dist.broadcast(
                    buffer, group=self.control, group_src=source, async_op=True
                ),
                buffer,
            )
        )
        return json.loads(bytes(buffer.tolist()))

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order. All ranks call this."""
        if self.control is None:
            return [value]
        data = json.dumps(value).encode()
        # Collective: gather the lengths first, because an all-gather needs the same size from every rank.
        sizes = self.gather_integers(len(data))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.zeros_like(padded) for _ in range(self.size)]
        # Collective: send every rank's bytes to every rank.
        self.wait(
            self._start(
                lambda: dist.all_gather(rows, padded, group=self.control, async_op=True),
                padded,
                *rows,
            )
        )
        return [
            json.loads(bytes(row[:length].tolist()))
            for row, length in zip(rows, sizes, strict=True)
        ]

    def gather_integers(self, value: int) -> list[int]:
        """Return the signed 64-bit integers of all ranks, in rank order. All ranks call this."""
        # Each rank sets only its own element, so that a sum gathers the values.
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        return [int(one) for one in self.sum_integers(values).tolist()]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_agree(True)


class Membership:
    """Holds the current world of this process, which changes only between two steps."""

    def __init__(
        self,
        world: World,
        *,
        is_changing: Callable[[], bool] = lambda: False,
        can_wait: Callable[[], bool] = lambda: False,
        saves_first: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a membership of ``world``.

        ``is_changing`` returns whether this process was asked to leave the world at the next step boundary.
        ``can_wait`` returns whether a later boundary is also acceptable, so that a save in progress can end.
        ``saves_first`` returns whether the world must save its state before it is left, because no process
        continues with the state.
        """
        self._world = world
        self._can_wait = can_wait
        self._is_changing = is_changing
        self._saves_first = saves_first

    @property
    def world(self) -> World:
        return self._world

    def move_to(self, world: World) -> None:
        """Continue in another world. Call this only between two steps."""
        self._world = world

    def is_changing(self, *, is_saving: bool = False) -> bool:
        """Return whether this process was asked to continue in another world.

        The loop shares the result with all ranks in its agreed flags. If ``is_saving`` is true, a request
        that can wait is ignored.
        """
        return self._is_changing() and not (is_saving and self._can_wait())

    def saves_first(self) -> bool:
        """Return whether this process was asked to save the state before it leaves the world."""
        return self._saves_first()
