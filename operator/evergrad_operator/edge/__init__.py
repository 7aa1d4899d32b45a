"""The operator's edge: API server, cache, work queue, webhook and metrics around the core."""
