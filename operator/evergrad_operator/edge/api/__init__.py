"""Requests to the API server: transport, lease, tokens, permission checks and events."""
