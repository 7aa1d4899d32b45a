"""``evergrad report``: write report.html and report.md of a run, finished or not."""

import argparse
from pathlib import Path

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.observers.events import changes_of
from evergrad_trainer.records import record_row

NAME = "report"
EXAMPLES = """\
  evergrad report runs/docs-lm
  evergrad report runs/docs-lm --output /tmp/docs-lm
  evergrad report runs/docs-lm --json | jq .goodput.ratio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the run, and where its report goes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write (default: the run directory)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the paths and the run's figures as one JSON document",
    )


def execute(args: argparse.Namespace) -> int:
    """Write both files.

    Raises RunDirectoryError for what is no run directory or cannot be read or written.
    """
    # Plots take a second to import; --help should not.
    from evergrad_trainer.report.build import write_report
    from evergrad_trainer.run_directory import dumps_strict

    paths = write_report(args.run, output=args.output)
    if not args.json:
        print(f"report: {paths.html}")
        print(f"        {paths.markdown}")
        return int(ExitCode.DONE)

    # The figures of the page, unrounded: programs compare them, people read the page.
    facts, goodput, steps = paths.facts, paths.facts.goodput, paths.facts.steps
    changes = [change for event in facts.history.events for change in changes_of(event)]
    summary = {
        "html": str(paths.html),
        "markdown": str(paths.markdown),
        "run": facts.name,
        "status": facts.status.label,
        "step": steps.newest_step,
        "loss": float(steps.loss[-1]) if len(steps) else None,
        "tokens": int(steps.tokens.sum()),
        "evaluations": [record_row(one) for one in facts.history.evaluations],
        "goodput": {
            "ratio": goodput.ratio,
            "elapsed_seconds": goodput.elapsed_seconds,
            "productive_seconds": goodput.productive_seconds,
            "lost_seconds": goodput.lost_seconds,
        },
        "changes": [change.__dict__ for change in changes],
        "restarts": [dict(restart.__dict__) for restart in goodput.restarts],
        "world_changes": [dict(change.__dict__) for change in goodput.changes],
        "warnings": list(facts.warnings),
    }
    print(dumps_strict(summary, indent=2))
    return int(ExitCode.DONE)
