"""Runs, pods and events as values, and as text for a terminal. Pure."""
