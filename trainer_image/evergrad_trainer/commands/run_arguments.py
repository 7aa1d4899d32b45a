"""Arguments and machine facts that ``run`` and ``preflight`` share."""

import argparse
from pathlib import Path

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.reading.loader import add_manifest_arguments
from evergrad_trainer.base.machine import Machine, observe_machine


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the manifest's arguments, ``--run-directory`` and ``--workers``."""
    add_manifest_arguments(parser)
    parser.add_argument(
        "--run-directory",
        type=Path,
        metavar="DIR",
        help="run directory (default: runs/<name>)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of training processes on this machine, instead of spec.workersPerNode",
    )


def run_directory_of(given: Path | None, run: TrainingRun) -> Path:
    """Return ``--run-directory`` if it is given, or else ``runs/<name>`` in the current directory."""
    return given if given is not None else Path("runs") / run.metadata.name


def fewest_nodes(run: TrainingRun, num_nodes: int) -> int:
    """Return the fewest nodes with which ``--nodes N`` continues: the file's minimum, but at most N."""
    return min(run.spec.nodes.min, num_nodes)


def world_sizes_of(
    run: TrainingRun, *, num_workers: int, num_nodes: int | None = None
) -> list[int]:
    """Return all numbers of workers that may train together when nodes of ``num_workers`` leave and return.

    ``num_nodes``: the value of ``--nodes``; None: as many as the file allows. For example, 2 workers per node
    and 1 to 3 nodes give [2, 4, 6].
    """
    bounds = run.spec.nodes
    fewest, most = bounds.min, bounds.largest
    # Nodes that a user adds run `evergrad node`, which checks the file's maximum itself.
    if num_nodes is not None:
        fewest, most = fewest_nodes(run, num_nodes), num_nodes
    return [num_workers * nodes for nodes in range(fewest, most + 1)]


def machine_and_workers(
    asked: int | None, run: TrainingRun, *, forks_above: int | None = None
) -> tuple[Machine, int]:
    """Observe this machine, and choose its number of training processes.

    ``asked``: the value of ``--workers``. Without it, the number is from the manifest, or else the number of
    accelerators, or else 1.

    ``forks_above``: if there are more workers, this process forks them and must not use an accelerator, not
    even to read its memory size. None: this process never forks.
    """
    # Import torch here: it takes a second, for which `evergrad --help` should not wait.
    from evergrad_trainer.distributed.process_groups import (
        accelerator_memory_bytes,
        count_accelerators,
    )

    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    accelerators = 0 if wants_cpu else count_accelerators()
    num_workers = asked or run.spec.workers_per_node or max(1, accelerators)
    # Reading the memory size starts the device's runtime, which does not survive a fork.
    may_touch = forks_above is None or num_workers <= forks_above
    memory = accelerator_memory_bytes() if accelerators and may_touch else None
    return observe_machine(
        num_accelerators=accelerators, accelerator_memory_bytes=memory
    ), num_workers


def delay_compiler(run: TrainingRun, machine: Machine, *, forks: bool) -> None:
    """Delay the import of torch's compiler until its first use, if this run may not need it.

    ``forks``: this process forks the workers. Each worker would have to import the compiler again, so the
    import is delayed only if no worker needs the compiler.
    """
    if run.spec.training is None:
        return  # a script may use the compiler
    runtime = run.spec.training.runtime
    compiles = runtime.compile == "on" or (
        forks and runtime.compile == "auto" and machine.num_accelerators > 0
    )
    # DTensor uses the compiler's symbolic algebra for every shape.
    shards = forks and runtime.parallelism != "dataParallel"
    if compiles or shards:
        return
    # Import torch here: it takes a second, for which `evergrad --help` should not wait.
    from evergrad_trainer.base import torch_private

    torch_private.delay_compiler()
