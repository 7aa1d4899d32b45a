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
    """Define the arguments for the run, and for the location of its report."""
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

    Raises RunDirectoryError if the directory is not a run directory, or cannot be read or written.
    """
    # Import this here, because plots take a second to import, which --help should not need.
    from evergrad_trainer.report.build import write_report
    from evergrad_trainer.run.directory import dumps_strict

    # This path is the standard input of this process, on Linux and on macOS.
    object_path = Path("/dev/stdin") if args.cluster_run == Path("-") else args.cluster_run
    paths = write_report(args.run, output=args.output, cluster_run=object_path)
    if not args.json:
        print(f"report: {paths.html}")
        print(f"        {paths.markdown}")
        print(f"        {paths.summary}")
        return int(ExitCode.DONE)

    # Print the figures of the page without rounding, and the paths of the files.
    places = {
        "html": str(paths.html),
        "markdown": str(paths.markdown),
        "summary": str(paths.summary),
    }
    print(dumps_strict({**places, **paths.figures}, indent=2))
    return int(ExitCode.DONE)
