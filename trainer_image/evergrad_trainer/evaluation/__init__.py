"""Evaluation between two steps."""
