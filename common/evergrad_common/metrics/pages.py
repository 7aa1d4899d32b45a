"""Renders the tables of the reference pages from the catalogue."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from evergrad_common.metrics.columns import COLUMNS
from evergrad_common.metrics.series import Series
from evergrad_common.metrics.services import COORDINATOR, OPERATOR
from evergrad_common.metrics.trainer import NODE, TRAINER


def render_series(series: Iterable[Series]) -> str:
    """Return the Markdown table of these series."""
    lines = [
        "| Metric | Type | Unit | Over several | Further labels | Meaning |",
        "|---|---|---|---|---|---|",
    ]
    for one in series:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        meaning = f"{one.help}.{' ' if one.note else ''}{one.note}"
        # Replace twice: the first pass skips an empty cell directly after another one.
        cells = (f"`{one.exported}`", one.kind, one.unit, one.over_several, labels, meaning)
        lines.append(
            f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
        )
    return "\n".join(lines) + "\n"


def render_columns() -> str:
    """Return the table of metrics.jsonl for the page of the run directory."""
    lines = ["| Key | Unit | Over ranks | Meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{one.name}` | {one.unit} | {one.aggregate} | {one.help} |".replace(
            "|  |", "| |"
        )
        for one in COLUMNS
    ]
    return "\n".join(lines) + "\n"


TABLES: Final[Mapping[str, str]] = {
    "trainer": render_series(TRAINER),
    "node": render_series(NODE),
    "coordinator": render_series(COORDINATOR),
    "operator": render_series(OPERATOR),
    "columns": render_columns(),
}
"""Tables that pages of the reference contain between ``<!-- table: NAME -->`` and ``<!-- end -->``."""


def fill_tables(page: str) -> str:
    """Return the page with its tables as the catalogue has them now. Raises KeyError for an unknown table."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{TABLES[found[2]]}\n{found[3]}",
        page,
        flags=re.DOTALL,
    )
