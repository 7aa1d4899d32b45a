"""Converts runs, pods and events to values, and values to text for a terminal. Pure."""
