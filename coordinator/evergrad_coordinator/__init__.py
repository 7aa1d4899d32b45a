"""The coordinator of a run, and all that operator and trainer must agree on. Standard library only."""
