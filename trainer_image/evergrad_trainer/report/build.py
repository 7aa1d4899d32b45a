"""Writes report.html, report.md and summary.json of a run directory, finished or not."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad_common.contract import RunFile
from evergrad_common.text import utc
from evergrad_trainer.report.facts import gather_facts
from evergrad_trainer.report.html import render_html
from evergrad_trainer.report.markdown import render_markdown
from evergrad_trainer.report.plots import build_plots
from evergrad_trainer.report.summary import hash_files, summarise
from evergrad_trainer.run.directory import (
    RunDirectory,
    dumps_strict,
    reported,
    write_atomically,
)


@dataclass(frozen=True)
class ReportPaths:
    """Paths of a report, and the facts it shows."""

    html: Path
    markdown: Path
    summary: Path
    figures: Mapping[str, Any]
    """The content of ``summary``."""


def write_report(
    run_directory: Path,
    *,
    output: Path | None = None,
    cluster_run: Path | None = None,
    now: float | None = None,
    has_page: bool = True,
) -> ReportPaths:
    """Write page, text and summary into ``output`` (default: the run directory).

    The same files give the same report but for its time. ``cluster_run``: file with the run's object of a
    cluster, for the time of its pods. ``has_page``: without it no plots are drawn, which takes seconds, and a
    page of an earlier state is removed, because it would contradict the text.

    Raises RunDirectoryError for what is no run directory, for unreadable files, and where the report cannot
    be written.
    """
    # Everything is read before the first byte is written: a bad row must not leave half a report.
    facts = gather_facts(RunDirectory(run_directory), cluster_run=cluster_run)
    created = utc(time.time() if now is None else now)
    target = output or run_directory
    with reported(target, what="cannot be created"):
        target.mkdir(parents=True, exist_ok=True)
    html, markdown = target / RunFile.REPORT_HTML, target / RunFile.REPORT_MARKDOWN
    # Each whole or not at all: somebody may be looking at the one before.
    if has_page:
        write_atomically(html, render_html(facts, build_plots(facts), created=created))
    else:
        with reported(html, what="cannot be removed"):
            html.unlink(missing_ok=True)
    write_atomically(markdown, render_markdown(facts, created=created))

    # Last: it holds hashes of all that was written.
    made = (html, markdown) if has_page else (markdown,)
    files = hash_files(RunDirectory(run_directory), *made)
    figures = {**summarise(facts), "created": created, "files": files}
    summary = target / RunFile.SUMMARY
    write_atomically(summary, dumps_strict(figures, indent=2) + "\n")
    return ReportPaths(html, markdown, summary, figures)
