"""The validating webhook: server, certificate and request limits."""
