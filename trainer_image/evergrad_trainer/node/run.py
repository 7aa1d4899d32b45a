"""Assembles a node from settings, workers and supervisor, and runs it."""

import asyncio
import dataclasses
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal

import torch

from evergrad_common.addresses import join_address
from evergrad_coordinator.edge.heartbeat_process import Heartbeat
from evergrad_coordinator.protocol import Beat
from evergrad_manifest.training import Metrics
from evergrad_trainer.base import torch_private
from evergrad_trainer.node.fresh import FreshWorkers, Stops
from evergrad_trainer.node.log import speaking_as, warn_of_silence
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.stragglers import FINISH_SECONDS, Stragglers
from evergrad_trainer.node.supervisor import Supervisor
from evergrad_trainer.node.worker_group import InProcessWorkers, WorkerBounds, WorkerGroup
from evergrad_trainer.node.workers import (
    Captures,
    StartMethod,
    Worker,
    WorkerOrder,
    start_worker,
)
from evergrad_trainer.observers.history import read_before
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.observers.relay import Relay
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker.channel import Channel
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.run import run_session, run_worker
from evergrad_trainer.worker.session import SessionPlan
from evergrad_trainer.worker.setup import open_plan

_log = logging.getLogger(__name__)
_SETUP_SECONDS = 5.0
"""Longest time in which the members of a group, which are all ready, must connect to each other."""


def prepare_process() -> None:
    """Do once, before workers are forked, the slow setup that each worker would otherwise repeat."""
    # Each connection to a store looks up the name of the peer's address; a lost reply would cost 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    torch_private.import_slow_parts()


def choose_start_method(
    wanted: Literal["auto", "fork", "forkserver", "spawn"], *, num_accelerators: int
) -> StartMethod:
    """Return how workers are started.

    ``auto`` selects fork, the fastest method, unless a forked process could not use the accelerators.
    """
    if wanted != "auto":
        return wanted
    if num_accelerators and torch.cuda.is_initialized():
        _log.warning(
            "workers are spawned, not forked: this process has touched an accelerator"
        )
        return "spawn"
    if num_accelerators == 0:
        return "fork"
    # Try this in a child: drivers differ, and a worker that fails in its first kernel gives no useful error.
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda").item()
        except Exception:  # noqa: BLE001 - any error is the answer
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        _log.warning(
            "workers are spawned, not forked: a forked process cannot use the accelerator here"
        )
        return "spawn"
    return "fork"


def started_later(plan: SessionPlan) -> SessionPlan:
    """Return the plan for a process that starts after the command began: its start-up time is its own."""
    return dataclasses.replace(plan, process_start=time.time(), marks={})


def run_node(
    plan: SessionPlan,
    settings: NodeSettings,
    *,
    num_workers: int,
    start_method: StartMethod,
) -> int:
    """Run a node of a typed run until the run is over, and return the exit code."""
    metrics = build_metrics(plan.run.training.metrics, settings)
    serve_workers = _serve_in_process if settings.recovery == "in-process" else _serve_fresh
    with speaking_as(settings.node):
        return asyncio.run(
            serve_workers(
                plan, settings, metrics, num_workers=num_workers, start_method=start_method
            )
        )


async def serve(
    supervisor: Supervisor, worker_group: WorkerGroup, settings: NodeSettings
) -> int:
    """Run the supervisor to its end; log a warning every 10 s while no coordinator responds."""
    address = join_address(settings.coordinator_host, settings.coordinator_port)

    # Start before anything is forked: the heartbeat continues while this process imports, forks and waits for
    # disks.
    beat = Beat(
        settings.run,
        settings.node,
        supervisor.conversation.incarnation,
        token=settings.token,
    )
    heartbeat = Heartbeat(settings.coordinator_host, settings.coordinator_port, beat)
    heartbeat.start()
    # Cancel both tasks with the supervisor, because neither ends by itself.
    watches = [
        heartbeat.keep(),
        warn_of_silence(
            lambda: supervisor.conversation.seconds_since_contact, address=address
        ),
    ]
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        return await supervisor.run(worker_group)
    finally:
        for task in tasks:
            task.cancel()
        heartbeat.close()


async def _serve_in_process(
    plan: SessionPlan,
    settings: NodeSettings,
    metrics: NodeMetrics,
    *,
    num_workers: int,
    start_method: StartMethod,
) -> int:
    supervisor = Supervisor(settings, metrics=metrics)
    captures = _captures(settings)
    stream = open_plan(plan).data.train

    def describe_place(step: int, slot: int) -> str:
        # A user must be able to find the samples at which a worker died.
        return ", ".join(
            stream.describe(sample) for sample in stream.slot(step, slot).samples
        )

    def start(local_rank: int, serial: int) -> Worker:
        # Replacement workers were not part of the command's start.
        own = plan if serial <= num_workers else started_later(plan)
        target = functools.partial(
            run_worker, own, node=int(settings.node), local_rank=local_rank
        )
        order = WorkerOrder(
            local_rank, serial, start_method, captures, f"{settings.node}.{local_rank}"
        )
        return supervisor.adopt(start_worker(target, order, variables={}))

    worker_group = InProcessWorkers(
        start,
        num_workers=num_workers,
        report=supervisor.take,
        describe_place=describe_place,
        bounds=WorkerBounds(
            _SETUP_SECONDS, float(plan.run.training.runtime.collective_timeout_seconds)
        ),
    )
    return await serve(supervisor, worker_group, settings)


async def _serve_fresh(
    plan: SessionPlan,
    settings: NodeSettings,
    metrics: NodeMetrics,
    *,
    num_workers: int,
    start_method: StartMethod,
) -> int:
    supervisor = Supervisor(settings, metrics=metrics)
    captures = _captures(settings)

    def start(local_rank: int, serial: int, variables: Mapping[str, str]) -> Worker:
        # The worker writes under this generation; a newer generation fences it.
        target = functools.partial(
            _run_fresh, plan, generation=supervisor.conversation.known_generation
        )
        order = WorkerOrder(
            local_rank, serial, start_method, captures, f"{settings.node}.{local_rank}"
        )
        return supervisor.adopt(start_worker(target, order, variables=variables))

    worker_group = FreshWorkers(
        start,
        num_workers=num_workers,
        report=supervisor.take,
        stops=Stops(lambda generation: True, settings.grace_seconds),
        call_later=asyncio.get_running_loop().call_later,
        stragglers=Stragglers(limit_seconds=FINISH_SECONDS, end=supervisor.end_hung),
    )
    return await serve(supervisor, worker_group, settings)


def _run_fresh(
    plan: SessionPlan, channel: Channel, heartbeat: WorkerHeartbeat, *, generation: int
) -> int:
    """Run one worker of a typed run. Its world lasts as long as its process."""
    gc.disable()  # until its first step is done
    return run_session(
        plan,
        generation=generation,
        relay=Relay(channel.observe),
        tell=channel.send,
        on_memory=heartbeat.hold,
    )


def _captures(settings: NodeSettings) -> Captures:
    """Return which output goes into a pipe. Rank 0 draws a progress bar itself and needs the terminal; the
    only node of a command prints to the command's own stdout."""
    return "stderr" if settings.is_only_node or sys.stdout.isatty() else "both"


def build_metrics(metrics: Metrics, settings: NodeSettings) -> NodeMetrics:
    """Build the node's metrics, with an endpoint if the run requests one."""
    hurry = threading.Event()
    if metrics.port is None:
        return NodeMetrics(settings.run, settings.node, hurry=hurry)

    # The nodes of one machine share its ports, so each node uses the next port.
    shift = int(settings.node) if metrics.port and settings.shares_host else 0
    exporter = PrometheusExporter(
        settings.run,
        port=metrics.port + shift,
        linger_seconds=metrics.linger_seconds,
        before=read_before(RunDirectory(settings.run_directory)),
        should_stop=hurry.is_set,
    )
    return NodeMetrics(settings.run, settings.node, exporter, hurry=hurry)
