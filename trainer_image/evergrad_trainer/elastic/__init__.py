"""Signals, the local launcher, and what keeps a run going while processes come and go."""
