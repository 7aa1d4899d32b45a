"""Builds the parts of the dashboards: panels, variables and links, and renders their JSON.

It uses Grafana's Foundation SDK, which validates no values. Tests check the result with the rules of
Grafana's dashboard linter.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import Dashboard as Board
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
FLEET, RUN, OPERATOR = "evergrad-fleet", "evergrad-run", "evergrad-operator"
"""UIDs of the dashboards, for the links between them."""
OF_RUN: Final = 'run_namespace="$run_namespace", run="$run"'
"""Selector of the series of the selected run."""
_TAG: Final = "evergrad"
_HEIGHT: Final = 8
_WIDTH: Final = 24

Query = tuple[str, str]
"""PromQL and the legend of its series."""
P = TypeVar(
    "P", timeseries.Panel, stat.Panel, table.Panel, heatmap.Panel, statetimeline.Panel
)


MOST_SERIES: Final = 10
"""Maximum number of series of an unbounded query, so that its legend stays readable."""


def top(expression: str) -> str:
    """Return the largest series of a query at each moment, for labels with an unbounded number of values."""
    return f"topk({MOST_SERIES}, {expression})"


def plot(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    shape: Literal["lines", "stack", "share", "any"] = "lines",
) -> timeseries.Panel:
    """Return a panel of values over time, half as wide as the page. ``unit`` is Grafana's name of a unit.

    ``shape``: ``lines`` from 0, a ``stack`` of parts of a whole, a ``share`` from 0 to 1, or lines of ``any``
    sign. Gaps are not connected: a paused run has no value, and its last value would be wrong.
    """
    panel = _begin(timeseries.Panel(), title, description, queries, _WIDTH // 2)
    panel = panel.unit(unit).span_nulls(False)
    panel = panel.legend(common.VizLegendOptions().show_legend(True))
    if shape == "stack":
        stacking = common.StackingConfig().mode(StackingMode.NORMAL)
        panel = panel.stacking(stacking).fill_opacity(30)
    if shape != "any":
        panel = panel.min(0)
    return panel.max(1) if shape == "share" else panel


def number(
    title: str,
    description: str,
    unit: str,
    expression: str,
    *,
    span: int = 4,
    legend: str = "",
) -> stat.Panel:
    """Return a panel with the newest value. ``legend`` distinguishes several values."""
    queries = [(expression, legend or title)]
    panel = _begin(stat.Panel(), title, description, queries, span)
    calculation = common.ReduceDataOptions().calcs(["lastNotNull"])
    return panel.unit(unit).reduce_options(calculation).height(4)


def states(
    title: str, description: str, expression: str, legend: str
) -> statetimeline.Panel:
    """Return a panel that shows which of several states was active over time."""
    panel = _begin(
        statetimeline.Panel(), title, description, [(expression, legend)], _WIDTH
    )
    return panel.unit("short").height(5).merge_values(True)


def buckets(title: str, description: str, unit: str, expression: str) -> heatmap.Panel:
    """Return a panel with a histogram's distribution over time. ``expression`` keeps the label ``le``."""
    panel = _begin(heatmap.Panel(), title, description, [], 12)
    query = _query(expression, "{{le}}", 0).format(PromQueryFormat.HEATMAP)
    return panel.with_target(query).unit(unit)


def rows(
    title: str,
    description: str,
    columns: Mapping[str, str],
    *,
    states: str = "",
    links: Mapping[str, str] | None = None,
) -> table.Panel:
    """Return a table with the newest values of the queries, joined by their common labels (a row per run).

    ``columns``: heading → PromQL. ``states``: heading of the query whose value is always 1 and whose labels
    are the information. ``links``: column → URL of its cells.
    """
    panel = _begin(table.Panel(), title, description, [], _WIDTH).unit("short")
    headings, excluded = {}, {"Time": True}
    for number_, (heading, expression) in enumerate(columns.items()):
        query = _query(expression, heading, number_).instant().format(PromQueryFormat.TABLE)
        panel = panel.with_target(query)
        headings[f"Value #{_letter(number_)}"] = heading
        if heading == states:
            excluded[f"Value #{_letter(number_)}"] = True
    for column, url in (links or {}).items():
        link = {"title": "Open", "url": url, "targetBlank": False}
        panel = panel.override_by_name(
            column, [DynamicConfigValue(id_val="links", value=[link])]
        )
    order = {"excludeByName": excluded, "renameByName": headings, "indexByName": {}}
    panel = panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    return panel.with_transformation(
        DataTransformerConfig(id_val="organize", options=order)
    )


def begin_dashboard(title: str, uid: str, description: str) -> dashboard.Dashboard:
    """Return a dashboard with a data source variable and links to the other dashboards."""
    board = (
        dashboard.Dashboard(title).uid(uid).description(description).tags([_TAG]).readonly()
    )
    board = board.time("now-6h", "now").refresh("1m").tooltip(DashboardCursorSync.CROSSHAIR)
    board = board.with_variable(
        dashboard.DatasourceVariable("datasource").type("prometheus").label("Data source")
    )
    others = dashboard.DashboardLink("Evergrad").type(DashboardLinkType.DASHBOARDS)
    return board.link(
        others.tags([_TAG]).as_dropdown(True).include_vars(True).keep_time(True)
    )


def choose(name: str, label: str, selector: str, of: str) -> dashboard.QueryVariable:
    """Return a variable with the values of the label ``of`` in the series of ``selector``."""
    variable = dashboard.QueryVariable(name).label(label).datasource(PROMETHEUS)
    variable = variable.query(f"label_values({selector}, {of})")
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def mark(name: str, expression: str, color: str) -> dashboard.AnnotationQuery:
    """Return an annotation that marks all panels when ``expression`` has a value."""
    annotation = dashboard.AnnotationQuery().name(name).datasource(PROMETHEUS)
    return annotation.enable(True).icon_color(color).expr(expression)


def render_dashboard(board: Board) -> str:
    """Return the JSON that Grafana imports, including fields that the SDK leaves out."""
    made: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(board))
    for count, panel in enumerate(made["panels"], start=1):
        panel["id"] = count
        if panel.get("options") is None:
            panel["options"] = {}
    for variable in made["templating"]["list"]:
        variable.pop("id", None)
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def _begin(
    panel: P,
    title: str,
    description: str,
    queries: list[Query] | tuple[Query, ...],
    span: int,
) -> P:
    panel = panel.title(title).description(description).datasource(PROMETHEUS)
    panel = panel.span(span).height(_HEIGHT)
    for count, (expression, legend) in enumerate(queries):
        panel = panel.with_target(_query(expression, legend, count))
    return panel


def _query(expression: str, legend: str, count: int) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expression).legend_format(legend)
    return query.ref_id(_letter(count)).datasource(PROMETHEUS)


def _letter(count: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[count]
