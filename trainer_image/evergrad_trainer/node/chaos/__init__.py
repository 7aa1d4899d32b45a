"""Disturbances for a run on this machine: a plan from a seed, the hand that carries it out, and a summary."""
