"""Evaluates checkpoints of a run beside it, or after it: `evergrad evaluate`."""
