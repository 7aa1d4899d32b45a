"""Drives one training process through the states of :mod:`evergrad_trainer.worker.states`: it builds once,
and then takes part in one or more worlds."""

import contextlib
import sys
from dataclasses import dataclass

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.base.errors import DivergedError, PeerLostError
from evergrad_trainer.base.records import Event, EventType, StopReason
from evergrad_trainer.checkpoint.generations import claim_exactly
from evergrad_trainer.distributed.world import World
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.loop import train
from evergrad_trainer.training.progress import published_step
from evergrad_trainer.worker.channel import WorkerFinish, WorkerGo, WorkerLeave, WorkerLeft
from evergrad_trainer.worker.rank_zero import Writer
from evergrad_trainer.worker.run_records import announce
from evergrad_trainer.worker.session import Session
from evergrad_trainer.worker.states import Life, LifeEnd, StateStatus, WorkerState
from evergrad_trainer.worker.sync_state import settle
from evergrad_trainer.worker.teardown import close_run, save_all
from evergrad_trainer.worker.worlds import Worlds

_LANDING_SECONDS = 0.5
"""Longest time in seconds between the moments at which two ranks observe the end of the same save."""
_MANY_SAVES = 1_000_000
"""A number of saves that no world reaches, so that ranks that save alone under the number of the same world
use different names."""


@dataclass(frozen=True)
class Unwritten:
    """Events of a world's start, which only its rank 0 writes, and the newest finished step at that time."""

    finished_steps: int = -1
    events: tuple[Event, ...] = ()


class Lifecycle:
    """One training process between its first and its last world."""

    def __init__(
        self,
        session: Session,
        machinery: Machinery,
        run: TrainingComponents,
        *,
        worlds: Worlds,
        writer: Writer,
        life: Life,
    ) -> None:
        self.life = life
        self.generation = -1
        self._session = session
        self._machinery = machinery
        self._run = run
        self._worlds = worlds
        self._writer = writer
        self._rank = 0
        self._has_ended_run = False
        self._unwritten = Unwritten()
        self._undecided_at = -1
        """Newest step at which replicas differed and no majority showed which replica is correct."""
        self._do_hosts_differ = False
        """Whether replicas differed again at a step that was trained again, which happens if the hosts'
        processors round differently."""

    @property
    def held_step(self) -> int:
        """Newest finished step whose complete state this process holds, or -1."""
        return (
            self._session.progress.finished_steps
            if self.life.held == StateStatus.WHOLE
            else -1
        )

    def live(self) -> LifeEnd:
        """Take part in one world after another until an order to leave or to finish arrives."""
        while True:
            match self._worlds.await_order(step=self.held_step):
                case WorkerGo() as begin:
                    self._take_part(begin)
                case WorkerLeave() as order:
                    self.life.enter(WorkerState.DEPARTING)
                    end = self._depart(order)
                    self.life.enter(WorkerState.ENDED)
                    return end
                case WorkerFinish() as order:
                    # Release the duties before entering ENDED, so that an error in closing a record is
                    # reported as an error of a running process.
                    self._release()
                    self.life.enter(WorkerState.ENDED)
                    return LifeEnd(order.exit_code)

    def _take_part(self, begin: WorkerGo) -> None:
        """Form a world, agree on the state, train, and leave the world.

        If a peer fails or replicas differ, only this world ends. Raises all other errors, and also these two
        (PeerLostError and DivergedError) if no other world can follow.
        """
        self.life.enter(WorkerState.SETUP)
        self.generation, self._rank = begin.generation, begin.rank
        world: World | None = None
        broken_by: EvergradError | None = None
        try:
            world = self._worlds.meet(begin, self._session.world)
            self._train_in(world, begin)
        except (PeerLostError, DivergedError) as error:
            if not self._worlds.are_replaced:
                raise
            if isinstance(error, DivergedError):
                self._note_divergence(error)
            # Drop the traceback: it would keep collectives and tensors of the old group alive.
            broken_by = error.with_traceback(None)
        self._leave(world, broken_by)

    def _train_in(self, world: World, begin: WorkerGo) -> None:
        session = self._session
        session.membership.move_to(world)
        if self._worlds.are_replaced:
            session.mark("group")
        # Take the duties before anything else can fail, so that an error is also recorded.
        is_new = world.is_main and self._take_duties()
        if self._writer.is_on_duty and not world.is_main:
            # Another process writes from here on, and does not have the events that this process noted as
            # rank 0.
            session.release_events()
        # Events of this world's start wait until the event that announces the start. Events of an earlier
        # world that broke before its start was announced wait with them.
        if session.waiting is None:
            session.waiting = self._take_unwritten()
        self.life.enter(WorkerState.SETTLE)
        # Collectives: after this all ranks hold one state.
        is_fresh = settle(session, self._machinery, self._run, self.life)
        if session.progress.finished_steps > 0:
            # Other processes may have made these steps. An error from here on occurs in code that has worked.
            session.opened.code.note_trained()
        self.life.enter(WorkerState.TRAIN)
        self._worlds.trains(world, session.progress.finished_steps)
        if world.is_main:
            self._announce_start(begin, is_fresh=is_fresh, is_new=is_new)
        else:
            self._keep_unwritten()
        # Collectives, until all ranks agree to leave this world.
        reason = train(self._run)
        if reason != "change":
            self._end_run(world, reason)

    def _announce_start(self, begin: WorkerGo, *, is_fresh: bool, is_new: bool) -> None:
        """Record the start of this world as rank 0.

        ``is_new``: this process did not have the duties of rank 0 before this world.
        """
        # A rank 0 that died before the first step may not have announced the start. Announce it again:
        # without run.json the run could never be started again.
        session = self._session
        is_begun = session.is_announced or session.progress.steps_here > 0
        if is_fresh or not is_begun:
            announce(session, self._machinery)
        if not is_fresh:
            is_new = is_new and is_begun
            self._writer.announce_world(self._machinery, begin, is_new=is_new)

    def _keep_unwritten(self) -> None:
        """Keep the events of this world's start, which rank 0 writes.

        If rank 0 is lost before the first step, the next rank 0 writes them.
        """
        session = self._session
        self._unwritten = Unwritten(
            session.progress.finished_steps, tuple(session.waiting or ())
        )
        session.waiting = None
        self._release()

    def _end_run(self, world: World, reason: StopReason) -> None:
        """Save and close the run. The ranks of this world have agreed that it stops."""
        session = self._session
        self.life.enter(WorkerState.CLOSING)
        # Collective: if one rank failed alone here, the others would wait in their last save.
        is_saved = save_all(self._run)
        takes_file = reason == "stop_file" and world.is_main
        if takes_file and not self._worlds.are_replaced:
            # No other worker needs the stop file, and the next start must train.
            session.directory.consume_stop_file()
        code = close_run(session, self._writer, reason, is_saved=is_saved)
        self._run.observers = session.observers
        self._has_ended_run = True
        step = session.progress.finished_steps
        self._worlds.agreed_end(world, step=step, exit_code=int(code), reason=reason)
        if takes_file and self._worlds.are_replaced:
            # Remove the file last: if this process dies before the end is reported, the other ranks
            # continue, find the file and stop one step later.
            session.directory.consume_stop_file()

    def _take_unwritten(self) -> list[Event]:
        """Return the events of the last world's start if that world trained no step.

        Its rank 0 may not have written them in this case. A duplicate event is harmless; a lost event is not.
        """
        unwritten, self._unwritten = self._unwritten, Unwritten()
        if unwritten.finished_steps != self._session.progress.finished_steps:
            return []
        return list(unwritten.events)

    def _leave(self, world: World | None, broken_by: EvergradError | None) -> None:
        """Leave the group, whether it ended as agreed or broke.

        ``broken_by`` is the error that broke the group, or None if it ended as agreed.
        """
        checkpoints, stepper = self._run.checkpoints, self._run.stepper
        if broken_by is not None:
            self.life.enter(WorkerState.GIVING_UP)
            # Cut the connections, so that healthy peers do not wait for this process, and its operations do
            # not wait for the peers.
            self._worlds.cut()
        else:
            self.life.enter(WorkerState.LEAVING)
            # All ranks have waited for a save, and another rank may have observed its end before this rank.
            checkpoints.abandon(patience_seconds=_LANDING_SECONDS)
        was_stuck = self._worlds.leave(world)
        stepper.heartbeat.rest()
        if was_stuck:
            # Threads of operations that never ended may still write into the old buffers.
            stepper.forget_buffers()
        checkpoints.abandon(patience_seconds=0.0)
        self._move_alone()
        self.life.enter(WorkerState.IDLE)
        self._worlds.left(
            self.generation,
            step=self.held_step,
            error=broken_by,
            is_expected=self._has_ended_run,
        )

    def _depart(self, order: WorkerLeave) -> LifeEnd:
        """Leave the run alone; save first if no other worker holds the state."""
        if not (order.save and self.life.held == StateStatus.WHOLE):
            self._release()
            return LifeEnd(int(ExitCode.STOPPED_SAVED), WorkerLeft(True))
        session, run = self._session, self._run
        if order.is_planned:
            self.generation = max(self.generation + 1, order.generation)
        self._move_alone()
        # An unplanned save uses the number of this worker's last world. Other ranks of that world may also
        # save under this number, so use a range of save numbers for each rank.
        run.checkpoints.enter_world(
            failures=0, saves=0 if order.is_planned else (self._rank + 1) * _MANY_SAVES
        )
        self._take_duties()
        is_saved = False
        try:
            progress = session.progress
            published = published_step(progress, run.checkpoints)
            is_unsaved = published != progress.finished_steps or progress.is_tally_unsaved
            if order.is_planned and is_unsaved:
                claim_exactly(session.directory.checkpoints, self.generation)
            is_saved = save_all(run)
        except EvergradError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = close_run(session, self._writer, "signal", is_saved=is_saved, is_alone=True)
        return LifeEnd(int(code), WorkerLeft(is_saved))

    def _note_divergence(self, error: DivergedError) -> None:
        """Treat the state of suspected ranks as lost.

        They receive the state from other ranks, or all ranks return to the newest checkpoint.
        """
        session = self._session
        world, finished = session.world, session.progress.finished_steps
        is_exact = session.plan.run.training.reproducibility.elastic == "exact"
        if len(error.ranks) == world.size and not is_exact:
            self._do_hosts_differ |= finished <= self._undecided_at
            self._undecided_at = max(self._undecided_at, finished)
        # The gradients of a wrong replica are part of all ranks' sums since then, so exact mode returns to a
        # checkpoint at which all replicas were equal. If the hosts round differently, this would repeat
        # without end, so rank 0's state is transferred to the others.
        if not (self._do_hosts_differ and world.is_main) and (
            is_exact or world.rank in error.ranks
        ):
            self.life.held = StateStatus.DIRTY
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
            session.emit(EventType.WARNING, {"message": str(error)})
        # All peers still run, and a current save contains a state that was compared. Wait for it, because all
        # ranks may return to its checkpoint.
        with contextlib.suppress(PeerLostError):
            self._run.checkpoints.wait()

    def _move_alone(self) -> None:
        membership = self._session.membership
        membership.move_to(
            World(self.generation, rank=0, size=1, device=membership.world.device)
        )

    def _take_duties(self) -> bool:
        is_new = self._writer.take()
        self._run.observers = self._session.observers
        return is_new

    def _release(self) -> None:
        self._writer.release()
        self._run.observers = self._session.observers
