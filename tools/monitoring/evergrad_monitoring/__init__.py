"""Alerts and dashboards, generated from the metrics catalogue into the chart. Nothing here is shipped."""
