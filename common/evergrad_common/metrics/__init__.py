"""The catalogue of metrics, as data: what is measured, in which unit, and how it is put together and
compared.

Each endpoint builds its series from here, the reference pages their tables; files, report and compare-runs
read COLUMNS. A recipe declares its own metrics by :func:`declare`.
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
