"""Models: how they are built, shared between processes, and written out."""
