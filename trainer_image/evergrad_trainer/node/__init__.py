"""One node of a run: the supervisor of its workers, what it shows of them, and several nodes on
one machine."""
