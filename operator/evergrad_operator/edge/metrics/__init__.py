"""Metrics, health checks and pages that the operator serves."""
