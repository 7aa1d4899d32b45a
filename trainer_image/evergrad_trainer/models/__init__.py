"""Builds models, shards them between processes, and writes them to files."""
