"""Parses values that users write: numbers with units, and Kubernetes' quantities."""
