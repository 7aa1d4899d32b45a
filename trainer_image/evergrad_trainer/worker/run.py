"""The two entry points of a training process: from a launcher, with one world, or from a supervisor, with one
world after another."""

import gc
import os
import sys
import time
from collections.abc import Callable

from evergrad_common.contract import ExitCode
from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.base.device_memory import Sizes
from evergrad_trainer.base.errors import is_agreed
from evergrad_trainer.checkpoint.generations import claim_exactly, claim_generation
from evergrad_trainer.distributed.process_groups import (
    choose_device,
    join_world,
    read_launch,
    set_threads,
    with_generation,
)
from evergrad_trainer.distributed.transports import choose_transport
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models.compilation import should_compile
from evergrad_trainer.models.compile_cache import load_compiled
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.observers.relay import Relay
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.training.build import Machinery, build_machinery
from evergrad_trainer.worker.channel import Channel, Failed, Warm
from evergrad_trainer.worker.error_reports import build_last_words, report_failure
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.rank_zero import Writer
from evergrad_trainer.worker.session import Session, SessionPlan
from evergrad_trainer.worker.setup import (
    build_checkpoints,
    build_run,
    has_checkpoints,
    open_plan,
)
from evergrad_trainer.worker.signals import StopSignals
from evergrad_trainer.worker.start_state import register_state
from evergrad_trainer.worker.states import Life, LifeEnd, StateStatus, WorkerState
from evergrad_trainer.worker.watchdog import Watchdog
from evergrad_trainer.worker.worker_loop import Lifecycle
from evergrad_trainer.worker.worlds import OnlyWorld, SupervisedWorlds

_STOPPED_WELL = (ExitCode.DONE, ExitCode.STOPPED_SAVED)


def run_session(
    plan: SessionPlan,
    *,
    generation: int | None = None,
    relay: Observer | None = None,
    tell: Callable[[Failed], object] = lambda words: None,
    on_memory: Callable[[Sizes], None] | None = None,
) -> int:
    """Train in this process as the launcher's rank, and return the exit code. Errors are reported, not
    raised.

    ``generation``: the number that the coordinator has assigned to this world; by default the next free
    number is claimed. ``relay``: receives rank 0's records instead of a metrics endpoint of this process.
    ``tell``: receives the error that ends this process. ``on_memory``: receives the device memory after each
    step, if the device reports it.
    """
    directory = RunDirectory(plan.run_directory)
    signals = StopSignals(directory.checkpoints)
    signals.install()
    launch = read_launch()
    session: Session | None = None
    logs = None
    try:
        directory.create()
        logs = setup_logging(directory, rank=launch.rank)
        session = open_in_world(plan, directory, signals, generation=generation)
        code = _live_in_world(session, relay, on_memory)
    except Exception as error:  # noqa: BLE001 - the edge of the process: everything becomes a message and an exit code
        failure = report_failure(session, error, rank=launch.rank)
        # Not agreed: the next generation has new processes, which start from a checkpoint and may succeed.
        tell(
            build_last_words(
                session, error, failure, generation=generation or 0, is_agreed=False
            )
        )
        code = int(failure)
    finally:
        signals.uninstall()
    if logs is not None:
        logs.close()
    if session is not None and launch.world_size > 1 and code not in _STOPPED_WELL:
        sys.stdout.flush()
        sys.stderr.flush()
        # Do not destroy the group: this would wait for peers that may be gone.
        os._exit(code)
    return code


def open_in_world(
    plan: SessionPlan,
    directory: RunDirectory,
    signals: StopSignals,
    *,
    generation: int | None,
) -> Session:
    """Join the world and claim the run directory, so that older processes of this run can no longer
    publish."""
    runtime = plan.run.training.runtime
    launch = read_launch()
    set_threads(plan.threads)
    device = choose_device(runtime.device, local_rank=launch.local_rank)
    world = join_world(
        launch, device=device, timeout_seconds=runtime.collective_timeout_seconds
    )
    if world.is_main and generation is not None:
        claim_exactly(directory.checkpoints, generation)
    elif world.is_main:
        generation = claim_generation(directory.checkpoints)
    # The records and checkpoints of all ranks contain the number that rank 0 has claimed.
    world = with_generation(world, int(world.broadcast_json(generation)))
    marks = {**plan.marks, "group": time.time()}
    membership = Membership(world)
    opened = open_plan(plan)
    return Session(
        plan,
        directory,
        lambda: signals.is_requested,
        membership,
        opened.observers,
        opened,
        marks=marks,
    )


def _live_in_world(
    session: Session, relay: Observer | None, on_memory: Callable[[Sizes], None] | None
) -> int:
    """Build the state for the existing world, and train until the run or the world ends."""
    writer = Writer(session, relay=relay)
    if session.world.is_main:
        # Take the duties before anything is built, so that an error in the build is also recorded.
        writer.take()
    # Use rank 0's answer: ranks that list a volume at different times must not differ in whether they
    # initialise weights.
    are_there = bool(session.world.broadcast_json(has_checkpoints(session.directory)))
    machinery = build_state(session, with_weights=not are_there)
    session.mark("model")
    checkpoints = build_checkpoints(session, machinery)
    life = Life(StateStatus.DIRTY if are_there else StateStatus.FRESH)
    try:
        run = build_run(session, machinery, checkpoints)
        run.stepper.on_memory = on_memory
        worlds = OnlyWorld(session.world)
        end = Lifecycle(
            session, machinery, run, worlds=worlds, writer=writer, life=life
        ).live()
        checkpoints.close()
        session.opened.observers.close()
    except BaseException:
        if not life.is_over:
            life.enter(WorkerState.FAILED)
        checkpoints.abandon()
        raise
    return end.exit_code


def build_state(session: Session, *, with_weights: bool) -> Machinery:
    """Build the objects that hold the run's state, and register all of it.

    ``with_weights=False``: a checkpoint is loaded afterwards.
    """
    plan, device = session.plan, session.world.device
    # Load compiled kernels before anything is compiled.
    if should_compile(plan.run.training.runtime, device):
        session.compiled_bytes = load_compiled(session.directory.compiled, device)
    machinery = build_machinery(
        plan.run.training,
        session.opened,
        plan.model,
        session.world,
        with_weights=with_weights,
    )
    register_state(session, machinery)
    return machinery


def run_worker(
    plan: SessionPlan,
    channel: Channel,
    heartbeat: WorkerHeartbeat,
    *,
    node: int,
    local_rank: int,
) -> int:
    """Serve the run as one of its workers until the supervisor ends it, and return the exit code."""
    gc.disable()  # until its first step is done
    directory = RunDirectory(plan.run_directory)
    watchdog = Watchdog(channel)
    watchdog.start()
    session: Session | None = None
    lifecycle: Lifecycle | None = None
    try:
        directory.create()
        setup_logging(directory, rank=local_rank, node=node, on_terminal=False)
        set_threads(plan.threads)
        device = choose_device(plan.run.training.runtime.device, local_rank=local_rank)
        choose_transport(device).prepare()
        membership = Membership(
            World(0, rank=0, size=1, device=device),
            is_changing=watchdog.is_changing,
            can_wait=watchdog.can_wait,
            saves_first=watchdog.saves_first,
        )
        # Ignore signals here: the supervisor receives them, and orders its workers to stop or leave.
        opened = open_plan(plan)
        session = Session(
            plan,
            directory,
            lambda: False,
            membership,
            opened.observers,
            opened,
            marks=dict(plan.marks),
        )
        lifecycle = _build_alone(session, channel, watchdog, heartbeat)
        channel.send(Warm())
        end = lifecycle.live()
        session.opened.observers.close()
    except Exception as error:  # noqa: BLE001 - the edge of the process: everything becomes a message and an exit code
        generation = -1
        if lifecycle is not None:
            generation = lifecycle.generation
            if not lifecycle.life.is_over:
                lifecycle.life.enter(WorkerState.FAILED)
        end = report_end(session, error, generation=generation)
    if end.last_words is not None:
        channel.send(end.last_words)
    return end.exit_code


def _build_alone(
    session: Session, channel: Channel, watchdog: Watchdog, heartbeat: WorkerHeartbeat
) -> Lifecycle:
    """Do all slow work before other processes wait for this worker."""
    has_weights = not has_checkpoints(session.directory)
    # Do this first: the supervisor kills a worker whose start reads nothing for too long.
    MOVED.report_to(heartbeat.move)
    machinery = build_state(session, with_weights=has_weights)
    session.mark("model")
    run = build_run(session, machinery, build_checkpoints(session, machinery))
    run.stepper.heartbeat, run.stepper.on_memory = heartbeat, heartbeat.hold
    run.stepper.warm_up(session.world)
    session.mark("warm_up")
    # The built objects remain. From here on, garbage is collected in small parts instead of in one long
    # collection while the worker is in a group.
    gc.freeze()
    gc.enable()
    timeout = session.plan.run.training.runtime.collective_timeout_seconds
    return Lifecycle(
        session,
        machinery,
        run,
        worlds=SupervisedWorlds(
            watchdog, channel, session.directory, timeout_seconds=timeout
        ),
        writer=Writer(session, relay=Relay(channel.observe)),
        # If a checkpoint exists, the weights were not initialised, so they are not a state to begin with.
        life=Life(StateStatus.FRESH if has_weights else StateStatus.DIRTY),
    )


def report_end(session: Session | None, error: Exception, *, generation: int) -> LifeEnd:
    """Report an error and return the end of the worker. The supervisor decides how the run continues."""
    rank = session.world.rank if session is not None else 0
    code = report_failure(session, error, rank=rank)
    words = build_last_words(
        session, error, code, generation=generation, is_agreed=is_agreed(error)
    )
    return LifeEnd(int(code), words)
