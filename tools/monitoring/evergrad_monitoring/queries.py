"""Every query that is shipped: of panels, annotations and variables, of alerts, and of pages."""

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
    """PromQL, with where it stands.

    ``where``: of a panel ``UID: TITLE (LETTER)``, of a dashboard's annotation ``UID: NAME``, of its variable
    ``UID: $NAME``; of an alert its name; of a page ``PAGE: COMMENT``, the comment being the line before it.
    """

    kind: Kind
    where: str
    expression: str

    def fill(self, variables: Mapping[str, str]) -> str:
        """The expression with values for the variables that Grafana fills in.

        Raises ValueError for one that has no value here.
        """
        filled = self.expression
        # The longest first: one name may begin with another.
        for name in sorted(variables, key=len, reverse=True):
            filled = filled.replace(f"${name}", variables[name])
        if "$" in filled:
            raise ValueError(f"{self.where}: a variable has no value in {filled}")
        return filled


def collect_queries(docs: Path) -> tuple[Query, ...]:
    """All queries of dashboards and alerts, and those in ``promql`` blocks of the pages below ``docs``.

    Alerts have the thresholds that are the chart's defaults.
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
            # Grafana asks for the series that match, and takes the label from them.
            selector = text.removeprefix("label_values(").rpartition(", ")[0]
            yield Query("variable", f"{uid}: ${variable.name}", selector)


def _of_page(page: str, text: str) -> Iterator[Query]:
    """Each query of a block is preceded by a comment and followed by an empty line or the end."""
    for block in _BLOCK.findall(text):
        for part in block.strip().split("\n\n"):
            comment, _, expression = part.partition("\n")
            if not comment.startswith("# ") or not expression:
                raise ValueError(f"docs/{page}: a query has no comment before it: {part}")
            yield Query("page", f"{page}: {comment[2:]}", expression)
