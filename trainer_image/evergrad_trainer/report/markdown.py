"""Renders the report as Markdown: the same facts, for terminals, diffs and issue trackers."""

import re
from collections.abc import Sequence

from evergrad_trainer import __version__
from evergrad_trainer.report.facts import ReportFacts
from evergrad_trainer.report.tables import Table

_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")
_WORLD_NOTE = "Training went on with the state in memory: no restart, no checkpoint read."
_RESULTS_NOTE = (
    "Checkpoints that `evergrad evaluate` has measured, while the run lived or after it."
)
_MARKUP = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def escape(text: str) -> str:
    """Return ``text`` as plain words on one line, whatever it contains."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()).translate(_MARKUP))


def render_markdown(facts: ReportFacts, *, created: str) -> str:
    """Return the report as text that ends with a newline."""
    parts = [
        f"# {escape(facts.name)}",
        f"**{escape(facts.status.label)}**: {escape(facts.status.detail)}",
        " · ".join(map(escape, facts.subtitle)),
        _table(
            ("", "", ""),
            [(figure.title, figure.value, figure.note) for figure in facts.figures],
            right={1},
        ),
    ]
    if facts.warnings:
        parts += [
            "## Worth knowing",
            "\n".join(f"- {escape(warning)}" for warning in facts.warnings),
        ]
    if facts.shares:
        heads = ("Spent on", "Time", "Share", "Time of all processes")
        shares = [
            (one.text, one.duration, one.percent, one.process_time) for one in facts.shares
        ]
        parts += ["## Where the time went", _table(heads, shares, right={1, 2, 3})]
    if pods := facts.pod_time:
        parts += [
            "## Where the time of pods went",
            escape(pods.summary),
            _render(pods.table),
        ]
    for title, table, empty in (
        ("Evaluations", facts.evaluations, "Nothing was evaluated."),
        ("Checkpoints", facts.checkpoints, "No checkpoint has been published yet."),
        ("Restarts", facts.restarts, "None: the run was trained in one go."),
    ):
        parts += [f"## {title}", _render(table) if table.rows else empty]
    if facts.results.rows:
        parts += ["## Evaluated beside the run", _RESULTS_NOTE, _render(facts.results)]
    if facts.changes.rows:
        parts += ["## Changes of the file", _render(facts.changes)]
    if facts.worlds.rows:
        parts += [
            "## Changes of the world",
            _WORLD_NOTE,
            _render(facts.world_causes),
            _render(facts.worlds),
        ]
    if facts.environment:
        parts += ["## Environment", _table(("", ""), facts.environment, right=set())]
    if facts.configuration:
        # Use a fence that is longer than any run of backticks inside; otherwise the block would end there.
        runs = re.findall(r"`+", facts.configuration)
        fence = "`" * max(3, 1 + max(map(len, runs), default=0))
        text = f"{fence}yaml\n{facts.configuration.rstrip()}\n{fence}"
        parts += ["## Resolved configuration", text]
    parts.append(
        f"Written by evergrad {__version__} on {created} UTC. Loss: {facts.loss_unit}; the "
        "last row of a step counts."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _render(table: Table) -> str:
    # Show the gap as a separate row, so that the rows around it do not look consecutive.
    rows = list(table.rows)
    if table.left_out:
        note = f"… {table.left_out:,} rows are left out here"
        rows.insert(table.gap, (note, *[""] * (len(table.titles) - 1)))
    right = {index for index, title in enumerate(table.titles) if title in table.numeric}
    return _table(table.titles, rows, right=right)


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: set[int],
) -> str:
    # Numbers are aligned to the right, as on the page.
    rule = ["---:" if index in right else "---" for index in range(len(titles))]
    lines = [
        [escape(title) for title in titles],
        rule,
        *([escape(cell) for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
