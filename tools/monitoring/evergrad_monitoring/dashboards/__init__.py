"""The dashboards of the chart: all runs, one run, the operator."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Dashboard

from evergrad_monitoring.dashboards.fleet import build_fleet
from evergrad_monitoring.dashboards.operator import build_operator
from evergrad_monitoring.dashboards.parts import FLEET, OPERATOR, RUN, render_dashboard
from evergrad_monitoring.dashboards.run import build_run

__all__ = ["BOARDS", "DASHBOARDS"]

BOARDS: Final[dict[str, Dashboard]] = {
    FLEET: build_fleet().build(),
    RUN: build_run().build(),
    OPERATOR: build_operator().build(),
}
"""Each dashboard by its uid, as an object of the SDK."""
DASHBOARDS: Final[dict[str, str]] = {
    uid: render_dashboard(board) for uid, board in BOARDS.items()
}
"""JSON of each dashboard, by its uid."""
