"""Evaluates checkpoints of a run while it trains or afterwards: `evergrad evaluate`."""
