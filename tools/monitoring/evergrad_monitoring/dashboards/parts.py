"""What the dashboards are made of: panels, variables, links, and their JSON.

Built with Grafana's Foundation SDK, which checks no value; tests hold the result to the rules of Grafana's
dashboard linter.
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
"""Uids, which links between dashboards use."""
OF_RUN: Final = 'run_namespace="$run_namespace", run="$run"'
"""Selector of the series of the run that is looked at."""
_TAG: Final = "evergrad"
_HEIGHT: Final = 8
_WIDTH: Final = 24

Query = tuple[str, str]
"""PromQL and the legend of its series."""
P = TypeVar(
    "P", timeseries.Panel, stat.Panel, table.Panel, heatmap.Panel, statetimeline.Panel
)


MOST_SERIES: Final = 10
"""Series of a query that may have any number of them. A legend of more than twenty is no legend."""


def top(expression: str) -> str:
    """The largest series of a query at each moment, for labels whose values nobody bounds."""
    return f"topk({MOST_SERIES}, {expression})"


def plot(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    shape: Literal["lines", "stack", "share", "any"] = "lines",
) -> timeseries.Panel:
    """Something over time, half as wide as the page. ``unit`` is Grafana's name of one.

    ``shape``: ``lines`` from 0 on, a ``stack`` of parts of a whole, a ``share`` from 0 to 1, or lines of
    ``any`` sign.
    A gap stays a gap: a run that stands still has no value, and its last one would be wrong.
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
    """The newest value, large. ``legend``: what tells several of them apart."""
    queries = [(expression, legend or title)]
    panel = _begin(stat.Panel(), title, description, queries, span)
    calculation = common.ReduceDataOptions().calcs(["lastNotNull"])
    return panel.unit(unit).reduce_options(calculation).height(4)


def states(
    title: str, description: str, expression: str, legend: str
) -> statetimeline.Panel:
    """Which of several states held when."""
    panel = _begin(
        statetimeline.Panel(), title, description, [(expression, legend)], _WIDTH
    )
    return panel.unit("short").height(5).merge_values(True)


def buckets(title: str, description: str, unit: str, expression: str) -> heatmap.Panel:
    """The distribution of a histogram over time; ``expression`` keeps the label ``le``."""
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
    """A table with a row a run, or whatever else the queries are by: their newest values, joined by the
    labels that they share.

    ``columns``: heading to PromQL. ``states``: heading of the query whose labels say all, its value being
    always 1. ``links``: URL that a cell leads to, by its column.
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
    """A dashboard with the data source to choose, and links to the others."""
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
    """A variable with the values that the label ``of`` has in the series of ``selector``."""
    variable = dashboard.QueryVariable(name).label(label).datasource(PROMETHEUS)
    variable = variable.query(f"label_values({selector}, {of})")
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def mark(name: str, expression: str, color: str) -> dashboard.AnnotationQuery:
    """A mark in all panels where ``expression`` has a value."""
    annotation = dashboard.AnnotationQuery().name(name).datasource(PROMETHEUS)
    return annotation.enable(True).icon_color(color).expr(expression)


def render_dashboard(board: Board) -> str:
    """The JSON that Grafana imports, with what the SDK leaves open filled in."""
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
