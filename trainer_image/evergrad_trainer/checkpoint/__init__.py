"""Checkpoints: what a run saves, how it becomes durable and visible at once, and how it is found again."""
