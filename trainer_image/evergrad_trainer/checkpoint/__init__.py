"""Checkpoints: how a run saves its state, publishes it durably and atomically, finds it and loads it."""
