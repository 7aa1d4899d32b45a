"""The run directory: layout, owner, records, provenance, and the check that a manifest may resume it."""
