"""The operator's edge around the core: API server, cache, work queue, reconciliation, webhook and metrics."""
