"""Data of a run: its preparation, and the order, mixture and streams, which are pure functions."""
