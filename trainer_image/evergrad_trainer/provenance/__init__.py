"""Provenance: the versions, hardware and commands of a run, kept beside its results."""
