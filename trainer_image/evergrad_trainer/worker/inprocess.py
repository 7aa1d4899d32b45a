"""One training process that outlives its worlds: build once → (meet → settle → train → leave) until the run is over.

Level 1 of the design: survivors of a lost peer keep their process, agree on the newest finished step, feed whoever is behind, and
go on. Only for state that every rank holds whole. The states of such a life are in :mod:`evergrad_trainer.worker.life`.
"""

import contextlib
import functools
import gc
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from evergrad_coordinator.contract import ExitCode
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.checkpoint.manager import CheckpointManager, claim_exactly
from evergrad_trainer.distributed import Place, abandon_world, choose_device, form_world, set_threads
from evergrad_trainer.errors import DivergedError, PeerLostError
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.build import build_observers
from evergrad_trainer.observers.history import last_step
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.observers.relay import Relay
from evergrad_trainer.optim.adamw import set_updates
from evergrad_trainer.records import EventType, StepRecord, StopReason
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.state.replicas import compare_fed, compare_states
from evergrad_trainer.state.transfer import feed, plan_feeding
from evergrad_trainer.training.build import Machinery, build_machinery, rebuild_state
from evergrad_trainer.training.loop import Progress, Run, standing_step, train
from evergrad_trainer.transports import Transport, choose_transport
from evergrad_trainer.worker.announcing import announce, describe_run
from evergrad_trainer.worker.channel import MAX_TEXT, Begin, Broken, Channel, Depart, Ended, Saved, Up, Warm
from evergrad_trainer.worker.ending import finish
from evergrad_trainer.worker.guard import Guard
from evergrad_trainer.worker.life import End, Held, Life, Phase
from evergrad_trainer.worker.opening import build_checkpoints, build_run, has_checkpoints, open_data
from evergrad_trainer.worker.pulse import Pulse
from evergrad_trainer.worker.reporting import AGREED, build_last_words, report_failure
from evergrad_trainer.worker.restoring import restore
from evergrad_trainer.worker.session import Session, SessionPlan
from evergrad_trainer.world import Interrupt, Membership, World

_log = logging.getLogger(__name__)
_LANDING_SECONDS = 0.5
"""From the end of a save, as one rank sees it, until every rank does."""
_MANY_SAVES = 1_000_000
"""More than one world ever makes: ranks that save alone under the number of the same world do not share a name."""


def run_worker(plan: SessionPlan, channel: Channel, pulse: Pulse, *, node: int, local_rank: int) -> int:
    """Serve the run as one of its workers until the supervisor says that it is over; returns the exit code."""
    gc.disable()  # until its first step is done
    directory = RunDirectory(plan.run_directory)
    guard = Guard(channel)
    guard.start()
    worker: _Worker | None = None
    try:
        directory.create()
        setup_logging(directory, rank=local_rank, node=node, on_terminal=False)
        worker = _build(plan, directory, channel, guard, pulse, local_rank)
        channel.send(Warm())
        end = worker.live()
    except Exception as error:  # noqa: BLE001 - the edge of the process: everything becomes a message and an exit code
        session = worker.session if worker is not None else None
        end = _failed(session, error, generation=worker.generation if worker is not None else -1)
    if end.last_words is not None:
        channel.send(end.last_words)
    return end.exit_code


def _build(
    plan: SessionPlan, directory: RunDirectory, channel: Channel, guard: Guard, pulse: Pulse, local_rank: int
) -> "_Worker":
    """Everything that takes time, before anybody waits for this worker."""
    training = plan.run.training
    set_threads(plan.threads)
    device = choose_device(training.runtime.device, local_rank=local_rank)
    choose_transport(device).prepare()
    alone = World(0, rank=0, size=1, device=device)
    membership = Membership(
        alone, is_changing=guard.is_changing, can_wait=guard.can_wait, saves_first=guard.saves_first
    )
    session = Session(
        plan, directory, lambda: False, membership, BaseObserver(), open_data(plan), marks=dict(plan.marks)
    )
    has_weights = not has_checkpoints(directory)
    machinery = build_machinery(training, plan.model, alone, with_weights=has_weights)
    # Weights that were not initialised, since a checkpoint follows, are no state to begin with.
    life = Life(Held.FRESH if has_weights else Held.DIRTY)
    session.mark("model")
    checkpoints = build_checkpoints(session)
    run = build_run(session, machinery, checkpoints)
    run.stepper.pulse = pulse
    run.stepper.warm_up(alone)
    session.mark("warm_up")
    # What was built stays. From here on garbage is collected as it comes, not in one go in the middle of a group.
    gc.freeze()
    gc.enable()
    return _Worker(session, machinery, run, guard, channel, life)


class _Worker:
    """One worker between its first and its last world."""

    def __init__(
        self,
        session: Session,
        machinery: Machinery,
        run: Run,
        guard: Guard,
        channel: Channel,
        life: Life,
    ) -> None:
        self.session = session
        self.generation = -1
        self.life = life
        self._rank = 0
        self._machinery = machinery
        self._checkpoints = run.checkpoints
        self._run = run
        self._guard = guard
        self._channel = channel
        self._has_office = False
        self._has_finished = False
        self._undecided_at = -1
        """Newest step at which replicas differed and no majority could tell which is right."""
        self._do_hosts_differ = False
        """They differed again at a step that was trained again, as hosts do whose processors round differently."""

    @property
    def _progress(self) -> Progress:
        return self.session.progress

    @property
    def _held_step(self) -> int:
        return self._progress.finished_steps if self.life.held == Held.WHOLE else -1

    def live(self) -> End:
        """Take part in one world after the other."""
        while True:
            order = self._guard.await_order(step=self._held_step)
            if isinstance(order, Begin):
                self._take_part(order)
                continue
            self.life.enter(Phase.ENDED)
            if isinstance(order, Depart):
                return self._depart(order)
            self._resign()
            return End(order.exit_code)

    def _take_part(self, begin: Begin) -> None:
        """Meet, settle, train. A lost peer, or replicas that differ, end this world and nothing else; other errors are raised."""
        self.life.enter(Phase.SETUP)
        alone = self.session.world
        transport = choose_transport(alone.device)
        interrupt = Interrupt(transport.give_up)
        self.generation, self._rank = begin.generation, begin.rank
        self._guard.enter(begin.generation, interrupt)
        world: World | None = None
        broken_by: EvergradError | None = None
        timeout = self.session.plan.run.training.runtime.collective_timeout_seconds
        place = Place(begin.generation, begin.rank, begin.size, begin.address, begin.port)
        try:
            world = form_world(
                place,
                device=alone.device,
                transport=transport,
                interrupt=interrupt,
                setup_seconds=begin.setup_seconds,
                timeout_seconds=timeout,
            )
            self._train_in(world, begin)
        except PeerLostError as error:
            broken_by = error
        except DivergedError as error:
            broken_by = error
            self._note_divergence(error)
        # No traceback: it would hold collectives and tensors of the group that is taken down.
        self._leave(world, transport, None if broken_by is None else broken_by.with_traceback(None))

    def _note_divergence(self, error: DivergedError) -> None:
        """Whoever is suspected holds nothing any more: the others feed it, or all go back to the newest checkpoint."""
        world, plan = self.session.world, self.session.plan
        is_exact = plan.run.training.reproducibility.elastic == "exact"
        if len(error.ranks) == world.size and not is_exact:
            self._do_hosts_differ |= self._progress.finished_steps <= self._undecided_at
            self._undecided_at = max(self._undecided_at, self._progress.finished_steps)
        # Gradients of a wrong replica are in everybody's sums since; exact mode goes back to where all were equal. Where hosts
        # round differently that would never end: rank 0 feeds the others.
        if not (self._do_hosts_differ and world.is_main) and (is_exact or world.rank in error.ranks):
            self.life.held = Held.DIRTY
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
            self.session.emit(EventType.WARNING, {"message": str(error)})
        # All peers are there, and a save under way is of a state that was compared: it may be what all go back to.
        with contextlib.suppress(PeerLostError):
            self._checkpoints.wait()

    def _train_in(self, world: World, begin: Begin) -> None:
        session = self.session
        session.membership.move_to(world)
        session.mark("group")
        session.waiting = []
        is_new = world.is_main and not self._has_office
        if world.is_main:
            claim_exactly(session.directory.checkpoints, world.generation)
        if is_new:
            self._take_office()
        self.life.enter(Phase.SETTLE)
        is_fresh = self._settle(world)
        self.life.enter(Phase.TRAIN)
        self._channel.send(Up(world.generation, self._progress.finished_steps))
        if not world.is_main:
            self._resign()
        elif is_fresh:
            announce(session, self._machinery)
        else:
            self._announce_world(begin, is_new=is_new)
        reason = train(self._run)
        if reason != "change":
            self._finish(reason)

    def _settle(self, world: World) -> bool:
        """Bring all ranks to one state; whether it came from the disk (or from nowhere) instead of from a rank."""
        is_comparing = self._run.limits.compare_every is not None
        own = _standing(self._progress, self._checkpoints, held_step=self._held_step)
        rows = world.gather_json({**own, "is_comparing": is_comparing})
        steps = [int(row["step"]) for row in rows]
        newest = max(steps)
        self._checkpoints.enter_world(failures=max(int(row["failures"]) for row in rows))
        is_fresh = newest < 0
        if is_fresh:
            self._begin_again(world)
        else:
            self._feed(world, steps)
            _adopt(self._progress, rows)
            set_updates(self._machinery.optimizer, self._progress.updates)
        self._compare(world, steps, is_whole=bool(rows[0]["is_comparing"]))
        self.life.held = Held.WHOLE
        return is_fresh

    def _compare(self, world: World, steps: list[int], *, is_whole: bool) -> None:
        """Before the first step of a world: what was fed has arrived and, with ``is_whole``, all replicas are equal."""
        state, newest = self._machinery.state(), max(steps)
        if is_whole:
            holders = [rank for rank, step in enumerate(steps) if step == newest >= 0]
            compare_states(state, world, step=self._progress.finished_steps, holders=holders)
        elif feedings := plan_feeding(steps):
            compare_fed(state, world, feedings)

    def _begin_again(self, world: World) -> None:
        """Nobody holds a state: load the newest checkpoint or, without one, begin with the initial weights."""
        session, was_fresh = self.session, self.life.held == Held.FRESH
        # What this process remembers belongs to a state that is gone; a load that is cut short leaves neither.
        vars(self._progress).update(vars(Progress()))
        self.life.held = Held.DIRTY
        are_there = not world.all_agree(not has_checkpoints(session.directory))
        plan = session.plan
        rebuild = (
            None
            if was_fresh
            else functools.partial(rebuild_state, self._machinery, plan.run.training, plan.model)
        )
        restore(session, self._machinery, self._checkpoints, has_checkpoints=are_there, rebuild=rebuild)
        session.mark("checkpoint")

    def _feed(self, world: World, steps: list[int]) -> None:
        """Those with the newest step feed the others, who hold nothing until all of it has arrived."""
        for feeding in plan_feeding(steps):
            if world.rank == feeding.straggler:
                self.life.held = Held.DIRTY
            if world.rank in (feeding.source, feeding.straggler):
                feed(self._machinery.state(), feeding, world)
        # A source may have died with part of it still on its way.
        world.confirm()

    def _take_office(self) -> None:
        """Be the one that writes what exists once a run."""
        session, plan = self.session, self.session.plan
        built = build_observers(
            session.directory,
            run=plan.run.metadata.name,
            training=plan.run.training,
            stream=sys.stdout,
            relay=Relay(self._channel.observe),
        )
        session.observers = built.observers
        self._run.observers = built.observers
        self._has_office = True

    def _resign(self) -> None:
        """Somebody else writes from here on."""
        self.session.waiting = None
        if self._has_office:
            self._has_office = False
            self.session.observers.close()
            self.session.observers = self._run.observers = BaseObserver()

    def _announce_world(self, begin: Begin, *, is_new: bool) -> None:
        """Rank 0 records that training goes on in another world."""
        session, last = self.session, self._progress.last_record
        if is_new:
            session.observers.run_start(replace(describe_run(session, self._machinery), takes_over=True))
        session.release_events()
        if last is not None and last_step(session.directory) < last.step:
            # Whoever should have written this row is gone, or was a step behind.
            session.observers.step_end(last)
        fields: dict[str, Any] = {
            "world_size": session.world.size,
            "from_world_size": last.world_size if last is not None else None,
            "cause": begin.cause,
            "paused_seconds": max(0.0, time.time() - last.time) if last is not None else None,
            "pid": os.getpid(),
        }
        session.emit(EventType.WORLD, fields)

    def _finish(self, reason: StopReason) -> None:
        """The run has come to its end in this world. Only rank 0's word counts; the others wait to be told."""
        is_saved = self._progress.saved_step == self._progress.finished_steps
        self._has_finished = True
        code = finish(self.session, reason, is_saved=is_saved)
        if self.session.world.is_main:
            self._has_office = False
            self.session.observers = self._run.observers = BaseObserver()
            self._channel.send(
                Ended(self.session.world.generation, self._progress.finished_steps, int(code), reason)
            )

    def _leave(self, world: World | None, transport: Transport, broken_by: EvergradError | None) -> None:
        """Out of the group, whatever has become of it. ``broken_by``: what broke it, if it did not end as agreed."""
        self.life.enter(Phase.LEAVING)
        if broken_by is not None:
            # Peers that are well must not wait for this process, nor its own operations for theirs.
            self._guard.cut()
        else:
            # Another rank may have seen the end of a save, for which all have waited, a moment before this one.
            self._checkpoints.leave_world(patience_seconds=_LANDING_SECONDS)
        was_buried = abandon_world(world, transport)
        self._guard.leave()
        self._run.stepper.pulse.rest()
        if was_buried:
            self._run.stepper.forget_buffers()
        self._checkpoints.leave_world()
        device = self.session.world.device
        self.session.membership.move_to(World(self.generation, rank=0, size=1, device=device))
        is_wanted = self._has_finished or self._guard.is_changing_from(self.generation)
        self.life.enter(Phase.IDLE)
        if broken_by is not None or not is_wanted:
            error = broken_by or PeerLostError("a peer left the group")
            self._channel.send(
                Broken(self.generation, self._held_step, str(error)[:MAX_TEXT], error.kind.value)
            )

    def _depart(self, order: Depart) -> End:
        """Leave the run; save first where nobody else holds the state."""
        progress, session = self._progress, self.session
        is_saved = True
        if order.save and self.life.held == Held.WHOLE:
            if order.is_planned:
                self.generation = max(self.generation + 1, order.generation)
            session.membership.move_to(World(self.generation, rank=0, size=1, device=session.world.device))
            self._checkpoints.enter_world(
                failures=0, saves=0 if order.is_planned else (self._rank + 1) * _MANY_SAVES
            )
            self._take_office()
            is_saved = self._save_alone(is_planned=order.is_planned)
            code = ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED
            session.waiting = None
            session.emit(EventType.STOP, {"reason": "signal", "saved": is_saved})
            session.emit(EventType.END, {"exit_code": int(code)})
            print(
                f"stopped after step {progress.finished_steps}; for a report: evergrad report {session.directory.path}",
                flush=True,
            )
        self._resign()
        return End(int(ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED), Saved(is_saved))

    def _save_alone(self, *, is_planned: bool) -> bool:
        """Whether the state is saved now. A save nobody planned has the number of this worker's last world."""
        progress = self._progress
        if standing_step(self._run) == progress.finished_steps or progress.finished_steps == 0:
            return True
        try:
            if is_planned:
                claim_exactly(self.session.directory.checkpoints, self.generation)
            self._checkpoints.save(
                progress.finished_steps, self._run.state(), extra=self._run.extra(), wait=True
            )
        except EvergradError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return standing_step(self._run) == progress.finished_steps


def _standing(progress: Progress, checkpoints: CheckpointManager, *, held_step: int) -> dict[str, Any]:
    """What a rank tells the others when they meet."""
    published = checkpoints.published
    return {
        "step": held_step,
        "failures": checkpoints.failures,
        "standing": max(progress.resumed_step, -1 if published is None else published.step),
        "begun": progress.saved_step,
        "steps_here": progress.steps_here,
        **progress.memory(),
        "record": None if progress.last_record is None else asdict(progress.last_record),
    }


def _adopt(progress: Progress, rows: list[dict[str, Any]]) -> None:
    """Remember what those who hold the newest step remember."""
    newest = max(int(row["step"]) for row in rows)
    sources = [row for row in rows if row["step"] == newest]
    # An evaluation whose end only some have seen is done again: its last row counts.
    source = min(sources, key=lambda row: int(row["evaluated_step"]))
    standing = max(int(row["standing"]) for row in rows)
    begun = max(int(row["begun"]) for row in rows if int(row["step"]) >= 0)
    progress.finished_steps = newest
    progress.remember(source)
    progress.steps_here = max(int(row["steps_here"]) for row in sources)
    if progress.best is not None and progress.best["step"] > standing and progress.best["step"] < newest:
        # Its save ended with the world, and its state is gone: the next better one will be the best.
        progress.best = None
    progress.last_record = None if source["record"] is None else StepRecord(**source["record"])
    progress.resumed_step = progress.saved_step = standing
    progress.is_save_lost = begun > standing


def _failed(session: Session | None, error: Exception, *, generation: int) -> End:
    """Report an error to whoever reads; the supervisor, which hears it, decides what becomes of the run."""
    rank = session.world.rank if session is not None else 0
    code = report_failure(session, error, rank=rank)
    return End(
        int(code),
        build_last_words(session, error, code, generation=generation, is_agreed=isinstance(error, AGREED)),
    )
