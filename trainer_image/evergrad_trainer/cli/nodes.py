"""``evergrad run --nodes`` and its coordinator: several elastic nodes on this machine."""

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad_trainer.checkpoint.generations import newest_generation
from evergrad_trainer.config.loader import LoadedManifest
from evergrad_trainer.config.manifest import TrainingRun
from evergrad_trainer.node.local import CoordinatorSettings, LocalCoordinator, LocalNodes, run_local
from evergrad_trainer.node.run import fingerprint, prepare_process, run_node
from evergrad_trainer.node.supervisor import NodeSettings
from evergrad_trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from evergrad_trainer.stages import SessionPlan

COORDINATOR = "coordinator"
"""Folder of a local coordinator's files in a run directory."""


def run_nodes(args: argparse.Namespace, plan: "SessionPlan", *, num_workers: int) -> int:
    """Train a typed run on ``args.nodes`` nodes of this machine; returns the exit code."""
    prepare_process()
    coordinator = LocalCoordinator(coordinator_settings(plan.run, Path(plan.run_directory), num_nodes=args.nodes))
    nodes = LocalNodes(functools.partial(_be_node, plan, coordinator, num_workers), args.nodes)
    return run_local(coordinator, nodes)


def run_script(args: argparse.Namespace, loaded: LoadedManifest) -> int:
    """Run a script's nodes on this machine; returns the exit code."""
    raise NotImplementedError


def coordinator_settings(run: TrainingRun, directory: Path, *, num_nodes: int) -> CoordinatorSettings:
    """A local coordinator for ``num_nodes`` nodes, to which more may be added by hand up to the manifest's maximum."""
    bounds = run.spec.nodes
    most = max(num_nodes, bounds.max or bounds.min)
    state = directory / COORDINATOR
    state.mkdir(parents=True, exist_ok=True)
    checkpoints = RunDirectory(directory).checkpoints
    return CoordinatorSettings(
        run=run.metadata.name,
        min_nodes=min(bounds.min, num_nodes),
        max_nodes=most,
        expect=num_nodes,
        recovery="in-process",
        state=state / "generation",
        first_generation=newest_generation(checkpoints) if (checkpoints / "gen").is_dir() else 0,
        log=directory / "logs" / "coordinator.log",
        max_failures=run.spec.failure_policy.max_failures_without_progress,
    )


def _be_node(plan: "SessionPlan", coordinator: LocalCoordinator, num_workers: int, index: int) -> int:
    settings = NodeSettings(
        run=plan.run.metadata.name,
        node=str(index),
        coordinator_host="127.0.0.1",
        coordinator_port=coordinator.port,
        address="127.0.0.1",
        recovery="in-process",
        run_directory=Path(plan.run_directory),
        fingerprint=fingerprint(plan),
        shares_host=True,
    )
    return run_node(plan, settings, num_workers=num_workers, start_method="fork")
