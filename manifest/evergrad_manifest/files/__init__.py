"""The Python files of a task, with the local modules that they import."""
