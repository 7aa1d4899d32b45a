"""Writes report.html and report.md of a run directory, finished or not."""

import time
from dataclasses import dataclass
from pathlib import Path

from evergrad_coordinator.contract import RunFile
from evergrad_coordinator.text import utc
from evergrad_trainer.report.facts import Facts, gather_facts
from evergrad_trainer.report.html import render_html
from evergrad_trainer.report.markdown import render_markdown
from evergrad_trainer.report.plots import build_plots
from evergrad_trainer.run_directory import RunDirectory, reported, write_atomically


@dataclass(frozen=True)
class ReportPaths:
    """Paths of a report, and the facts it shows."""

    html: Path
    markdown: Path
    facts: Facts


def write_report(
    run_directory: Path, *, output: Path | None = None, now: float | None = None
) -> ReportPaths:
    """Write both forms into ``output`` (default: the run directory). The same files give the same report but
    for its time.

    Raises RunDirectoryError for what is no run directory, for unreadable files, and where the report cannot
    be written.
    """
    # Everything is read before the first byte is written: a bad row must not leave half a report.
    facts = gather_facts(RunDirectory(run_directory))
    created = utc(time.time() if now is None else now)
    target = output or run_directory
    with reported(target, what="cannot be created"):
        target.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(
        html=target / RunFile.REPORT_HTML,
        markdown=target / RunFile.REPORT_MARKDOWN,
        facts=facts,
    )
    # Each whole or not at all: somebody may be looking at the one before.
    write_atomically(paths.html, render_html(facts, build_plots(facts), created=created))
    write_atomically(paths.markdown, render_markdown(facts, created=created))
    return paths
