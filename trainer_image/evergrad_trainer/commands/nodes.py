"""``evergrad run --nodes`` and its coordinator: several elastic nodes on this machine."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad_common.contract import ExitCode, RunFile, build_soft_limit
from evergrad_coordinator.protocol import Recovery
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.reading.loader import LoadedManifest
from evergrad_trainer.checkpoint.generations import newest_generation
from evergrad_trainer.commands.chaos import load_chaos
from evergrad_trainer.commands.run_arguments import fewest_nodes, machine_and_workers
from evergrad_trainer.commands.script_runs import prepare_script
from evergrad_trainer.node.fingerprint import fingerprint, fingerprint_of_plan
from evergrad_trainer.node.local import (
    CoordinatorSettings,
    LocalCoordinator,
    LocalNodes,
    run_local,
)
from evergrad_trainer.node.run import (
    choose_start_method,
    prepare_process,
    run_node,
    started_later,
)
from evergrad_trainer.node.script_node import run_script_node, with_grace_of
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.owner import own_run_directory
from evergrad_trainer.run.provenance import record_process
from evergrad_trainer.run.resume import inspect_directory

if TYPE_CHECKING:
    from evergrad_trainer.worker.session import SessionPlan

_SOFT_MARGIN_SECONDS = 10


def run_nodes(
    plan: "SessionPlan",
    *,
    num_nodes: int | None,
    chaos_seed: int | None,
    num_workers: int,
    num_accelerators: int,
) -> int:
    """Train a typed run on nodes of this machine; returns the exit code.

    ``num_nodes``: number of nodes; None: one node that other nodes cannot join. ``chaos_seed``: seed for
    killing and freezing processes at random; None: no processes are killed or frozen.
    """
    is_only_node = num_nodes is None
    num_nodes = num_nodes or 1
    prepare_process()
    method = choose_start_method("auto", num_accelerators=num_accelerators)
    directory = Path(plan.run_directory)
    # Create the coordinator before any node, because it chooses its port and the nodes' settings contain it.
    coordinator = LocalCoordinator(
        coordinator_settings(
            plan.run, directory, num_nodes=num_nodes, recovery=plan.run.recovery
        )
    )

    nodes: LocalNodes

    def be_node(index: int) -> int:
        settings = _node_settings(
            plan.run,
            plan.base_directory,
            directory,
            coordinator,
            index,
            recovery=plan.run.recovery,
        )
        shared = settings.fingerprint | fingerprint_of_plan(plan)
        settings = dataclasses.replace(
            settings, is_only_node=is_only_node, fingerprint=shared
        )
        # The start-up of a node that comes back is its own, and not as old as the command.
        own = plan if nodes.starts[index] == 1 else started_later(plan)
        return run_node(own, settings, num_workers=num_workers, start_method=method)

    if chaos_seed is not None:
        chaos = load_chaos()
        nodes = disturbed = chaos.make_nodes(be_node, num_nodes)
        return chaos.run_disturbed(chaos_seed, coordinator, disturbed, directory=directory)
    nodes = LocalNodes(be_node, num_nodes)
    return run_local(coordinator, nodes)


def run_script(
    loaded: LoadedManifest,
    directory: RunDirectory,
    *,
    num_nodes: int,
    asked_workers: int | None,
) -> int:
    """Run a script on ``num_nodes`` nodes of this machine; returns the exit code.

    ``asked_workers``: number of processes per node; None: the number in the manifest.
    """
    run, base = loaded.run, loaded.base_directory
    run_state = inspect_directory(directory, run, extend=False)
    if run_state.state == "complete":
        print(f"{run.metadata.name} is complete, in {directory.path}. Nothing to do.")
        return int(ExitCode.DONE)
    _, num_workers = machine_and_workers(asked_workers, run, forks_above=0)
    prepare_process()

    def serve() -> int:
        world_size = num_workers * num_nodes
        record_process(
            directory, run=run, command=tuple(sys.argv), world_size=world_size, generation=0
        )
        coordinator = LocalCoordinator(
            coordinator_settings(run, directory.path, num_nodes=num_nodes, recovery="fresh")
        )

        def be_node(index: int) -> int:
            own = _node_settings(
                run, base, directory.path, coordinator, index, recovery="fresh"
            )
            return run_script_node(
                run.script, base, with_grace_of(run.script, own), num_workers=num_workers
            )

        # A script may need longer to save than a typed run's node needs to leave.
        grace_seconds = max(
            LocalNodes.grace_seconds, float(run.script.grace_period_seconds)
        )
        with own_run_directory(directory):
            return run_local(
                coordinator, LocalNodes(be_node, num_nodes, grace_seconds=grace_seconds)
            )

    return prepare_script(loaded, directory, serve)()


def coordinator_settings(
    run: TrainingRun, directory: Path, *, num_nodes: int, recovery: Recovery
) -> CoordinatorSettings:
    """Settings of a local coordinator for ``num_nodes`` nodes, to which more may be added by hand up to the
    manifest's maximum."""
    bounds = run.spec.nodes
    # --nodes may exceed the file's maximum. Nodes can be added up to the larger of both.
    most = max(num_nodes, bounds.max or bounds.min)
    state = directory / RunFile.COORDINATOR
    state.mkdir(parents=True, exist_ok=True)
    checkpoints = RunDirectory(directory).checkpoints
    # The coordinator waits as long as the nodes for a script that saves.
    grace = 0 if run.spec.script is None else run.spec.script.grace_period_seconds
    return CoordinatorSettings(
        run=run.metadata.name,
        min_nodes=fewest_nodes(run, num_nodes),
        max_nodes=most,
        expect=num_nodes,
        recovery=recovery,
        state=state / "generation",
        address=directory / RunFile.COORDINATOR_ADDRESS,
        first_generation=newest_generation(checkpoints)
        if (checkpoints / "gen").is_dir()
        else 0,
        log=directory / "logs" / "coordinator.log",
        max_failures=run.spec.failure_policy.max_failures_without_progress,
        extra=(
            *(("--hold-joins",) if recovery == "fresh" else ()),
            *build_soft_limit(grace + _SOFT_MARGIN_SECONDS),
        ),
    )


def _node_settings(
    run: TrainingRun,
    base_directory: Path,
    directory: Path,
    coordinator: LocalCoordinator,
    index: int,
    *,
    recovery: Recovery,
) -> NodeSettings:
    return NodeSettings(
        run=run.metadata.name,
        node=str(index),
        coordinator_host="127.0.0.1",
        coordinator_port=coordinator.port,
        address="127.0.0.1",
        recovery=recovery,
        run_directory=directory,
        token=coordinator.token,
        fingerprint=fingerprint(run, base_directory),
        shares_host=True,
    )
