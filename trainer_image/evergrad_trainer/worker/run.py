"""One training process whose world lasts as long as itself: join → claim → build → restore → train → finish."""

import os
import sys
import time
from collections.abc import Callable

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.checkpoint.manager import claim_exactly, claim_generation
from evergrad_trainer.distributed import (
    choose_device,
    join_world,
    leave_world,
    read_launch,
    set_threads,
    with_generation,
)
from evergrad_trainer.observers.base import BaseObserver, Observer
from evergrad_trainer.observers.build import build_observers
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.training.build import build_machinery
from evergrad_trainer.training.loop import train
from evergrad_trainer.worker.announcing import announce
from evergrad_trainer.worker.channel import Failed
from evergrad_trainer.worker.ending import finish
from evergrad_trainer.worker.opening import build_checkpoints, build_run, has_checkpoints, open_data
from evergrad_trainer.worker.reporting import build_last_words, report_failure
from evergrad_trainer.worker.restoring import restore
from evergrad_trainer.worker.session import Session, SessionPlan
from evergrad_trainer.worker.signals import StopSignals
from evergrad_trainer.world import Membership


def run_session(
    plan: SessionPlan,
    *,
    generation: int | None = None,
    relay: Observer | None = None,
    tell: Callable[[Failed], object] = lambda words: None,
) -> int:
    """Train in this process as the launcher's rank says; returns the exit code. Wrong input is reported, not raised.

    ``generation``: the number a coordinator has given this world; without one the next free number is claimed. ``relay``: gets
    rank 0's records in the place of an endpoint of its own. ``tell``: gets the error that ends this process.
    """
    signals = StopSignals()
    signals.install()
    directory = RunDirectory(plan.run_directory)
    session: Session | None = None
    logs = None
    try:
        directory.create()
        logs = setup_logging(directory, rank=read_launch().rank)
        session = _open(plan, directory, signals, generation=generation, relay=relay)
        code = _run(session)
    except Exception as error:  # noqa: BLE001 - the edge of the process: everything becomes a message and an exit code
        code = report_failure(session, error, rank=read_launch().rank)
        # Never agreed: the next generation has other processes, which start from a checkpoint and may do better.
        tell(build_last_words(session, error, code, generation=generation or 0, is_agreed=False))
    finally:
        signals.uninstall()
    if logs is not None:
        logs.close()
    if session is not None and session.world.size > 1 and code not in (ExitCode.DONE, ExitCode.STOPPED_SAVED):
        sys.stdout.flush()
        sys.stderr.flush()
        # Peers may be gone: destroying the group would wait for them.
        os._exit(code)
    return int(code)


def _open(
    plan: SessionPlan,
    directory: RunDirectory,
    signals: StopSignals,
    *,
    generation: int | None,
    relay: Observer | None,
) -> Session:
    """Join the world and claim the directory: from here on an older process of this run cannot publish any more."""
    training = plan.run.training
    launch = read_launch()
    set_threads(plan.threads)
    device = choose_device(training.runtime.device, local_rank=launch.local_rank)
    world = join_world(launch, device=device, timeout_seconds=training.runtime.collective_timeout_seconds)
    if world.is_main and generation is not None:
        claim_exactly(directory.checkpoints, generation)
    elif world.is_main:
        generation = claim_generation(directory.checkpoints)
    world = with_generation(world, int(world.broadcast_json(generation)))
    marks = dict(plan.marks)
    marks["group"] = time.time()
    observers: Observer = BaseObserver()
    address = None
    if world.is_main:
        built = build_observers(
            directory,
            run=plan.run.metadata.name,
            training=training,
            stream=sys.stdout,
            should_stop=lambda: signals.is_requested,
            relay=relay,
        )
        observers, address = built.observers, built.metrics_address
    return Session(
        plan,
        directory,
        lambda: signals.is_requested,
        Membership(world),
        observers,
        open_data(plan),
        marks=marks,
        metrics_address=address,
    )


def _run(session: Session) -> ExitCode:
    """Build, restore, train and finish. Errors leave through ``_fail``."""
    plan, training = session.plan, session.plan.run.training
    are_there = bool(session.world.broadcast_json(has_checkpoints(session.directory)))
    machinery = build_machinery(training, plan.model, session.world, with_weights=not are_there)
    session.mark("model")
    checkpoints = build_checkpoints(session)
    try:
        restore(session, machinery, checkpoints, has_checkpoints=are_there)
        session.mark("checkpoint")
        announce(session, machinery)
        run = build_run(session, machinery, checkpoints)
        reason = train(run)
        is_saved = session.progress.saved_step == session.progress.finished_steps
        checkpoints.close()
    except BaseException:
        checkpoints.abandon()
        raise
    code = finish(session, reason, is_saved=is_saved)
    leave_world(session.world)
    return code
