"""The loop and the step of a training run, the wiring of their parts, and evaluation."""
