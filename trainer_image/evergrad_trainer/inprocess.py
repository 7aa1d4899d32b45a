"""One training process that outlives its worlds: build once → (meet → settle → train → leave) until the run is over.

Level 1 of the design: survivors of a lost peer keep their process, agree on the newest finished step, feed whoever is behind, and
go on. Only for state that every rank holds whole.
"""

import gc
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.build import Machinery, build_machinery
from evergrad_trainer.checkpoint.manager import CheckpointManager, claim_exactly
from evergrad_trainer.distributed import Place, abandon_world, choose_device, form_world, set_threads, stuck_operations_end
from evergrad_trainer.elastic.channel import MAX_TEXT, Begin, Broken, Channel, Depart, Ended, Failed, Finish, Saved, Up, Warm
from evergrad_trainer.elastic.guard import Guard
from evergrad_trainer.elastic.pulse import Pulse
from evergrad_trainer.elastic.transfer import feed, plan_feeding
from evergrad_trainer.errors import EvergradError, InputError, PeerLostError
from evergrad_trainer.loop import Progress, Run, standing_step, train
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.build import build_observers
from evergrad_trainer.observers.history import last_step
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.observers.relay import Relay
from evergrad_trainer.optim.adamw import set_updates
from evergrad_trainer.records import EventType, StepRecord, StopReason
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.stages import (
    AGREED,
    Session,
    SessionPlan,
    announce,
    build_checkpoints,
    build_run,
    describe_run,
    finish,
    has_checkpoints,
    open_data,
    report_failure,
    restore,
)
from evergrad_trainer.world import Interrupt, Membership, World

_log = logging.getLogger(__name__)
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
        return worker.live()
    except Exception as error:  # noqa: BLE001 - the edge of the process: everything becomes a message and an exit code
        session = worker.session if worker is not None else None
        return _fail(session, error, channel, worker.generation if worker is not None else -1)


def _build(
    plan: SessionPlan, directory: RunDirectory, channel: Channel, guard: Guard, pulse: Pulse, local_rank: int
) -> "_Worker":
    """Everything that takes time, before anybody waits for this worker."""
    training = plan.run.training
    set_threads(plan.threads)
    alone = World(0, rank=0, size=1, device=choose_device(training.runtime.device, local_rank=local_rank))
    membership = Membership(alone, is_changing=guard.is_changing)
    session = Session(plan, directory, lambda: False, membership, BaseObserver(), open_data(plan), marks=dict(plan.marks))
    machinery = build_machinery(training, plan.model, alone, with_weights=not has_checkpoints(directory))
    session.mark("model")
    checkpoints = build_checkpoints(session)
    run = build_run(session, machinery, checkpoints)
    run.stepper.pulse = pulse
    run.stepper.warm_up(alone)
    session.mark("warm_up")
    # What was built stays. From here on garbage is collected as it comes, not in one go in the middle of a group.
    gc.freeze()
    gc.enable()
    return _Worker(session, machinery, checkpoints, run, guard, channel)


class _Worker:
    """One worker between its first and its last world. ``_is_whole``: it holds the state after ``progress.finished_steps``."""

    def __init__(
        self,
        session: Session,
        machinery: Machinery,
        checkpoints: CheckpointManager,
        run: Run,
        guard: Guard,
        channel: Channel,
    ) -> None:
        self.session = session
        self.generation = -1
        self._rank = 0
        self._machinery = machinery
        self._checkpoints = checkpoints
        self._run = run
        self._guard = guard
        self._channel = channel
        self._is_whole = False
        self._has_office = False
        self._has_finished = False

    @property
    def _progress(self) -> Progress:
        return self.session.progress

    @property
    def _held_step(self) -> int:
        return self._progress.finished_steps if self._is_whole else -1

    def live(self) -> int:
        """Take part in one world after the other."""
        while True:
            order = self._guard.await_order(step=self._held_step)
            if isinstance(order, Finish):
                self._resign()
                return order.exit_code
            if isinstance(order, Depart):
                return self._depart(order)
            self._take_part(order)

    def _take_part(self, begin: Begin) -> None:
        """Meet, settle, train. A lost peer ends this world and nothing else; every other error is raised."""
        interrupt = Interrupt(stuck_operations_end(self.session.world.device))
        self.generation, self._rank = begin.generation, begin.rank
        self._guard.enter(begin.generation, interrupt)
        world: World | None = None
        text: str | None = None
        alone = self.session.world
        timeout = self.session.plan.run.training.runtime.collective_timeout_seconds
        place = Place(begin.generation, begin.rank, begin.size, begin.address, begin.port)
        try:
            world = form_world(
                place, device=alone.device, interrupt=interrupt, setup_seconds=begin.setup_seconds, timeout_seconds=timeout
            )
            self._train_in(world, begin)
        except PeerLostError as error:
            text = str(error)
        self._leave(world, text)

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
        is_fresh = self._settle(world)
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
        progress = self._progress
        rows = world.gather_json(_standing(progress, self._checkpoints, held_step=self._held_step))
        steps = [int(row["step"]) for row in rows]
        self._checkpoints.enter_world(failures=max(int(row["failures"]) for row in rows))
        if max(steps) < 0:
            are_there = not world.all_agree(not has_checkpoints(self.session.directory))
            restore(self.session, self._machinery, self._checkpoints, has_checkpoints=are_there)
            self.session.mark("checkpoint")
            self._is_whole = True
            return True
        for feeding in plan_feeding(steps):
            if world.rank == feeding.straggler:
                self._is_whole = False
            if world.rank in (feeding.source, feeding.straggler):
                feed(self._machinery.state(), feeding, world)
        _adopt(progress, rows)
        set_updates(self._machinery.optimizer, progress.updates)
        self._is_whole = True
        return False

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
            self._channel.send(Ended(self.session.world.generation, self._progress.finished_steps, int(code), reason))

    def _leave(self, world: World | None, text: str | None) -> None:
        """Out of the group, whatever has become of it. ``text``: what broke it, if it did not end as agreed."""
        if text is not None:
            # Peers that are well must not wait for this process, nor its own operations for theirs.
            self._guard.cut()
        was_buried = abandon_world(world)
        self._guard.leave()
        self._run.stepper.pulse.rest()
        if was_buried:
            self._run.stepper.forget_buffers()
        self._checkpoints.leave_world()
        device = self.session.world.device
        self.session.membership.move_to(World(self.generation, rank=0, size=1, device=device))
        is_wanted = self._has_finished or self._guard.is_changing_from(self.generation)
        if text is not None or not is_wanted:
            self._channel.send(Broken(self.generation, self._held_step, (text or "a peer left the group")[:MAX_TEXT]))

    def _depart(self, order: Depart) -> int:
        """Leave the run; save first where nobody else holds the state."""
        progress, session = self._progress, self.session
        is_saved = True
        if order.save and self._is_whole:
            if order.is_planned:
                self.generation = max(self.generation + 1, order.generation)
            session.membership.move_to(World(self.generation, rank=0, size=1, device=session.world.device))
            self._checkpoints.enter_world(failures=0, saves=0 if order.is_planned else (self._rank + 1) * _MANY_SAVES)
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
        self._channel.send(Saved(is_saved))
        return int(ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED)

    def _save_alone(self, *, is_planned: bool) -> bool:
        """Whether the state is saved now. A save nobody planned has the number of this worker's last world."""
        progress = self._progress
        if standing_step(self._run) == progress.finished_steps or progress.finished_steps == 0:
            return True
        extra = progress.extra(self._run.stream.cursor(progress.finished_steps))
        try:
            if is_planned:
                claim_exactly(self.session.directory.checkpoints, self.generation)
            self._checkpoints.save(progress.finished_steps, self._run.state(), extra=extra, wait=True)
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


def _fail(session: Session | None, error: Exception, channel: Channel, generation: int) -> int:
    """Report an error to whoever reads, and to the supervisor, which decides what becomes of the run."""
    rank = session.world.rank if session is not None else 0
    code = report_failure(session, error, rank=rank)
    notes = "\n".join(getattr(error, "__notes__", ()))
    text = f"{error}\n{notes}".strip()[:MAX_TEXT]
    step = session.progress.finished_steps if session is not None else -1
    channel.send(
        Failed(generation, step, int(code), type(error).__name__, text, isinstance(error, InputError), isinstance(error, AGREED))
    )
    return int(code)
