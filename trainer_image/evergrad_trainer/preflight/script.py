"""Checks a script before its first process: the program exists, and its workers have devices."""

from collections.abc import Iterator
from pathlib import Path

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.envelope.script import Script
from evergrad_manifest.errors import Problem
from evergrad_manifest.script_files import is_module_found, script_problems
from evergrad_trainer.base.machine import Machine
from evergrad_trainer.preflight.memory import Finding


def check_script(script: Script, base_directory: Path) -> Iterator[Finding]:
    """Check that the program and its working directory exist.

    For a module, only its specification is searched, because an import hook may provide it.
    """
    problems = script_problems(script, base_directory=base_directory)
    yield from (Finding("error", problem) for problem in problems)
    program = script.program
    if program.kind == "module" and not is_module_found(
        script, base_directory=base_directory
    ):
        why = "it is neither in the working directory nor on this interpreter's path"
        remedy = "Check its name and workingDirectory, or install it"
        yield Finding(
            "warning",
            Problem(
                "spec.script.command[1]",
                f"the module {program.name!r} was not found",
                why,
                remedy,
            ),
        )
    elif not problems:
        yield Finding(
            "ok",
            Problem("spec.script.command", f"the {program.kind} {program.name} is there"),
        )


def check_script_workers(
    run: TrainingRun, machine: Machine, *, num_workers: int
) -> Iterator[Finding]:
    """Count the processes that the script will see, and check that each of them has an accelerator."""
    least, most = run.spec.nodes.min, run.spec.nodes.max or run.spec.nodes.min
    if 0 < machine.num_accelerators < num_workers:
        what = f"{num_workers} workers share {machine.num_accelerators} accelerators"
        remedy = f"Use at most {machine.num_accelerators} workers a node, or leave workersPerNode out"
        yield Finding(
            "warning",
            Problem(
                "spec.workersPerNode",
                what,
                "the script chooses the device by LOCAL_RANK",
                remedy,
            ),
        )
        return
    worlds = (
        f"{least * num_workers}"
        if least == most
        else f"{least * num_workers} to {most * num_workers}"
    )
    noun = "worker" if worlds == "1" else "workers"
    yield Finding(
        "ok", Problem("spec.nodes", f"{worlds} {noun} in all, {num_workers} a node")
    )
