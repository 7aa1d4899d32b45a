"""Signals and the local launcher."""
