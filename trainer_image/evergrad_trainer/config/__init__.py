"""The manifest: typed, frozen and pure. Reads no device, network or environment, and imports no torch."""
