"""The informer cache and its indexes, the watches that feed it, and the work queue."""
