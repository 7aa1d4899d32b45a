"""Writes report.html, report.md and summary.json into the directory of a run, finished or not."""

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
    """Paths of a report, and its figures."""

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

    The same files give the same report, except for its time. ``cluster_run``: file with the run's object from
    a cluster, which contains the time of its pods. ``has_page``: if False, no plots are drawn, which takes
    seconds, and an existing page is removed, because it would contradict the text.

    Raises RunDirectoryError if the directory is not a run directory, a file cannot be read, or the report
    cannot be written.
    """
    # Read everything before the first byte is written, so that a bad row leaves no incomplete report.
    facts = gather_facts(RunDirectory(run_directory), cluster_run=cluster_run)
    created = utc(time.time() if now is None else now)
    target = output or run_directory
    with reported(target, what="cannot be created"):
        target.mkdir(parents=True, exist_ok=True)
    html, markdown = target / RunFile.REPORT_HTML, target / RunFile.REPORT_MARKDOWN
    # Replace each file atomically, because a user may be reading the previous report.
    if has_page:
        write_atomically(html, render_html(facts, build_plots(facts), created=created))
    else:
        with reported(html, what="cannot be removed"):
            html.unlink(missing_ok=True)
    write_atomically(markdown, render_markdown(facts, created=created))

    # Write the summary last, because it contains hashes of the other files.
    made = (html, markdown) if has_page else (markdown,)
    files = hash_files(RunDirectory(run_directory), *made)
    figures = {**summarise(facts), "created": created, "files": files}
    summary = target / RunFile.SUMMARY
    write_atomically(summary, dumps_strict(figures, indent=2) + "\n")
    return ReportPaths(html, markdown, summary, figures)
