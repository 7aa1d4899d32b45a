"""Reading a manifest: YAML with line numbers, human numbers, overlays, and every problem at once."""
