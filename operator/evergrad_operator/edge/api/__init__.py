"""Requests to the API server: transport, lease, tokens, access checks and events."""
