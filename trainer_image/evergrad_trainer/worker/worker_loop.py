"""Drives one training process through the states of :mod:`evergrad_trainer.worker.states`: build once, then
one world or many."""

import contextlib
import sys
from dataclasses import dataclass

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.base.errors import DivergedError, PeerLostError
from evergrad_trainer.base.records import Event, EventType
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
"""From the end of a save, as one rank sees it, until every rank does."""
_MANY_SAVES = 1_000_000
"""More than one world ever makes: ranks that save alone under the number of the same world do not share a
name."""


@dataclass(frozen=True)
class Unwritten:
    """Events of a world's start that only its rank 0 writes, and the newest step finished by then."""

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
        """Newest step at which replicas differed and no majority could tell which is right."""
        self._do_hosts_differ = False
        """They differed again at a step that was trained again, as hosts do whose processors round
        differently."""

    @property
    def held_step(self) -> int:
        """Newest finished step whose state this process holds whole; -1 for none."""
        return (
            self._session.progress.finished_steps
            if self.life.held == StateStatus.WHOLE
            else -1
        )

    def live(self) -> LifeEnd:
        """Take part in one world after the other, until an order ends it."""
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
                    # First: a record that cannot be closed is an error of a life that is not over yet.
                    self._release()
                    self.life.enter(WorkerState.ENDED)
                    return LifeEnd(order.exit_code)

    def _take_part(self, begin: WorkerGo) -> None:
        """Meet, settle, train, leave. A failed peer, or replicas that differ, end this world alone.

        Other errors are raised; those two as well where no other world follows.
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
            # No traceback: it would hold collectives and tensors of the group that is taken down.
            broken_by = error.with_traceback(None)
        self._leave(world, broken_by)

    def _train_in(self, world: World, begin: WorkerGo) -> None:
        session = self._session
        session.membership.move_to(world)
        if self._worlds.are_replaced:
            session.mark("group")
        # Before anything else can fail: the error has to be written down, too.
        is_new = world.is_main and self._take_duties()
        if self._writer.is_on_duty and not world.is_main:
            # Another process writes from here on, and does not have what this one noted as rank 0.
            session.release_events()
        # Events of this world's start wait until the one that says that it has begun, and with them those of
        # a world that broke before it had.
        if session.waiting is None:
            session.waiting = self._take_unwritten()
        self.life.enter(WorkerState.SETTLE)
        # Collectives: after this all ranks hold one state.
        is_fresh = settle(session, self._machinery, self._run, self.life)
        if session.progress.finished_steps > 0:
            # Made by others, perhaps: what fails from here on works elsewhere.
            session.opened.code.note_trained()
        self.life.enter(WorkerState.TRAIN)
        self._worlds.trains(world, session.progress.finished_steps)
        if not world.is_main:
            # Rank 0 writes what the start of this world has to say. If it is lost before the first step, the
            # next rank 0 does.
            self._unwritten = Unwritten(
                session.progress.finished_steps, tuple(session.waiting or ())
            )
            session.waiting = None
            self._release()
        else:
            # It is not known whether a rank 0 that died before the first step had announced the start.
            # Without run.json the run could never be started again.
            is_begun = session.is_announced or session.progress.steps_here > 0
            if is_fresh or not is_begun:
                announce(session, self._machinery)
            if not is_fresh:
                is_new = is_new and is_begun
                self._writer.announce_world(self._machinery, begin, is_new=is_new)
        # Collectives, until all ranks agree to leave this world.
        reason = train(self._run)
        if reason != "change":
            # The ranks of this world have agreed that the run stops.
            self.life.enter(WorkerState.CLOSING)
            # Collective: a rank that failed alone here would leave the others in their last save.
            is_saved = save_all(self._run)
            takes_file = reason == "stop_file" and world.is_main
            if takes_file and not self._worlds.are_replaced:
                # There is no other worker to stop, and the next start is to train.
                session.directory.consume_stop_file()
            code = close_run(session, self._writer, reason, is_saved=is_saved)
            self._run.observers = session.observers
            self._has_ended_run = True
            step = session.progress.finished_steps
            self._worlds.agreed_end(world, step=step, exit_code=int(code), reason=reason)
            if takes_file and self._worlds.are_replaced:
                # Last: where this process dies before others know of the end, they continue, see the file and
                # stop a step later.
                session.directory.consume_stop_file()

    def _take_unwritten(self) -> list[Event]:
        """Events of the last world's start, if it trained no step, so that its rank 0 may not have written
        them. An event that is written twice does no harm, and one that is lost does."""
        unwritten, self._unwritten = self._unwritten, Unwritten()
        if unwritten.finished_steps != self._session.progress.finished_steps:
            return []
        return list(unwritten.events)

    def _leave(self, world: World | None, broken_by: EvergradError | None) -> None:
        """Out of the group, whatever has become of it.

        ``broken_by``: what broke it, if it did not end as agreed.
        """
        checkpoints, stepper = self._run.checkpoints, self._run.stepper
        if broken_by is not None:
            self.life.enter(WorkerState.GIVING_UP)
            # Peers that are well must not wait for this process, nor its own operations for theirs.
            self._worlds.cut()
        else:
            self.life.enter(WorkerState.LEAVING)
            # Another rank may have seen the end of a save, for which all have waited, a moment before this
            # one.
            checkpoints.abandon(patience_seconds=_LANDING_SECONDS)
        was_stuck = self._worlds.leave(world)
        stepper.heartbeat.rest()
        if was_stuck:
            # Threads of operations that never ended may still write into them.
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
        # A save that was not planned has the number of this worker's last world, whose other ranks may do the
        # same.
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
        """Take the state of suspected ranks for lost.

        They get it from the others, or all go back to the newest checkpoint.
        """
        session = self._session
        world, finished = session.world, session.progress.finished_steps
        is_exact = session.plan.run.training.reproducibility.elastic == "exact"
        if len(error.ranks) == world.size and not is_exact:
            self._do_hosts_differ |= finished <= self._undecided_at
            self._undecided_at = max(self._undecided_at, finished)
        # Gradients of a wrong replica are in everybody's sums since; exact mode goes back to where all were
        # equal. Where hosts round differently that would never end: rank 0's state is
        # transferred to the others.
        if not (self._do_hosts_differ and world.is_main) and (
            is_exact or world.rank in error.ranks
        ):
            self.life.held = StateStatus.DIRTY
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
            session.emit(EventType.WARNING, {"message": str(error)})
        # All peers are there, and a save under way is of a state that was compared: it may be what all go
        # back to.
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
