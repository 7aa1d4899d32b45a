"""Sources of a worker's worlds: a supervisor, which receives reports about them, or a launcher."""

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
    """Orders to a worker, and reports about its worlds."""

    are_replaced: bool
    """Whether another world follows a world that breaks."""

    def await_order(self, *, step: int) -> Order:
        """Wait for the next order, outside of every group. ``step``: step of the held state (-1: none)."""

    def meet(self, begin: WorkerGo, alone: World) -> World:
        """Form the group of ``begin``, and claim the run directory for it. Raises PeerLostError."""

    def trains(self, world: World, step: int) -> None:
        """Report that all members hold the state after ``step`` and continue from it."""

    def agreed_end(
        self,
        world: World,
        *,
        step: int,
        exit_code: int,
        reason: str,
    ) -> None:
        """Report that the run's end is recorded."""

    def cut(self) -> None:
        """Abandon the running group on this side, so that peers do not wait for this process."""

    def leave(self, world: World | None) -> bool:
        """Tear down the group; return whether buffers of its collectives must not be used again."""

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        """Report that this process has left the group of ``generation``.

        ``error``: the error that broke the group; None if it ended as agreed.
        """


class SupervisedWorlds:
    """One world after another, as the supervisor orders them over the channel."""

    are_replaced = True

    def __init__(
        self,
        watchdog: Watchdog,
        channel: Channel,
        directory: RunDirectory,
        *,
        timeout_seconds: float,
    ) -> None:
        """``timeout_seconds``: timeout of a group's collectives."""
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
        # Call this before the first connection is opened: the watchdog cuts connections that are opened
        # afterwards.
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
        # Claim only now: a group that never forms must not fence out the previous group.
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
        # Only rank 0's report counts; the other ranks wait for the supervisor's order.
        if world.is_main:
            self._channel.send(WorkerResult(world.generation, step, exit_code, reason))

    def cut(self) -> None:
        self._watchdog.cut()

    def leave(self, world: World | None) -> bool:
        assert self._transport is not None  # noqa: S101 - a group is left after it was met
        was_stuck = abandon_world(world, self._transport)
        # Call this last: the watchdog may cut connections until the group is torn down.
        self._watchdog.leave()
        return was_stuck

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        # A peer that left early because of a planned change has broken nothing.
        if error is None and (is_expected or self._watchdog.is_changing_from(generation)):
            return
        error = error or PeerLostError("a peer left the group")
        self._channel.send(WorkerBroken(generation, step, fit_text(str(error)), error.kind))


class OnlyWorld:
    """The only world of a process that a launcher has started.

    It was formed, and the directory claimed, before this object was created.
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
        """Report nothing, because the launcher does not wait for a report."""

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
        """Do nothing, because the end of this process closes its connections."""

    def leave(self, world: World | None) -> bool:
        if world is not None:
            leave_world(world)
        return False

    def left(
        self, generation: int, *, step: int, error: EvergradError | None, is_expected: bool
    ) -> None:
        """Do nothing, because the launcher reads the exit code."""
