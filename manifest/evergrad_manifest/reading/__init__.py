"""Reading a manifest: YAML with line numbers, overlays, what is wrong with it."""
