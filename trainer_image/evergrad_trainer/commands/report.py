"""``evergrad report``: write report.html, report.md and summary.json of a run, finished or not."""

import argparse
from pathlib import Path

from evergrad_common.contract import ExitCode

NAME = "report"
EXAMPLES = """\
  evergrad report runs/docs-lm
  evergrad report runs/docs-lm --output /tmp/docs-lm
  kubectl get trun docs-lm -o json | evergrad report docs-lm --cluster-run -
  evergrad report runs/docs-lm --json | jq .goodput.ratio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the run, and where its report goes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="output directory (default: the run directory)",
    )
    parser.add_argument(
        "--cluster-run",
        type=Path,
        metavar="FILE",
        help="output of `kubectl get trun NAME -o json` (- for standard input), which adds pod-hours, "
        "GPU-hours, waste and cost",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the paths and the run's figures as one JSON document",
    )


def execute(args: argparse.Namespace) -> int:
    """Write all three files.

    Raises RunDirectoryError for what is no run directory or cannot be read or written.
    """
    # Plots take a second to import; --help should not.
    from evergrad_trainer.report.build import write_report
    from evergrad_trainer.run.directory import dumps_strict

    # The file of that name is this process's standard input, on Linux and macOS alike.
    object_path = Path("/dev/stdin") if args.cluster_run == Path("-") else args.cluster_run
    paths = write_report(args.run, output=args.output, cluster_run=object_path)
    if not args.json:
        print(f"report: {paths.html}")
        print(f"        {paths.markdown}")
        print(f"        {paths.summary}")
        return int(ExitCode.DONE)

    # The figures of the page, unrounded, and where they went.
    places = {
        "html": str(paths.html),
        "markdown": str(paths.markdown),
        "summary": str(paths.summary),
    }
    print(dumps_strict({**places, **paths.figures}, indent=2))
    return int(ExitCode.DONE)
