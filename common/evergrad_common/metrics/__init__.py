"""The catalogue of metrics, as data: name, unit, aggregation and comparison of each metric.

Each endpoint builds its series from the catalogue, and the reference pages build their tables. Run files, the
report and compare-runs read COLUMNS. A recipe declares its own metrics with :func:`declare`.
"""

from evergrad_common.metrics.columns import (
    COLUMNS,
    DERIVED,
    MOST_DECLARED,
    SHOWN,
    Column,
    Compared,
    declare,
)
from evergrad_common.metrics.pages import fill_tables, render_columns, render_series
from evergrad_common.metrics.series import PREFIX, Aggregate, Kind, Series
from evergrad_common.metrics.services import COORDINATOR, OPERATOR
from evergrad_common.metrics.throughput import Throughput
from evergrad_common.metrics.trainer import NODE, TRAINER

__all__ = [
    "COLUMNS",
    "COORDINATOR",
    "DERIVED",
    "MOST_DECLARED",
    "NODE",
    "OPERATOR",
    "PREFIX",
    "SHOWN",
    "TRAINER",
    "Aggregate",
    "Column",
    "Compared",
    "Kind",
    "Series",
    "Throughput",
    "declare",
    "fill_tables",
    "render_columns",
    "render_series",
]
