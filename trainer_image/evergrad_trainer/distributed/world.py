"""World of one generation: who trains together right now, and the collectives between them.

A ``World`` is one generation's group as one process sees it. The loop asks a ``Membership`` for it between
two steps and nowhere else, so that group, rank and size may change there. Every wait for other processes that
training does is in this module, so that each of them ends when the group is given up.
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
"""How long after the group was given up a wait may last: its sockets are cut, so that most operations end by
themselves."""


class Interrupt:
    """Says, from any thread, that a group is given up.

    ``set`` may be called from a thread while another waits.
    """

    def __init__(self, on_set: Callable[[], None] | None = None) -> None:
        """``on_set`` is called once, by whoever gives the group up: it frees a main thread that waits for a
        device."""
        self._since: float | None = None
        self._on_set = on_set

    def set(self) -> None:
        """Give the group up."""
        if self._since is None:
            self._since = time.monotonic()
            if self._on_set is not None:
                self._on_set()

    @property
    def is_set(self) -> bool:
        return self._since is not None

    @property
    def is_overdue(self) -> bool:
        """Whether operations have had their time to end by themselves."""
        return self._since is not None and time.monotonic() - self._since > _OVERDUE_SECONDS


@dataclass(frozen=True)
class World:
    """One generation's group as seen by one process. Groups are None in a world of one.

    ``group`` carries the model's tensors on ``device``; ``control`` (always on CPU) small integers between
    steps; ``checkpoint`` (always on CPU) belongs to the checkpoint thread alone. With an ``interrupt`` no
    wait outlives the group, and none lasts longer than ``timeout_seconds``: not every transport has a timeout
    of its own.
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
    """Collectives that were started and not waited for, with the tensors they may still write to."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes what exists once a run."""
        return self.rank == 0

    def sum_integers(self, values: torch.Tensor) -> torch.Tensor:
        """Sum an int64 CPU tensor over all ranks, in place (wrapping modulo 2**64); returns it."""
        if self.control is not None:
            self.wait(
                self._start(
                    lambda: dist.all_reduce(values, group=self.control, async_op=True),
                    values,
                )
            )
        return values

    def start_sum(self, values: torch.Tensor) -> Pending:
        """Begin to sum ``values`` over all ranks, in place; :meth:`wait` for it. Only with a ``group``."""
        return self._start(lambda: self.transport.start_sum(values, self.group), values)

    def wait(self, work: Pending) -> None:
        """Wait until the data of a collective have arrived.

        Raises PeerLostError when it failed, or was given up.
        """
        try:
            # Polled, since no wait of torch can be given up from another thread, and a peer that is gone or
            # frozen may leave work.wait() waiting for the whole timeout of the group.
            latest = time.monotonic() + self.timeout_seconds
            while self.interrupt is not None and not work.is_completed():
                if self.interrupt.is_overdue:
                    raise PeerLostError("the group was given up during a collective")
                if time.monotonic() > latest:
                    raise PeerLostError(
                        f"a collective did not end within {self.timeout_seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
            # It may have ended because it was aborted: what it was to bring is not there, and a silent
            # transport does not say so.
            if (
                self.interrupt is not None
                and self.transport.is_silent
                and self.interrupt.is_set
            ):
                raise PeerLostError("the group was given up during a collective")
            work.wait()
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            raise self._explained(error) from None
        self.unfinished[:] = [entry for entry in self.unfinished if entry[0] is not work]

    def send(self, values: torch.Tensor, *, to: int) -> None:
        """Give ``values`` to one rank. Raises PeerLostError."""
        self.wait(
            self._start(
                lambda: self.transport.start_send(values, self.group, to=to), values
            )
        )

    def receive(self, values: torch.Tensor, *, source: int) -> None:
        """Fill ``values`` with what ``source`` sends; they are there when this returns.

        Raises PeerLostError.
        """
        self.wait(
            self._start(
                lambda: self.transport.start_receive(values, self.group, source=source),
                values,
            )
        )

    def raise_if_given_up(self) -> None:
        """Between two pieces of work: do not begin the next one for a group that is no more.

        Raises PeerLostError.
        """
        if self.interrupt is not None and self.interrupt.is_set:
            raise PeerLostError("the group was given up")

    def follow(self, work: Pending) -> None:
        """Let what is computed next be computed behind a collective.

        Where the device can wait by itself the host continues at once, and :meth:`await_started` comes later.
        Elsewhere this is :meth:`wait`. Raises PeerLostError.
        """
        if not self.transport.is_stream_ordered:
            self.wait(work)
            return
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            raise self._explained(error) from None

    def await_started(self) -> None:
        """Wait until all collectives that this rank has followed or waited for have brought their data.

        Raises PeerLostError where the group was given up: they may have ended without their data then.
        """
        self.wait(self.transport.mark_started())
        self.unfinished[:] = [
            entry for entry in self.unfinished if not entry[0].is_completed()
        ]

    def confirm(self) -> None:
        """Wait until every rank has got all that was sent. Raises PeerLostError unless that is certain.

        A silent transport's collective may end without its data and without an error. The rank that finds
        this out leaves instead of taking part in the exchange, which then ends for nobody.
        """
        if self.group is None:
            return
        self.await_started()
        # Collective: a rank that gets here has all of its data.
        self.barrier()

    def _start(
        self, begin: Callable[[], Pending | None], *tensors: torch.Tensor
    ) -> Pending:
        try:
            work = begin()
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            raise self._explained(error) from None
        assert work is not None  # noqa: S101 - async_op=True returns a Work by contract
        # Kept alive: a collective of a group that is given up may still write into its tensors.
        if self.interrupt is not None:
            self.unfinished.append((work, tensors))
        return work

    def _explained(self, error: Exception) -> Exception:
        """A lost peer, if that is what the error says.

        Its traceback is dropped: it would hold works and tensors.
        """
        is_given_up = self.interrupt is not None and self.interrupt.is_set
        if is_given_up or isinstance(error, PeerLostError):
            # An abort from another thread takes the groups away under a call of torch, which then raises
            # whatever comes first.
            return PeerLostError(str(error))
        if isinstance(error, torch.AcceleratorError):
            return HostError(f"{self.device}: {error}. Another host can go on.")
        return PeerLostError(str(error)) if isinstance(error, RuntimeError) else error

    def all_agree(self, fine: bool) -> bool:
        """Whether ``fine`` holds on every rank."""
        return int(self.sum_integers(torch.tensor([0 if fine else 1]))) == 0

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """The JSON value of rank ``source`` on every rank; the others' argument is ignored."""
        if self.control is None:
            return value
        # Two collectives: the others learn the length before they can make room for the bytes.
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
        """Every rank's JSON value on every rank, in rank order."""
        if self.control is None:
            return [value]
        data = json.dumps(value).encode()
        # Collective: lengths first, since an all-gather needs the same size from every rank.
        sizes = self.gather_integers(len(data))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.zeros_like(padded) for _ in range(self.size)]
        # Collective: every rank's bytes to every rank.
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
        """Every rank's signed 64-bit integer on every rank, in rank order."""
        # Each rank fills a place of its own, so that a sum gathers the values.
        values = torch.zeros(self.size, dtype=torch.int64)
        values[self.rank] = value
        return [int(one) for one in self.sum_integers(values).tolist()]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_agree(True)


class Membership:
    """The one place that knows the current world. Changes only between two steps."""

    def __init__(
        self,
        world: World,
        *,
        is_changing: Callable[[], bool] = lambda: False,
        can_wait: Callable[[], bool] = lambda: False,
        saves_first: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_changing``: whether this process was asked to leave the world at the next step boundary.

        ``can_wait``: whether that may be a later one, so that a save in flight ends. ``saves_first``: whether
        the world is to save its state before it is left, because nobody continues with it.
        """
        self._world = world
        self._can_wait = can_wait
        self._is_changing = is_changing
        self._saves_first = saves_first

    @property
    def world(self) -> World:
        return self._world

    def move_to(self, world: World) -> None:
        """Continue in another world. Only between two steps."""
        self._world = world

    def is_changing(self, *, is_saving: bool = False) -> bool:
        """Whether this process knows of a wish to go on in another world; the loop folds it into its agreed
        flags.

        With ``is_saving`` a wish that can wait is none yet.
        """
        return self._is_changing() and not (is_saving and self._can_wait())

    def saves_first(self) -> bool:
        """Whether this process knows that the state must be saved before the world is left."""
        return self._saves_first()
