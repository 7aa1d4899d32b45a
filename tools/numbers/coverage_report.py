"""Prints branch coverage by package, and names what the tests do not cover.

``python tools/numbers/coverage_report.py FILE``: FILE is written by ``coverage json``. A line counts as
covered if it ran, and a branch if it was taken, so a package's number is (lines that ran + branches taken) ÷
(lines + branches). The report has no limit, and it never fails because of a number.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_SHOWN: Final = 25
"""Number of files in the list of the least covered ones."""
_FEW: Final = 10
"""A file with fewer lines and branches that are not covered is left out of that list."""


@dataclass
class Coverage:
    """What was covered of a package. ``never``: its files of which no line ran."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_taken: int = 0
    never: list[str] = field(default_factory=list)

    def add(self, path: str, summary: dict[str, Any]) -> None:
        """Add a file by its summary in the JSON report."""
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_taken += summary["covered_branches"]
        if summary["num_statements"] and not summary["covered_lines"]:
            self.never.append(path)

    @property
    def percent(self) -> float:
        """Covered lines and branches as a percentage of all."""
        total = self.lines + self.branches
        return 100 * (self.lines_run + self.branches_taken) / total if total else 100.0


def package_of(path: str) -> str:
    """Return the package of a file: the first folder of its path that begins with ``evergrad``."""
    return next((part for part in Path(path).parts if part.startswith("evergrad")), path)


def report(files: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the report. ``files``: path → its entry in the JSON report."""
    packages: dict[str, Coverage] = defaultdict(Coverage)
    left: list[tuple[int, float, str]] = []
    for path, entry in sorted(files.items()):
        summary = entry["summary"]
        packages[package_of(path)].add(path, summary)
        missing = summary["missing_lines"] + summary["missing_branches"]
        if missing >= _FEW and summary["covered_lines"]:
            left.append((missing, summary["percent_covered"], path))

    lines = [
        f"{'package':24}{'lines':>8}{'run':>8}{'branches':>10}{'taken':>8}{'covered':>9}"
    ]
    total = Coverage()
    for name, one in sorted(packages.items()):
        lines.append(_row(name, one))
        total.lines += one.lines
        total.lines_run += one.lines_run
        total.branches += one.branches
        total.branches_taken += one.branches_taken
    lines.append(_row("all", total))
    never = [path for one in packages.values() for path in one.never]
    if never:
        lines += ["", f"no line ran of {len(never)} files:"]
        lines += [f"  {path}" for path in sorted(never)]
    if left:
        lines += ["", "lines and branches that are not covered, by file:"]
        lines += [
            f"  {missing:5}  {percent:5.1f} %  {path}"
            for missing, percent, path in sorted(left, reverse=True)[:_SHOWN]
        ]
    return lines


def _row(name: str, one: Coverage) -> str:
    return (
        f"{name:24}{one.lines:8,}{one.lines_run:8,}{one.branches:10,}{one.branches_taken:8,}"
        f"{one.percent:7.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    found = json.loads(args.file.read_text(encoding="utf-8"))
    print("\n".join(report(found["files"])))


if __name__ == "__main__":
    main()
