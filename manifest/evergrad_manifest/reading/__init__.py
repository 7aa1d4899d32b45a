"""Reads a manifest: YAML with line numbers, overlays, and a description of every problem."""
