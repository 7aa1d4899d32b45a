"""Structural schemas of Kubernetes' structures, and a check of values against them."""
