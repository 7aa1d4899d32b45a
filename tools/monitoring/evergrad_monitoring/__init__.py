"""Generates alerts and dashboards of the chart from the metrics catalogue. This package is not released."""
