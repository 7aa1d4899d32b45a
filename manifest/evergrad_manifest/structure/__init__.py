"""Structural schemas of Kubernetes' own structures, and a check of values against them."""
