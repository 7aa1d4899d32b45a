"""``evergrad preflight``: everything that can be known before the first step, without training."""

import argparse
import json
import sys

from evergrad_common.contract import ExitCode
from evergrad_manifest.reading.loader import load_from
from evergrad_trainer.commands.run_arguments import (
    add_run_arguments,
    machine_and_workers,
    run_directory_of,
)
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import inspect_directory

NAME = "preflight"
EXAMPLES = """\
  evergrad preflight trainingrun.yaml
  evergrad preflight trainingrun.yaml --workers 2 --json"""

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "error  "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``run`` that decide what is checked."""
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(args: argparse.Namespace) -> int:
    """Print every finding. Returns 64 if one of them is an error."""
    # Import these here: torch and the model's library take seconds to import, which --help should not need.
    from evergrad_trainer.preflight.checks import examine
    from evergrad_trainer.run.start_request import describe_findings

    loaded = load_from(args)
    run_directory = run_directory_of(args.run_directory, loaded.run)
    inspect_directory(
        RunDirectory(run_directory),
        loaded.run,
        extend=True,
        base_directory=loaded.base_directory,
    )
    machine, num_workers = machine_and_workers(args.workers, loaded.run)
    findings = examine(
        loaded.run,
        base_directory=loaded.base_directory,
        run_directory=run_directory,
        machine=machine,
        num_workers=num_workers,
    ).findings
    described = describe_findings([(one.level, one.problem) for one in findings])
    if args.json:
        print(json.dumps(described, indent=2))
    else:
        # Print errors to stderr, where they are visible even if a pipeline processes stdout.
        for finding in findings:
            print(
                f"{_MARKS[finding.level]}  {finding.problem}",
                file=sys.stderr if finding.level == "error" else sys.stdout,
            )
    return int(ExitCode.DONE if described["fine"] else ExitCode.USER_ERROR)
