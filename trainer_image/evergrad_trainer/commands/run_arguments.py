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
    """Return ``--run-directory``, else ``runs/<name>`` below the current directory."""
    return given if given is not None else Path("runs") / run.metadata.name


def fewest_nodes(run: TrainingRun, num_nodes: int) -> int:
    """Nodes that ``--nodes`` N continues with at the least: the file's minimum, or N if that is smaller."""
    return min(run.spec.nodes.min, num_nodes)


def world_sizes_of(
    run: TrainingRun, *, num_workers: int, num_nodes: int | None = None
) -> list[int]:
    """Every number of workers that may train together as nodes of ``num_workers`` each leave and come back.

    ``num_nodes``: those of ``--nodes``; None: as many as the file allows.
    """
    bounds = run.spec.nodes
    fewest, most = bounds.min, bounds.largest
    # Nodes that are added by hand come with `evergrad node`, which reckons with the file's maximum itself.
    if num_nodes is not None:
        fewest, most = fewest_nodes(run, num_nodes), num_nodes
    return [num_workers * nodes for nodes in range(fewest, most + 1)]


def machine_and_workers(
    asked: int | None, run: TrainingRun, *, forks_above: int | None = None
) -> tuple[Machine, int]:
    """Observe this machine, and choose how many training processes it will run.

    ``asked``: ``--workers``; without it the manifest decides, else one an accelerator, else 1.

    ``forks_above``: this process forks workers if there are more than that; it then must not touch an
    accelerator, not even to ask for its memory. None: it never does.
    """
    # torch takes a second to import, which `evergrad --help` need not wait for.
    from evergrad_trainer.distributed.process_groups import (
        accelerator_memory_bytes,
        count_accelerators,
    )

    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    accelerators = 0 if wants_cpu else count_accelerators()
    num_workers = asked or run.spec.workers_per_node or max(1, accelerators)
    # Asking for the memory starts the device's runtime, which does not survive a fork.
    may_touch = forks_above is None or num_workers <= forks_above
    memory = accelerator_memory_bytes() if accelerators and may_touch else None
    return observe_machine(
        num_accelerators=accelerators, accelerator_memory_bytes=memory
    ), num_workers


def delay_compiler(run: TrainingRun, machine: Machine, *, forks: bool) -> None:
    """Leave torch's compiler out of what this process imports, where only its first use needs it.

    ``forks``: this process forks the workers, each of which would load the compiler again: it is left out
    only where none of them needs it.
    """
    if run.spec.training is None:
        return  # who knows what a script does
    runtime = run.spec.training.runtime
    compiles = runtime.compile == "on" or (
        forks and runtime.compile == "auto" and machine.num_accelerators > 0
    )
    # DTensor asks the compiler's algebra about every shape.
    shards = forks and runtime.parallelism != "dataParallel"
    if compiles or shards:
        return
    # A second of imports, which `evergrad --help` need not wait for.
    from evergrad_trainer.base import torch_private

    torch_private.delay_compiler()
