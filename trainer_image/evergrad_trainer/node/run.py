"""Puts a node of a typed run together: settings, workers, supervisor."""

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from evergrad_trainer import __version__
from evergrad_trainer.config.identity import config_hash
from evergrad_trainer.inprocess import run_worker
from evergrad_trainer.node.crew import InProcessCrew
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.supervisor import NodeSettings, Supervisor
from evergrad_trainer.node.workers import StartMethod, Worker, start_worker
from evergrad_trainer.observers.history import read_before
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.stages import SessionPlan, open_data

_SETUP_SECONDS = 5.0
"""Longest time for the members of a group, who are all ready, to meet."""


def prepare_process() -> None:
    """Once in a process that will fork workers: what each of them would otherwise pay for."""
    # Every connection to a store looks up the name of its peer's address; a lost answer would cost 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # Imported by the first optimizer step of a process, and by torch's log formatter at the first error: seconds each time.
    import torch._dynamo  # noqa: F401


def fingerprint(plan: SessionPlan) -> dict[str, str]:
    """What must be equal in all nodes of a group."""
    return {"torch": str(torch.__version__), "evergrad": __version__, "configuration": config_hash(plan.run)}


def run_node(plan: SessionPlan, settings: NodeSettings, *, num_workers: int, start_method: StartMethod) -> int:
    """Be a node of a typed run until it is over; returns the exit code."""
    metrics = NodeMetrics(settings.run, settings.node, _exporter(plan, settings))
    return asyncio.run(_serve(plan, settings, metrics, num_workers=num_workers, start_method=start_method))


async def _serve(
    plan: SessionPlan, settings: NodeSettings, metrics: NodeMetrics, *, num_workers: int, start_method: StartMethod
) -> int:
    supervisor = Supervisor(settings, metrics=metrics)
    crew = InProcessCrew(
        _starter(plan, settings, supervisor.adopt, start_method),
        num_workers=num_workers,
        listener=supervisor,
        describe_place=functools.partial(_describe_place, plan),
        setup_seconds=_SETUP_SECONDS,
    )
    return await supervisor.run(crew)


def _starter(
    plan: SessionPlan, settings: NodeSettings, adopt: Callable[[Worker], Worker], method: StartMethod
) -> Callable[[int, int], Worker]:
    # A bar is drawn by rank 0 itself, which needs the terminal.
    captures = "stderr" if sys.stdout.isatty() else "both"

    def start(local_rank: int, serial: int) -> Worker:
        target = functools.partial(run_worker, plan, node=int(settings.node), local_rank=local_rank)
        return adopt(
            start_worker(target, local_rank=local_rank, serial=serial, variables={}, method=method, captures=captures)  # type: ignore[arg-type]
        )

    return start


def _describe_place(plan: SessionPlan, step: int, slot: int) -> str:
    """The samples of a slot, for whoever must find out why a worker died on them."""
    stream = open_data(plan).train
    return ", ".join(stream.describe(sample) for sample in stream.slot(step, slot).samples)


def _exporter(plan: SessionPlan, settings: NodeSettings) -> PrometheusExporter | None:
    metrics = plan.run.training.metrics
    if metrics.port is None:
        return None
    # Nodes of one machine share its ports: each takes the next one.
    port = metrics.port + int(settings.node) if metrics.port and settings.shares_host else metrics.port
    before = read_before(RunDirectory(Path(plan.run_directory)))
    return PrometheusExporter(settings.run, port=port, linger_seconds=metrics.linger_seconds, before=before)
