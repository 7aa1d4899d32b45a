"""Observers of a run: JSON lines, progress, logs, Prometheus, and the accounts of where time went."""
