"""One node of a run: the supervisor of its workers, its metrics and logs, and several nodes on one
machine."""
