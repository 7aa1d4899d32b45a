"""Arguments and machine facts that ``run`` and ``preflight`` share."""

import argparse
from pathlib import Path

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.reading.arguments import add_manifest_arguments
from evergrad_trainer.machine import Machine, observe_machine


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The manifest's arguments, ``--run-directory`` and ``--workers``."""
    add_manifest_arguments(parser)
    parser.add_argument(
        "--run-directory", type=Path, metavar="DIR", help="where everything is written (default: runs/<name>)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="training processes on this machine, instead of spec.workersPerNode",
    )


def check_arguments_of_script(args: argparse.Namespace) -> None:
    """What only a typed run knows is refused, not passed over. Raises ConfigurationError."""
    why = "the steps of a script are its own"
    problems = [
        Problem(
            option,
            "has no meaning for spec.script",
            why,
            "Leave it out, or give the script an argument of its own",
        )
        for option, is_given in (
            ("--stop-after-steps", args.stop_after_steps is not None),
            ("--extend", args.extend),
            ("--chaos", args.chaos is not None),
        )
        if is_given
    ]
    raise_if(problems, ConfigurationError)


def run_directory_of(args: argparse.Namespace, run: TrainingRun) -> Path:
    """``--run-directory``, else ``runs/<name>`` below the current directory."""
    return Path(args.run_directory) if args.run_directory is not None else Path("runs") / run.metadata.name


def machine_and_workers(
    args: argparse.Namespace, run: TrainingRun, *, forks_above: int | None = None
) -> tuple[Machine, int]:
    """This machine, and how many training processes it will run: as asked for, else one an accelerator, else 1.

    ``forks_above``: this process forks workers if there are more than that; it then must not touch an accelerator, not even to
    ask for its memory. None: it never does.
    """
    # torch takes a second to import, which `evergrad --help` need not wait for.
    from evergrad_trainer.distributed import accelerator_memory_bytes, count_accelerators

    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    accelerators = 0 if wants_cpu else count_accelerators()
    num_workers = int(args.workers or run.spec.workers_per_node or max(1, accelerators))
    may_touch = forks_above is None or num_workers <= forks_above
    memory = accelerator_memory_bytes() if accelerators and may_touch else None
    return observe_machine(num_accelerators=accelerators, accelerator_memory_bytes=memory), num_workers
