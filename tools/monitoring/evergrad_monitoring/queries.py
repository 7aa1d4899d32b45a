"""Collects every released query: of panels, annotations, variables, alerts and pages."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from grafana_foundation_sdk.models.dashboard import Dashboard

from evergrad_monitoring.alerts import ALERTS, THRESHOLDS
from evergrad_monitoring.dashboards import BOARDS

Kind = Literal["panel", "annotation", "variable", "alert", "page"]
_BLOCK: Final = re.compile(r"^```promql\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Query:
    """PromQL, and its place.

    ``where``: ``UID: TITLE (LETTER)`` for a panel, ``UID: NAME`` for an annotation of a dashboard,
    ``UID: $NAME`` for a variable, the name for an alert, and ``PAGE: COMMENT`` for a page; COMMENT is the
    line before the query.
    """

    kind: Kind
    where: str
    expression: str

    def fill(self, variables: Mapping[str, str]) -> str:
        """Return the expression with values for the variables that Grafana fills in.

        Raises ValueError if a variable has no value in ``variables``.
        """
        filled = self.expression
        # Replace the longest names first, because one name may begin with another.
        for name in sorted(variables, key=len, reverse=True):
            filled = filled.replace(f"${name}", variables[name])
        if "$" in filled:
            raise ValueError(f"{self.where}: a variable has no value in {filled}")
        return filled


def collect_queries(docs: Path) -> tuple[Query, ...]:
    """Return all queries of dashboards and alerts, and the queries in ``promql`` blocks of the pages below
    ``docs``.

    Alerts use the chart's default thresholds.
    """
    found = [query for uid, board in BOARDS.items() for query in _of_dashboard(uid, board)]
    for alert in ALERTS:
        expression = alert.expression
        for key, value in THRESHOLDS.items():
            expression = expression.replace(f"<{key}>", f"{value:g}")
        found.append(Query("alert", alert.name, expression))
    for page in sorted(docs.rglob("*.md")):
        found += _of_page(str(page.relative_to(docs)), page.read_text("utf-8"))
    return tuple(found)


def _of_dashboard(uid: str, board: Dashboard) -> Iterator[Query]:
    for panel in board.panels or ():
        for target in getattr(panel, "targets", None) or ():
            where = f"{uid}: {panel.title} ({target.ref_id})"
            yield Query("panel", where, target.expr)
    for annotation in board.annotations.list_val or ():
        yield Query("annotation", f"{uid}: {annotation.name}", annotation.expr or "")
    for variable in board.templating.list_val or ():
        text = variable.query
        if variable.type_val == "query" and isinstance(text, str):
            # Grafana queries the matching series, and reads the label from them.
            selector = text.removeprefix("label_values(").rpartition(", ")[0]
            yield Query("variable", f"{uid}: ${variable.name}", selector)


def _of_page(page: str, text: str) -> Iterator[Query]:
    """Yield the queries of a page. In a block, a comment precedes each query, and an empty line or the end
    follows."""
    for block in _BLOCK.findall(text):
        for part in block.strip().split("\n\n"):
            comment, _, expression = part.partition("\n")
            if not comment.startswith("# ") or not expression:
                raise ValueError(f"docs/{page}: a query has no comment before it: {part}")
            yield Query("page", f"{page}: {comment[2:]}", expression)
