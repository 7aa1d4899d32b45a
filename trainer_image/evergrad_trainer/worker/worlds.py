"""Sources of a worker's worlds: a supervisor, which gets reports of them, or a launcher."""

from typing import Protocol

from evergrad_manifest.errors import EvergradError
from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.checkpoint.generations import claim_exactly
from evergrad_trainer.distributed.process_groups import (
    Place,
    abandon_world,
    form_world,
    leave_world,
)
from evergrad_trainer.distributed.transports import Transport, choose_transport
from evergrad_trainer.distributed.world import Interrupt, World
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker.channel import (
    Channel,
    WorkerBroken,
    WorkerFinish,
    WorkerGo,
    WorkerResult,
    WorkerUp,
    fit_text,
)
from evergrad_trainer.worker.watchdog import Order, Watchdog


class Worlds(Protocol):
    """Orders to a worker, and reports of what becomes of its worlds."""

    are_replaced: bool
    """Whether another world follows one that breaks."""

    def await_order(self, *, step: int) -> Order:
        """Wait, out of every group and holding the state after ``step`` (-1: none), for what to do next."""

    def meet(self, begin: WorkerGo, alone: World) -> World:
        """Form the group of ``begin`` and claim the run directory for it. Raises PeerLostError."""

    def trains(self, world: World, step: int) -> None:
        """All members hold the state after ``step`` and continue from it."""

    def agreed_end(
        self,
        world: World,
        *,
        step: int,
        exit_code: int,
        reason: str,
    ) -> None:
        """The run's end is written down."""

    def cut(self) -> None:
        """Give the running group up from this side: peers must not wait for this process."""

    def leave(self, world: World | None) -> bool:
        """Take the group down; whether buffers of its collectives must not be used again."""

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        """This process is out of the group of ``generation``, which ``error`` broke, if it did not end as
        agreed."""


class SupervisedWorlds:
    """One world after the other, as the supervisor orders them over the channel."""

    are_replaced = True

    def __init__(
        self,
        watchdog: Watchdog,
        channel: Channel,
        directory: RunDirectory,
        *,
        timeout_seconds: float,
    ) -> None:
        """``timeout_seconds``: of a group's collectives."""
        self._watchdog = watchdog
        self._channel = channel
        self._directory = directory
        self._timeout_seconds = timeout_seconds
        self._transport: Transport | None = None

    def await_order(self, *, step: int) -> Order:
        return self._watchdog.await_order(step=step)

    def meet(self, begin: WorkerGo, alone: World) -> World:
        self._transport = transport = choose_transport(alone.device)
        interrupt = Interrupt(transport.give_up)
        # Before the first connection is opened: the watchdog cuts those that are opened from here on.
        self._watchdog.enter(begin.generation, interrupt)
        world = form_world(
            Place(
                begin.generation, begin.rank, begin.world_size, begin.address, begin.port
            ),
            device=alone.device,
            transport=transport,
            interrupt=interrupt,
            setup_seconds=begin.setup_seconds,
            timeout_seconds=self._timeout_seconds,
        )
        self._watchdog.note_formed()
        # Only now: a group that never forms must not fence out the one before it.
        if world.is_main:
            claim_exactly(self._directory.checkpoints, world.generation)
        return world

    def trains(self, world: World, step: int) -> None:
        self._channel.send(WorkerUp(world.generation, step))

    def agreed_end(
        self,
        world: World,
        *,
        step: int,
        exit_code: int,
        reason: str,
    ) -> None:
        # Only rank 0's report counts; the others wait for the supervisor's order.
        if world.is_main:
            self._channel.send(WorkerResult(world.generation, step, exit_code, reason))

    def cut(self) -> None:
        self._watchdog.cut()

    def leave(self, world: World | None) -> bool:
        assert self._transport is not None  # noqa: S101 - a group is left after it was met
        was_stuck = abandon_world(world, self._transport)
        # Last: the watchdog may cut until nothing of the group is left.
        self._watchdog.leave()
        return was_stuck

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        # A peer that left first for a planned change has broken nothing.
        if error is None and (is_expected or self._watchdog.is_changing_from(generation)):
            return
        error = error or PeerLostError("a peer left the group")
        self._channel.send(WorkerBroken(generation, step, fit_text(str(error)), error.kind))


class OnlyWorld:
    """The one world that a launcher has put this process into.

    It was formed, and the directory claimed, before.
    """

    are_replaced = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._exit_code: int | None = None
        self._has_begun = False

    def await_order(self, *, step: int) -> Order:
        if self._exit_code is not None:
            return WorkerFinish(self._exit_code)
        if self._has_begun:
            raise RuntimeError(
                "the only world of this process has ended without an end of the run"
            )
        self._has_begun = True
        world = self._world
        return WorkerGo(
            world.generation,
            world.rank,
            world.size,
            address="",
            port=0,
            setup_seconds=0.0,
            cause="",
        )

    def meet(self, begin: WorkerGo, alone: World) -> World:
        return self._world

    def trains(self, world: World, step: int) -> None:
        """Report nothing: the launcher does not wait for it."""

    def agreed_end(
        self,
        world: World,
        *,
        step: int,
        exit_code: int,
        reason: str,
    ) -> None:
        self._exit_code = exit_code

    def cut(self) -> None:
        """The end of this process cuts its connections."""

    def leave(self, world: World | None) -> bool:
        if world is not None:
            leave_world(world)
        return False

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        """The launcher reads the exit code."""
