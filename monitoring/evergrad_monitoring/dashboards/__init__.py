"""The dashboards of the chart: all runs, one run, the operator."""

from evergrad_monitoring.dashboards.fleet import build_fleet
from evergrad_monitoring.dashboards.operator import build_operator
from evergrad_monitoring.dashboards.parts import render_dashboard
from evergrad_monitoring.dashboards.run import build_run

__all__ = ["DASHBOARDS"]

DASHBOARDS = {
    "evergrad-fleet": render_dashboard(build_fleet()),
    "evergrad-run": render_dashboard(build_run()),
    "evergrad-operator": render_dashboard(build_operator()),
}
"""JSON of each dashboard by its uid."""
